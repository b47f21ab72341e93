"""Routes that other servers have: the answer says what to use."""

from __future__ import annotations

import pytest
from router_fakes import Router


@pytest.mark.parametrize(
    ("path", "instead"),
    [
        ("/v1/responses", "/v1/chat/completions"),
        ("/v1/responses/abc", "/v1/chat/completions"),
        ("/v1/embeddings", "/v1/completions"),
        ("/v1/audio/speech", "/v1/chat/completions"),
        ("/v1/images/generations", "/v1/chat/completions"),
        *(
            (f"/v1/{path}", "/v1/chat/completions")
            for path in ("messages", "assistants", "threads/1/messages", "edits")
        ),
        *((f"/v1/{path}", "/v1/chat/completions") for path in ("files", "batches", "moderations")),
        *((f"/v1/{path}", "/v1/completions") for path in ("engines", "engines/x/completions", "rerank")),
        ("/v1/fine_tuning/jobs", "not served"),
    ],
)
async def test_what_is_not_served_says_what_is(router: Router, path: str, instead: str) -> None:
    for method in ("POST", "GET"):
        answer = await router.request(method, path)
        assert answer.status_code == 404 and answer.json()["error_type"] == "not_found"
        assert instead in answer.json()["error"]
