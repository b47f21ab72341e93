"""Paths below `--root-path`, and without it."""

from __future__ import annotations

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from router.api.openapi import openapi
from router.config import RouterConfig
from router.server.app import create_app
from router.server.root_path import RootPath


async def shown(scope: Scope, receive: Receive, send: Send) -> None:
    request = Request(scope)
    await JSONResponse([scope["path"], scope["raw_path"].decode(), request.url.query])(scope, receive, send)


async def get(path: str, **headers: str) -> httpx.Response:
    transport = httpx.ASGITransport(RootPath(shown, "/team/llm"))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        return await client.get(path, headers=headers)


@pytest.mark.parametrize(
    ("path", "seen"),
    [
        ("/team/llm/v1/models?a=b", ["/v1/models", "/v1/models", "a=b"]),
        ("/team/llm/models/a%2Fb/x", ["/models/a/b/x", "/models/a%2Fb/x", ""]),
        ("/team/llm", ["/", "/", ""]),
        ("/te%61m/llm/x", ["/x", "/x", ""]),
        ("/v1/models", ["/v1/models", "/v1/models", ""]),
        ("/team/llmx", ["/team/llmx", "/team/llmx", ""]),
    ],
)
async def test_the_path_is_cut_off_where_it_is(path: str, seen: list[str]) -> None:
    assert (await get(path)).json() == seen


async def test_a_browser_is_sent_to_the_folder() -> None:
    answer = await get("/team/llm", accept="text/html")
    assert answer.status_code == 307 and answer.headers["location"] == "llm/"
    assert (await get("/team/llm/", accept="text/html")).status_code == 200


def test_the_document_names_it() -> None:
    app = create_app()
    assert openapi.document(app, [], RouterConfig(), "/llm")["servers"] == [{"url": "/llm"}]
    assert "servers" not in openapi.document(create_app(), [], RouterConfig())
