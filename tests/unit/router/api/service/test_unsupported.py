"""Paths and methods that are not served: the answer says what to use."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from router_fakes import Router, message_of

from router.config import RouterConfig

MakeRouter = Callable[..., Router]


@pytest.mark.parametrize(
    ("path", "instead"),
    [
        ("/v1/embeddings", "/v1/completions"),
        ("/v1/audio/speech", "/v1/chat/completions"),
        ("/v1/images/generations", "/v1/chat/completions"),
        *((f"/v1/{path}", "/v1/chat/completions") for path in ("assistants", "threads/1/messages", "edits")),
        ("/v1/moderations", "/v1/chat/completions"),
        *((f"/v1/{path}", "start the server with `--batch-dir`") for path in ("files", "batches")),
        *((f"/v1/{path}", "/v1/completions") for path in ("engines", "engines/x/completions", "rerank")),
        ("/v1/fine_tuning/jobs", "not served"),
    ],
)
async def test_what_is_not_served_says_what_is(router: Router, path: str, instead: str) -> None:
    for method in ("POST", "GET"):
        answer = await router.request(method, path)
        assert answer.status_code == 404 and answer.json()["error_type"] == "not_found"
        assert instead in message_of(answer)


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/completions", "/v1/completions"),
        ("/v1/generate", "/generate"),
        ("/api/generate", "/generate"),
        ("/generate/", "/generate"),
        ("/generate/stream", "/generate_stream"),
        ("/models", "/v1/models"),
        ("/model", "/v1/models"),
        ("/helth", "/health"),
        ("/openapi.jsn", "/openapi.json"),
        ("/v1/respond", None),
        ("/" + "generate" * 20, None),
    ],
)
async def test_a_misspelt_path_gets_the_nearest_route(router: Router, path: str, meant: str | None) -> None:
    answer = await router.request("POST", path)
    hint = "GET /docs lists the routes" if meant is None else f"did you mean {meant}?"
    assert message_of(answer) == f"route {path[:128]} not found; {hint}"
    assert answer.json()["error_type"] == "not_found"
    assert answer.status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "takes", "allowed"),
    [
        ("GET", "/generate", "POST", "POST"),
        ("POST", "/health", "GET", "GET, HEAD"),
        ("PUT", "/", "GET or POST", "GET, HEAD, POST"),
        ("DELETE", "/v1/models/some/model", "GET", "GET, HEAD"),
    ],
)
async def test_a_wrong_method_gets_the_right_ones(
    router: Router, method: str, path: str, takes: str, allowed: str
) -> None:
    answer = await router.request(method, path)
    assert answer.status_code == 405 and answer.headers["allow"] == allowed
    assert message_of(answer) == f"{path} takes {takes}, not {method}"
    assert answer.json()["error_type"] == "method_not_allowed"


async def test_routes_of_options_are_suggested_too(make_router: MakeRouter) -> None:
    router = make_router(config=RouterConfig(aip_predict_route="/predict"))
    assert "did you mean /predict?" in (await router.post("/predictt", {})).json()["error"]
