"""The short way to the busy routes: the same routes, and nothing but those."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.testclient import TestClient

from router.api.chat import routes as chat
from router.api.completions import routes as completions
from router.api.http.fast_path import Application, endpoints_of
from router.api.tgi import routes as generate
from router.api.tgi import tokenize

BUSY = (generate.routes, chat.routes, completions.routes, tokenize.routes)


def test_all_fixed_paths_of_the_busy_routers():
    endpoints = endpoints_of(BUSY, without=())
    assert endpoints["POST", "/generate_stream"] is generate.generate_stream
    assert endpoints["POST", "/v1/chat/completions"] is chat.chat_completions
    assert len(endpoints) == sum(len(router.routes) for router in BUSY)
    assert ("POST", "/generate") not in endpoints_of(BUSY, without=(None, "/generate"))


def test_fast_and_found_endpoints_meet_the_same_middleware_and_handlers():
    routes = APIRouter()

    @routes.post("/fast")
    @routes.post("/found")
    async def answer(request: Request) -> Response:
        if request.headers.get("fail"):
            raise KeyError("fail")
        assert request.app is app
        return Response(f"{request.scope['endpoint'].__name__} {request.scope['seen']}")

    class Seen:
        def __init__(self, app, *, word):
            self._app, self._word = app, word

        async def __call__(self, scope, receive, send):
            scope["seen"] = scope.get("seen", "") + self._word
            await self._app(scope, receive, send)

    async def handle(request: Request, error: Exception) -> Response:
        return Response("handled", status_code=418)

    app = Application()
    app.include_router(routes)
    app.fast_path = endpoints_of([routes], without=("/found",))
    app.add_middleware(Seen, word="inner")
    app.add_middleware(Seen, word="outer ")
    app.add_exception_handler(KeyError, handle)
    client = TestClient(app)
    assert set(app.fast_path) == {("POST", "/fast")}
    for path in ("/fast", "/found"):
        assert client.post(path).text == "answer outer inner"
        failed = client.post(path, headers={"fail": "yes"})
        assert (failed.status_code, failed.text) == (418, "handled")
        assert client.get(path).status_code == 405
