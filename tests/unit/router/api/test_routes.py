"""What one declaration of a route gives: the route itself, the models of the document, the name of its span."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.testclient import TestClient

from router.api.routes import Routes
from router.api.tgi.schema import GenerateBody, GenerateResponse, StreamEvent
from router.tracing import RequestSpan


async def test_a_route_is_declared_once() -> None:
    routes = Routes("Test")

    @routes.answers("/answer", GenerateBody, GenerateResponse, span="an_answer", event=StreamEvent)
    async def answer(request: Request) -> Response:
        return Response("answered")

    @routes.describes("/one", "/other", span="a_description")
    async def describe(request: Request) -> Response:
        return Response("described")

    app = FastAPI()
    app.include_router(routes)
    client = TestClient(app)
    assert client.post("/answer").text == "answered" and client.get("/answer").status_code == 405
    for path in ("/one", "/other"):
        assert client.get(path).text == "described" and client.head(path).status_code == 200
    assert routes.models == [GenerateBody, StreamEvent] and not routes.is_fast
    assert RequestSpan({"endpoint": answer}, None).name == "an_answer"
    assert RequestSpan({"endpoint": describe}, None).name == "a_description"
