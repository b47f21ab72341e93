"""Builds the HTTP application: routes, error answers, middleware. Starts nothing."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.api.app_state import AppState, errors_of
from router.api.batches import routes as batches_api
from router.api.batches.service import Batches
from router.api.chat import routes as chat
from router.api.completions import routes as completions
from router.api.embeddings.state import PooledState
from router.api.errors import BodyError, ErrorAnswers, InternalError
from router.api.http.fast_path import SEND_BODY, Application, endpoints_of
from router.api.messages import routes as messages
from router.api.openapi import openapi
from router.api.openapi.names import TGI_TITLE
from router.api.pages.pages import add_pages
from router.api.platforms import cloud, kserve
from router.api.responses import routes as responses
from router.api.routes import Routes
from router.api.service import adapters, unsupported
from router.api.service import routes as service
from router.api.service.unsupported import ServedRoutes
from router.api.tgi import routes as generate
from router.api.tgi import tokenize
from router.config import RouterConfig
from router.errors import RouterError
from router.generation import parsed_bodies
from router.keys.accounts import Accounts
from router.metrics import Metrics
from router.request_log import RequestLog
from router.server.authorization import Answer, ApiKeyMiddleware, KeysMiddleware, header
from router.server.exchange import Exchange
from router.tracing import RequestSpan, enter
from wire.tracing import Tracing

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
# FastAPI's own, of which older releases know nothing: it would follow variables that are meant for other programs.
NO_TELEMETRY: Any = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}
_CLIENT_CLOSED_REQUEST = 499  # nginx' status; the client has disconnected

_FAMILIES: tuple[Routes, ...] = (
    generate.routes, chat.routes, completions.routes, tokenize.routes, messages.routes, responses.routes, cloud.routes,
    service.routes,
)  # fmt: skip
"""Every server has these; a new file of `router.api` is entered here."""


def create_app(
    state: AppState | None = None,
    *,
    api_key: str | None = None,
    accounts: Accounts | None = None,
    allow_origins: Sequence[str] = (),
    tracing: Tracing | None = None,
    request_log: RequestLog | None = None,
    batches: Batches | None = None,
) -> FastAPI:
    """Make the application; without `state` only for its document."""
    app = Application(
        title=TGI_TITLE, docs_url=None, redoc_url=None, openapi_url="/api-doc/openapi.json",
        redirect_slashes=False, telemetry=NO_TELEMETRY,
    )  # fmt: skip
    app.state.app_state = state
    app.state.errors = errors = (
        ErrorAnswers("auto", Metrics())
        if state is None
        else ErrorAnswers(state.config.error_format, state.inference.metrics)
    )
    if state is not None:
        _add_optional_routes(app, state.config)
    if batches is not None:
        app.state.batches = batches
        app.include_router(batches_api.routes)
    for routes in (*_FAMILIES, unsupported.routes):
        app.include_router(routes)
    app.add_api_route("/openapi.json", service.openapi_document, methods=["GET", "HEAD"], include_in_schema=False)
    add_pages(app, playground=state is None or not state.config.no_playground)
    optional = kserve.routes.routes if state is not None and state.config.kserve_api else []
    app.state.served_routes = ServedRoutes(
        [*(route for routes in _FAMILIES for route in routes.routes), *optional, *app.routes]
    )
    app.fast_path = endpoints_of(
        (routes for routes in _FAMILIES if routes.is_fast),
        without=() if state is None else (state.config.aip_predict_route, state.config.aip_health_route),
    )
    models = [
        model for routes in (*_FAMILIES, adapters.routes, kserve.routes, batches_api.routes) for model in routes.models
    ]
    limits: object = RouterConfig() if state is None else state.inference.limits
    root_path = None if state is None else state.config.root_path
    app.openapi = lambda: openapi.document(app, models, limits, root_path)  # type: ignore[method-assign]
    app.add_exception_handler(RouterError, _router_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, client_left)
    app.add_exception_handler(Exception, _internal_error)
    methods = ["GET", "POST", "DELETE"]
    add_middleware(app, state, errors.answer, api_key, accounts, allow_origins, methods, tracing, request_log)
    return app


def add_middleware(
    app: FastAPI,
    state: AppState | PooledState | None,
    answer: Answer,
    api_key: str | None,
    accounts: Accounts | None,
    allow_origins: Sequence[str],
    allow_methods: Sequence[str],
    tracing: Tracing | None = None,
    request_log: RequestLog | None = None,
) -> None:
    """Put key, origins and request id around all routes; `answer` refuses."""
    # The last one added is the outermost.
    if accounts is not None:
        app.add_middleware(KeysMiddleware, accounts=accounts, answer=answer)
    elif api_key is not None:
        app.add_middleware(ApiKeyMiddleware, api_key=api_key, answer=answer)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=list(allow_origins) or ["*"],
        allow_methods=allow_methods,
        allow_headers=["*"],
        expose_headers=["*"],  # clients read x-request-id and retry-after
        allow_private_network=True,  # which pages may ask is said by the origins alone
    )
    app.add_middleware(RequestIdMiddleware, tracing=tracing, state=state, request_log=request_log)


def _add_optional_routes(app: FastAPI, config: RouterConfig) -> None:
    """Add optional routes, which win over others."""
    if config.aip_predict_route is not None:
        app.add_api_route(config.aip_predict_route, cloud.vertex, methods=["POST"], include_in_schema=False)
    if config.aip_health_route is not None:
        app.add_api_route(
            config.aip_health_route, service.health, methods=["GET", "HEAD"], include_in_schema=False
        )  # fmt: skip
    if config.lora_root is not None:
        app.include_router(adapters.routes)
    if config.kserve_api:
        app.include_router(kserve.routes)


class RequestIdMiddleware:
    """`x-request-id` in and out, and the span; a draining server closes connections."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        tracing: Tracing | None = None,
        state: AppState | PooledState | None = None,
        request_log: RequestLog | None = None,
    ) -> None:
        self._app = app
        self._request_log = request_log
        self._tracing = tracing
        self._app_state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = header(scope, b"x-request-id")
        request_id = given if _REQUEST_ID.fullmatch(given) else b"%032x" % random.getrandbits(128)
        scope["request_id"] = request_id.decode()
        is_logged = self._request_log is not None and scope["method"] == "POST"
        traceparent = header(scope, b"traceparent").decode("latin-1")
        span = RequestSpan(scope, self._tracing, traceparent, is_logged=is_logged)
        enter(span)
        status = 500

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
                is_draining = self._app_state is not None and self._app_state.inference.is_draining
                if is_draining and not any(name == b"connection" for name, _ in message["headers"]):
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        sending: Send = send_with_id
        exchange = None
        if is_logged and self._request_log is not None and self._request_log.has_bodies:
            exchange = Exchange()
            receive, sending = exchange.receiving(receive), exchange.sending(sending)
            if SEND_BODY in scope:
                scope[SEND_BODY] = exchange.sending(scope[SEND_BODY])
        try:
            await self._app(scope, receive, sending)
        finally:
            parsed_bodies.release()
            span.finish(status)
            if self._request_log is not None and is_logged:
                record = span.usage(status) | ({} if exchange is None else {"path": scope["path"]})
                prompts = {} if span.gen_ai is None else span.gen_ai.prompts
                self._request_log.add(record, prompts, exchange)


async def _router_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RouterError)
    return errors_of(request).answer(error, request.scope)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if error.status_code in (404, 405):
        served: ServedRoutes = request.app.state.served_routes
        found, headers = served.refusal(error.status_code, request.url.path, request.method)
    else:
        found = BodyError(error.status_code, "http_error", str(error.detail))
    return errors_of(request).answer(found, request.scope, headers)


async def client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


async def _internal_error(request: Request, error: Exception) -> Response:
    # The server logs the traceback; a client learns nothing of it.
    return errors_of(request).answer(InternalError(), request.scope)
