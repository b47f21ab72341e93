"""Random bodies, seeded: whatever is sent, the answer is 200 or a 4xx with the JSON error, and nothing is left over."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hostile.answers import check_error
from hostile.random_bodies import random_request
from router_fakes import Router, is_invalid

from router.config import RouterConfig


@pytest.mark.parametrize("seed", range(4))
async def test_no_body_gives_a_server_error(make_router: Callable[..., Router], seed: int) -> None:
    router = make_router(config=RouterConfig(kserve_api=True))
    source = random.Random(seed)
    statuses: dict[int, int] = {}
    for _ in range(400):
        path, raw = random_request(source)
        answer = await router.post(path, raw=raw)
        statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
        assert answer.status_code in (200, 400) or is_invalid(answer), (path, raw, answer.text)
        if answer.status_code != 200:
            check_error(answer.text, path)
        router.assert_idle()
    assert statuses[200] > 20 and statuses[422] > 20 and statuses[400] > 5, "the bodies reach every layer"
