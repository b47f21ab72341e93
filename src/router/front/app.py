"""The front's application: its own routes, and every other request passed on to the router of its model."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import AsyncIterator, Sequence

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.api.errors import ErrorAnswers, InternalError
from router.api.http.body import read_bytes
from router.api.http.disconnect import cancel_on_disconnect
from router.api.http.fast_path import SEND_BODY
from router.api.pages.pages import add_pages
from router.errors import GenerationError, RouterError, UnhealthyError
from router.front.choice import MODEL_HEADER, OF_PATH, choose, cut_path, named_in
from router.front.config import FrontConfig
from router.front.errors import ModelFailedError
from router.front.models import Model, Models
from router.front.routes import OwnRoutes
from router.front.stream_errors import error_event
from router.front.upstream import Answer, Headers, NotConnectedError, UpstreamError
from router.keys.account import Account
from router.keys.accounts import Accounts
from router.server.authorization import ACCOUNT, ApiKeyMiddleware, KeysMiddleware, header

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_NOT_PASSED_ON = frozenset({
    b"connection", b"content-length", b"expect", b"keep-alive", b"proxy-authenticate", b"proxy-authorization",
    b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"x-request-id",
})  # fmt: skip
_NOT_PASSED_BACK = frozenset({
    b"connection", b"date", b"keep-alive", b"proxy-connection", b"trailer", b"transfer-encoding", b"upgrade",
    b"x-request-id",
})  # fmt: skip
_OURS = b"x-tercet-"
_FILES = "/v1/files"
"""Uploads are passed on as they come: the model's router bounds them."""
_PAGES = ("/docs", "/playground", "/favicon.ico")
_TRIES = 3
_NEWS_TIMEOUT_S = 5.0
_LARGE_BODY = 1 << 20


class Front:
    """Answers or passes on a request whose key has been checked."""

    def __init__(self, config: FrontConfig, models: Models, own: OwnRoutes, errors: ErrorAnswers) -> None:
        self._config, self._models, self._own, self._errors = config, models, own, errors
        self._pages = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        add_pages(self._pages, playground=not config.no_playground)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            response = await self._answer(request, send)
        except ClientDisconnect:
            return
        except RouterError as error:
            response = self._errors.answer(error, scope)
        except Exception:
            logger.exception("a request has failed", extra={"request_id": scope["request_id"]})
            response = self._errors.answer(InternalError(), scope)
        if response is not None:
            await response(scope, receive, send)

    async def _answer(self, request: Request, send: Send) -> Response | None:
        """Return an answer; None: it has been sent."""
        path = request.scope["path"]
        if path.startswith(_PAGES):
            await self._pages(request.scope, request.receive, send)
            return None
        own = None if OF_PATH in request.scope else self._own.find(request.method, path)
        if own is not None:
            return await own(request)
        if self._models.is_draining:
            raise UnhealthyError
        is_upload = request.method == "POST" and path == _FILES
        body = b""
        if request.method not in ("GET", "HEAD") and not is_upload:
            body = await read_bytes(request, self._config.payload_limit)
        model, asked = choose(request, await self._named(request, body), self._models, self._config.default_model)
        account: Account | None = request.scope.get(ACCOUNT)
        if account is not None:
            account.check_model((asked,) if asked in model.all_adapters else (asked, *model.names))
        if is_upload:
            await self._pass_on(request, model, request.stream(), send)
        else:
            await cancel_on_disconnect(request.receive, self._pass_on(request, model, body, send))
        return None

    async def _named(self, request: Request, body: bytes) -> str | None:
        """Return the model that a body names, where nothing before it does."""
        is_named = OF_PATH in request.scope or MODEL_HEADER in request.headers
        if is_named or not body or "json" not in request.headers.get("content-type", ""):
            return None
        return named_in(body) if len(body) < _LARGE_BODY else await asyncio.to_thread(named_in, body)

    async def _pass_on(self, request: Request, model: Model, body: bytes | AsyncIterator[bytes], send: Send) -> None:
        target, headers = _target(request), _request_headers(request)
        for _ in range(_TRIES):
            news = model.changed
            upstream = await self._models.acquire(model)
            try:
                answer = await upstream.request(request.method, target, headers, body)
                try:
                    await self._pass_back(request, model, answer, send)
                finally:
                    answer.close()
                return
            except NotConnectedError:
                logger.info("%s does not answer: its processes have ended", model.name)
            except UpstreamError:
                raise GenerationError(f"the processes of the model {model.name} have ended") from None
            finally:
                self._models.release(model)
            try:
                async with asyncio.timeout(_NEWS_TIMEOUT_S):
                    await news.wait()
            except TimeoutError:
                pass
        raise ModelFailedError(model.name, "its processes do not answer", 1)

    async def _pass_back(self, request: Request, model: Model, answer: Answer, send: Send) -> None:
        headers = [one for one in answer.headers if one[0] not in _NOT_PASSED_BACK]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        send_body: Send = request.scope[SEND_BODY]
        try:
            while part := await answer.read():
                await send_body({"type": "http.response.body", "body": part, "more_body": True})
        except UpstreamError:
            # An answer of a given length, or of JSON, is cut; a stream can still say why.
            logger.warning("an answer of %s was cut: its processes have ended", model.name)
            if not _is_stream(answer.headers):
                return
            error = GenerationError(f"the processes of the model {model.name} have ended")
            event = error_event(error, request.scope["path"], self._errors, request.scope["request_id"])
            await send_body({"type": "http.response.body", "body": event, "more_body": True})
        await send_body({"type": "http.response.body", "body": b"", "more_body": False})


