"""Headers of answers with several generations."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from router.api.http.headers import chat_headers, summed_headers
from router.generation.timings import Timings

FIRST = Timings(total=0.55, validation=0.01, queue=0.04, inference=0.5, num_tokens=10)
SECOND = replace(FIRST, total=0.35, inference=0.3, num_tokens=30)


def generation(timings: Timings) -> Any:
    request = SimpleNamespace(num_characters=5, input_length=2)
    return SimpleNamespace(request=request, generated_tokens=timings.num_tokens, timings=timings)


def test_the_time_per_token_is_that_of_all_tokens() -> None:
    both = [generation(FIRST), generation(SECOND)]
    for headers in (
        chat_headers(both, "cpu"),
        summed_headers([both], "cpu"),
        summed_headers([[one] for one in both], ""),
    ):
        assert headers["x-inference-time"] == "800" and headers["x-generated-tokens"] == "40"
        assert headers["x-time-per-token"] == "20"
    assert chat_headers(both[:1], "cpu")["x-time-per-token"] == "50"
