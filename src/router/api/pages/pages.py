"""Static pages: the playground at `/`, Swagger UI (of `fastapi_offline`) at `/docs`; all local, with relative
addresses.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles

_STATIC = Path(__file__).parent / "static"
_HTML = re.compile(r"text/html *(;(?! *q *= *0(\.0*)? *(;|$)).*)?")
"""A media range of an Accept header; q=0 means that it is not accepted."""
_SWAGGER_UI = ("fastapi_offline", "static")

_LOCKED = "default-src 'none'; script-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
_CLOSED_FRAME = "frame-ancestors 'none'"
# The playground shows what a model wrote: a browser that knows trusted types refuses to read any text as HTML there.
# The pictures of a chat are data URLs; what a model writes makes no picture.
_PLAYGROUND_POLICY = (
    f"{_LOCKED}style-src 'self'; img-src 'self' data:; require-trusted-types-for 'script'; trusted-types 'none'; "
    f"{_CLOSED_FRAME}"
)
# Swagger UI's style sheet has its pictures in data URLs.
_DOCS_POLICY = f"{_LOCKED}style-src 'self'; img-src 'self' data:; {_CLOSED_FRAME}"

# `no-cache`: kept by the browser, and asked for again each time, so that a newer server is seen at once.
_HEADERS = {"cache-control": "no-cache", "referrer-policy": "no-referrer", "x-content-type-options": "nosniff"}


class _Assets(StaticFiles):
    """Scripts and styles; the current version is 304."""

    def file_response(self, *arguments: Any, **options: Any) -> Response:
        response = super().file_response(*arguments, **options)
        response.headers.update(_HEADERS)
        return response


def add_pages(app: FastAPI, *, playground: bool) -> None:
    """Add the pages' undocumented routes; GET `/` is TGI's (`router.api.service.routes`)."""
    app.add_api_route("/docs", _docs, methods=["GET", "HEAD"], include_in_schema=False)
    app.add_api_route("/docs/", _docs_without_slash, methods=["GET", "HEAD"], include_in_schema=False)
    app.add_api_route("/favicon.ico", _icon, methods=["GET", "HEAD"], include_in_schema=False)
    # A server without it generates all the same; its page says what to install.
    has_swagger_ui = find_spec(_SWAGGER_UI[0]) is not None
    app.mount("/docs", _Assets(directory=_STATIC / "docs", packages=[_SWAGGER_UI] if has_swagger_ui else None))
    if playground:
        app.mount("/playground", _Assets(directory=_STATIC / "playground"))


def asks_for_page(request: Request) -> bool:
    """Whether the client accepts HTML by name, as browsers do."""
    accepted = ",".join(request.headers.getlist("accept")).lower()
    return any(_HTML.fullmatch(one.strip()) for one in accepted.split(","))


def playground() -> Response:
    """The page at `/`."""
    page = _page("playground.html", _PLAYGROUND_POLICY)
    page.headers["vary"] = "Accept"
    return page


async def _docs(request: Request) -> Response:
    return _page("docs.html", _DOCS_POLICY)


async def _docs_without_slash(request: Request) -> Response:
    """Redirect TGI's form, whose relative addresses would miss."""
    return RedirectResponse("../docs")


async def _icon(request: Request) -> Response:
    return FileResponse(_STATIC / "favicon.ico", media_type="image/x-icon", headers=_HEADERS)


def _page(name: str, policy: str) -> Response:
    headers = _HEADERS | {"content-security-policy": policy}
    return FileResponse(_STATIC / name, media_type="text/html", headers=headers)