def _is_stream(headers: Headers) -> bool:
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)


def _target(request: Request) -> bytes:
    """Return path and query as they were sent, without the part that names the model."""
    query: bytes = request.scope["query_string"]
    path: bytes = request.scope["raw_path"]
    return path + (b"?" + query if query else b"")


def _request_headers(request: Request) -> Headers:
    """Return the headers for the model's router; `x-tercet-` is ours alone."""
    headers: Headers = request.scope["headers"]
    kept = [one for one in headers if one[0] not in _NOT_PASSED_ON and not one[0].startswith(_OURS)]
    return [*kept, (b"x-request-id", request.scope["request_id"].encode())]


class _Outermost:
    """Sets a request's id, and cuts `/models/NAME` off its path."""

    def __init__(self, app: ASGIApp, models: Models) -> None:
        self._app, self._models = app, models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        given = header(scope, b"x-request-id")
        request_id = given if _REQUEST_ID.fullmatch(given) else b"%032x" % random.getrandbits(128)
        scope["request_id"] = request_id.decode()
        scope[SEND_BODY] = send
        found = cut_path(scope["path"], self._models)
        if found is not None:
            scope[OF_PATH], rest = found
            if not isinstance(found[0], str):
                # Names may be escaped in the path as it was sent, the rest has as many slashes.
                parts = scope["raw_path"].rsplit(b"/", rest.count("/")) if scope["path"].endswith(rest) else []
                scope["path"], scope["raw_path"] = rest, b"/" + b"/".join(parts[1:])

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
                if self._models.is_draining and not any(name == b"connection" for name, _ in message["headers"]):
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        await self._app(scope, receive, send_with_id)


def create_app(
    front: Front,
    models: Models,
    errors: ErrorAnswers,
    *,
    api_key: str | None,
    accounts: Accounts | None,
    allow_origins: Sequence[str],
) -> ASGIApp:
    """Put key, origins and request id around the front."""
    app: ASGIApp = front
    if accounts is not None:
        app = KeysMiddleware(app, accounts=accounts, answer=errors.answer)
    elif api_key is not None:
        app = ApiKeyMiddleware(app, api_key=api_key, answer=errors.answer)
    app = CORSMiddleware(
        app,
        allow_origins=list(allow_origins) or ["*"],
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["*"],
    )
    return _Outermost(app, models)
