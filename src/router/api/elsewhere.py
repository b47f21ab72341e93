"""Routes that other servers have and this one has not: a 404 that says what to use."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from router.api.errors import NotServedError

routes = APIRouter()

_INSTEAD = {
    "responses": "the responses API is not served; use /v1/chat/completions",
    "embeddings": "embeddings are not served; this server generates text with /v1/completions",
    "audio": "audio is not served; this server generates text with /v1/chat/completions",
    "images": "images are not served; this server generates text with /v1/chat/completions",
}


async def _refuse(request: Request) -> Response:
    raise NotServedError(_INSTEAD[request.url.path.split("/")[2]])


for _name in _INSTEAD:
    for _path in (f"/v1/{_name}", f"/v1/{_name}/{{rest:path}}"):
        routes.add_api_route(_path, _refuse, methods=["GET", "POST", "DELETE"], include_in_schema=False)
