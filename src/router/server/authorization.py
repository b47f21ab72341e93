"""Who may send a request: everyone with the one key, or with a key of a file and within its limits."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.api.errors import MESSAGES, RESPONSES, UnauthorizedError
from router.errors import RouterError
from router.keys.account import Account
from router.keys.accounts import Accounts
from router.tracing import BATCH_OWNER, entered
from wire.keys import Scope as KeyScope

Answer = Callable[[RouterError, Scope], Response]

_ADMIN = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/models/load", "/v1/models/unload")
ACCOUNT = "tercet.account"
"""Member of a request's scope: the account of its key."""
_METRICS = "/metrics"
_KEPT = (RESPONSES + "/", "/v1/files", "/v1/batches")
"""Paths below which clients read what they have sent before."""


class ApiKeyMiddleware:
    """Demands the key of every POST, and of all that is kept for clients; descriptions stay open."""

    def __init__(self, app: ASGIApp, *, api_key: str, answer: Answer) -> None:
        self._app = app
        self._key = api_key.encode()
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _needs_key(scope) and not self._is_allowed(scope):
            await self._answer(UnauthorizedError(), scope)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        if BATCH_OWNER in scope:
            return True
        return hmac.compare_digest(given_key(scope) or b"", self._key)


class KeysMiddleware:
    """Finds each request's account, and holds it to its scopes and limits."""

    def __init__(self, app: ASGIApp, *, accounts: Accounts, answer: Answer) -> None:
        self._app = app
        self._accounts = accounts
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wanted = self._scope_of(scope) if scope["type"] == "http" else None
        if wanted is None:
            await self._app(scope, receive, send)
            return
        account = self._account_of(scope)
        if account is None:
            await self._answer(UnauthorizedError(), scope)(scope, receive, send)
            return
        if (span := entered()) is not None:
            span.account = account
        scope[ACCOUNT] = account
        send = _with_limits(account, scope, send)
        is_limited = scope["method"] == "POST" and wanted == "inference"
        # Among those that run at the same time: batches have a bound of their own.
        is_counted = BATCH_OWNER not in scope
        try:
            account.check_scope(wanted)
            if is_limited:
                account.admit(is_counted=is_counted)
        except RouterError as error:
            await self._answer(error, scope)(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            if is_limited and is_counted:
                account.end()

    def _account_of(self, scope: Scope) -> Account | None:
        if (owner := scope.get(BATCH_OWNER)) is not None:
            return self._accounts.named(owner)
        key = given_key(scope)
        return None if key is None else self._accounts.find(key)

    def _scope_of(self, scope: Scope) -> KeyScope | None:
        """Return what a key must be for; None: the request needs none."""
        if _needs_key(scope):
            return "admin" if scope["path"] in _ADMIN else "inference"
        return "metrics" if scope["path"] == _METRICS and self._accounts.guards_metrics else None


def given_key(scope: Scope) -> bytes | None:
    """Return the key in `authorization`, or as Anthropic's clients send it."""
    scheme, _, key = header(scope, b"authorization").partition(b" ")
    if not scheme and scope["path"].startswith(MESSAGES):
        return header(scope, b"x-api-key")
    return key if scheme.lower() == b"bearer" else None


def header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


def _needs_key(scope: Scope) -> bool:
    path: str = scope["path"]
    return scope["method"] == "POST" or path.startswith(_KEPT)


def _with_limits(account: Account, scope: Scope, send: Send) -> Send:
    """Say in the answer's head what is left."""
    if not account.key.is_limited:
        return send

    async def send_with_limits(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *_headers(account, scope)]
        await send(message)

    return send_with_limits


def _headers(account: Account, scope: Scope) -> list[tuple[bytes, bytes]]:
    is_anthropic = scope["path"].startswith(MESSAGES)
    found: Mapping[str, str] = account.anthropic_headers() if is_anthropic else account.openai_headers()
    return [(name.encode(), value.encode()) for name, value in found.items()]
