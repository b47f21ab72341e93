"""Serves below a path that a proxy did not take away (`--root-path`)."""

from __future__ import annotations

from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from router.api.pages.pages import asks_for_page


class RootPath:
    """Cuts the path off requests that have it."""

    def __init__(self, app: ASGIApp, path: str) -> None:
        """path: Of parts that need no escapes, without a slash at its end."""
        self._app, self._path = app, path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"]
            if path == self._path and scope["method"] == "GET" and asks_for_page(Request(scope)):
                # A page's relative addresses are those of the folder.
                await RedirectResponse(self._path.rsplit("/", 1)[1] + "/")(scope, receive, send)
                return
            if path == self._path or path.startswith(self._path + "/"):
                scope["path"] = path[len(self._path) :] or "/"
                raw: bytes = scope["raw_path"]
                is_plain = raw.startswith(self._path.encode())  # a client may escape letters, too
                scope["raw_path"] = (raw[len(self._path) :] or b"/") if is_plain else quote(scope["path"]).encode()
        await self._app(scope, receive, send)
