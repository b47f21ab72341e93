"""The case "arrivals" of the router's benchmark: its requests, and its rows in the report."""

from __future__ import annotations

import json

import pytest

from benchmarks.router.arrivals import lines
from benchmarks.router.client import ANSWERS, PROMPTS, Arrivals


def test_requests_arrive_at_the_rate_and_have_lengths_of_the_whole_spread() -> None:
    arrivals = Arrivals(rate=50.0, seed=1)
    pauses = [arrivals.pause_s() for _ in range(4000)]
    bodies = [json.loads(arrivals.body()) for _ in range(2000)]
    answers = [body["parameters"]["max_new_tokens"] for body in bodies]
    words = [body["inputs"].count(" the") for body in bodies]
    assert sum(pauses) / len(pauses) == pytest.approx(1 / 50.0, rel=0.1)
    assert sum(answers) / len(answers) == pytest.approx(ANSWERS.mean, rel=0.1)
    assert ANSWERS.least <= min(answers) < 20 and 480 < max(answers) <= ANSWERS.most
    assert min(words) < PROMPTS.least and 1900 < max(words) < PROMPTS.most


def test_no_two_prompts_begin_alike() -> None:
    arrivals = Arrivals(rate=50.0, seed=1)
    assert len({json.loads(arrivals.body())["inputs"][:6] for _ in range(100)}) == 100


def test_the_report_gives_the_time_between_tokens_in_steps() -> None:
    cell = {
        "step_s": 0.01, "running": 51.0, "busy_share": 0.934, "between_tokens_p99_s": 0.018, "starved_share": 0.02,
    }  # fmt: skip
    ((what, figure, _),) = lines({"64 rows, 10 ms steps": cell})
    assert what == "arrivals, 64 rows, 10 ms steps"
    assert figure == (
        "device busy 93.4 % of the time with work, between tokens p99 1.8 steps; 51 rows, router waited for a core 2 %"
    )
