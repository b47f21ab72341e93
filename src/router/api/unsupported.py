"""Routes that other servers have and this one has not: a 404 that says what to use."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from router.api.errors import NotServedError

routes = APIRouter()

_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_INSTEAD = {
    "responses": f"the responses API is not served; use {_CHAT}",
    "messages": f"the messages API is not served; use {_CHAT}",
    "assistants": f"assistants are not served; use {_CHAT}",
    "threads": f"threads are not served; use {_CHAT}",
    "engines": f"engines are not served; use {_COMPLETIONS}, and /v1/models for the model's name",
    "edits": f"edits are not served; use {_CHAT}",
    "embeddings": f"embeddings are not served; this server generates text with {_COMPLETIONS}",
    "rerank": f"reranking is not served; this server generates text with {_COMPLETIONS}",
    "moderations": f"moderations are not served; this server generates text with {_CHAT}",
    "audio": f"audio is not served; this server generates text with {_CHAT}",
    "images": f"images are not served; this server generates text with {_CHAT}",
    "files": f"files are not served; send each request to {_CHAT}",
    "batches": f"batches are not served; send each request to {_CHAT}",
    "fine_tuning": "fine-tuning is not served; this server generates text with the one model it was started with",
}


async def _refuse(request: Request) -> Response:
    raise NotServedError(_INSTEAD[request.url.path.split("/")[2]])


for _name in _INSTEAD:
    for _path in (f"/v1/{_name}", f"/v1/{_name}/{{rest:path}}"):
        routes.add_api_route(_path, _refuse, methods=["GET", "POST", "DELETE"], include_in_schema=False)
