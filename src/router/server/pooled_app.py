"""The HTTP application for vectors and scores."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Scope

from router.api.batches import routes as batches_api
from router.api.batches.service import Batches
from router.api.embeddings import openai, ranking, service
from router.api.embeddings import routes as tei
from router.api.embeddings.errors import error_answer, framework_answer
from router.api.embeddings.state import PooledState
from router.api.errors import InternalError
from router.api.http.fast_path import Application, endpoints_of
from router.api.openapi import openapi
from router.api.service.unsupported import ServedRoutes
from router.config import RouterConfig
from router.errors import RouterError
from router.keys.accounts import Accounts
from router.pooling.errors import PoolingError
from router.request_log import RequestLog
from router.server.app import NO_TELEMETRY, add_middleware, client_left

_FAMILIES = (tei.routes, openai.routes, ranking.routes, service.routes)


def create_pooled_app(
    state: PooledState | None = None,
    *,
    api_key: str | None = None,
    accounts: Accounts | None = None,
    allow_origins: Sequence[str] = (),
    request_log: RequestLog | None = None,
    batches: Batches | None = None,
) -> FastAPI:
    """Make the application; without `state` only for its document."""
    app = Application(
        title="Text Embeddings Inference", docs_url=None, redoc_url=None, openapi_url="/api-doc/openapi.json",
        redirect_slashes=False, telemetry=NO_TELEMETRY,
    )  # fmt: skip
    app.state.app_state = state
    families = (*_FAMILIES, batches_api.routes) if batches is not None else _FAMILIES
    app.state.batches = batches
    for routes in families:
        app.include_router(routes)
    app.add_api_route("/openapi.json", service.openapi_document, methods=["GET", "HEAD"], include_in_schema=False)
    app.state.served_routes = ServedRoutes([route for routes in families for route in routes.routes], "/openapi.json")
    app.fast_path = endpoints_of((routes for routes in _FAMILIES if routes.is_fast), without=())
    models = [model for routes in families for model in routes.models]
    limits: object = RouterConfig() if state is None else state.inference.limits
    root_path = None if state is None else state.config.root_path
    app.openapi = lambda: openapi.document(app, models, limits, root_path)  # type: ignore[method-assign]
    app.add_exception_handler(RouterError, _router_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, client_left)
    app.add_exception_handler(Exception, _internal_error)

    def answer(error: RouterError, scope: Scope) -> Response:
        return error_answer(error, scope["path"])

    add_middleware(
        app, state, answer, api_key, accounts, allow_origins, ["GET", "POST", "DELETE"], request_log=request_log
    )
    return app


async def _router_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RouterError)
    state: PooledState = request.app.state.app_state
    if isinstance(error, PoolingError):
        state.inference.refused(error)
    return error_answer(error, request.url.path)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code in (404, 405):
        served: ServedRoutes = request.app.state.served_routes
        text, headers = served.advice(error.status_code, path, request.method)
        if error.status_code == 404 and path.startswith(_GENERATES):
            state: PooledState = request.app.state.app_state
            instead = {"embed": "/v1/embeddings", "rerank": "/rerank", "classify": "/predict"}[state.task]
            text = f"this server generates no text; the model's task is {state.task}: use {instead}"
        return framework_answer(error.status_code, text, path, headers)
    return framework_answer(error.status_code, str(error.detail), path, dict(error.headers or {}))


_GENERATES = (
    "/generate",
    "/v1/chat",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
    "/chat_tokenize",
    "/apply-template",
)


async def _internal_error(request: Request, error: Exception) -> Response:
    # The server logs the traceback; a client learns nothing of it.
    return error_answer(InternalError(), request.url.path)
