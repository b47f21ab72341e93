"""Unserved paths and methods: what to use."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from router.api.errors import BodyError, NotServedError
from wire.cli.spelling import closest

routes = APIRouter()

_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_BATCHES = "no files and batches are kept here: start the server with `--batch-dir`, or use `launcher batch`"
_INSTEAD = {
    "assistants": f"assistants are not served; use {_CHAT}",
    "threads": f"threads are not served; use {_CHAT}",
    "engines": f"engines are not served; use {_COMPLETIONS}, and /v1/models for the model's name",
    "edits": f"edits are not served; use {_CHAT}",
    "embeddings": f"embeddings are not served; this server generates text with {_COMPLETIONS}",
    "rerank": f"reranking is not served; this server generates text with {_COMPLETIONS}",
    "moderations": f"moderations are not served; this server generates text with {_CHAT}",
    "audio": f"audio is not served; this server generates text with {_CHAT}",
    "images": f"images are not served; this server generates text with {_CHAT}",
    "files": _BATCHES,
    "batches": _BATCHES,
    "fine_tuning": "fine-tuning is not served; this server generates text with the one model it was started with",
}


async def _refuse(request: Request) -> Response:
    raise NotServedError(_INSTEAD[request.url.path.split("/")[2]])


for _name in _INSTEAD:
    for _path in (f"/v1/{_name}", f"/v1/{_name}/{{rest:path}}"):
        routes.add_api_route(_path, _refuse, methods=["GET", "POST", "DELETE"], include_in_schema=False)


_MOST_COMPARED = 128
"""Characters of a path; a longer one is no misspelt route."""


class ServedRoutes:
    """What this server has instead."""

    def __init__(self, routes: Iterable[BaseRoute], listing: str = "/docs") -> None:
        self._listing = listing
        self._routes = [route for route in routes if isinstance(route, Route) and route.endpoint is not _refuse]
        self._fixed = sorted({route.path for route in self._routes if "{" not in route.path}, key=len)

    def refusal(self, status: int, path: str, method: str) -> tuple[BodyError, dict[str, str]]:
        """Return a 404's or 405's error, and headers."""
        text, headers = self.advice(status, path, method)
        if headers is not None:
            return BodyError(405, "method_not_allowed", text, reason="wrong_method"), headers
        return BodyError(404, "not_found", text, reason="unknown_route"), {}

    def advice(self, status: int, path: str, method: str) -> tuple[str, dict[str, str] | None]:
        """Return a 404's or 405's text, and the latter's headers."""
        if status == 405 and (methods := self._methods(path)):
            text = f"{path} takes {' or '.join(sorted(methods - {'HEAD'}))}, not {method}"
            return text, {"allow": ", ".join(sorted(methods))}
        meant = self._closest(path)
        hint = f"did you mean {meant}?" if meant else f"GET {self._listing} lists the routes"
        return f"route {path[:_MOST_COMPARED]} not found; {hint}", None

    def _methods(self, path: str) -> set[str]:
        return {method for route in self._routes if route.path_regex.match(path) for method in route.methods or ()}

    def _closest(self, path: str) -> str | None:
        if len(path) > _MOST_COMPARED:
            return None
        for written in (path, f"/v1{path}"):
            if found := closest(written, self._fixed, letters_per_edit=5):
                return found
        # A prefix too many (`/v1/generate`) or too few (`/models`).
        longer = [one for one in self._fixed if len(path) > 1 and one.endswith(path.rstrip("/"))]
        shorter = [one for one in reversed(self._fixed) if len(one) > 1 and path.endswith(one)]
        return next(iter(shorter + longer), None)
