"""Busy routes found in a dictionary, past FastAPI's quarter millisecond of routing.

Middleware and error handlers are the same; other paths go the usual way.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

Endpoint = Callable[[Request], Awaitable[Response]]

# Where the stream writes what follows the head: no middleware of ours looks at that.
SEND_BODY = "tercet.send_body"


def endpoints_of(routers: Iterable[APIRouter], *, without: Iterable[str | None]) -> dict[tuple[str, str], Endpoint]:
    """Map (method, path) to endpoints of fixed paths."""
    taken = set(without)
    return {
        (method, route.path): route.endpoint
        for router in routers
        for route in router.routes
        if isinstance(route, APIRoute) and "{" not in route.path and route.path not in taken
        for method in route.methods or ()
    }


class Application(FastAPI):
    """Answers `fast_path` endpoints, which take the bare request."""

    fast_path: Mapping[tuple[str, str], Endpoint]
    _fast_stack: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (scope["method"], scope["path"]) not in self.fast_path:
            await super().__call__(scope, receive, send)
            return
        if self._fast_stack is None:
            self._fast_stack = self._build_fast_stack()
        scope["app"] = self
        scope[SEND_BODY] = send
        await self._fast_stack(scope, receive, send)

    def _build_fast_stack(self) -> ASGIApp:
        """Stack as the framework: server errors, middleware, handled errors, endpoint."""
        handled = {kind: handler for kind, handler in self.exception_handlers.items() if kind is not Exception}
        stack: ASGIApp = ExceptionMiddleware(self._answer, handlers=handled)
        for middleware in reversed(self.user_middleware):
            stack = middleware.cls(stack, *middleware.args, **middleware.kwargs)
        return ServerErrorMiddleware(stack, handler=self.exception_handlers.get(Exception))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self.fast_path[scope["method"], scope["path"]]
        scope["endpoint"] = endpoint  # as the framework does; spans are named after it
        response = await endpoint(Request(scope, receive, send))
        await response(scope, receive, send)
