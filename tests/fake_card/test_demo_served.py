"""The demo model through the whole server: streams, clients that leave, chunks and preemption at once."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import ANSWER_LIMIT_S, IS_REAL, all_at_once, answer, on_card, on_cpu, reports_in, said, small
from support.metrics_text import metrics_of
from support.running_server import RunningServer

pytestmark = pytest.mark.e2e

START = "Once upon a time"
CONTINUED = " there was a curious dog named"
LONG = "one, two, three, four, five, six, seven, eight, nine, ten, eleven"  # more tokens than a step takes
ASKED: list[tuple[str, dict[str, Any]]] = [
    (START, {}),
    (LONG, {"max_new_tokens": 20, "ignore_eos": True}),
    (START, {"seed": 4, "temperature": 0.8, "do_sample": True, "max_new_tokens": 24, "ignore_eos": True}),
    (LONG, {"repetition_penalty": 1.3, "max_new_tokens": 24, "ignore_eos": True}),
    (START, {"grammar": {"type": "regex", "value": "[a-z ]{12}"}, "max_new_tokens": 12}),
    ("The weather", {"top_n_tokens": 2, "max_new_tokens": 6}),
]
# Five blocks each, of seven: the younger one is preempted, though it may come some twenty steps later.
CROWDED: list[tuple[str, dict[str, Any]]] = [
    (LONG, {"max_new_tokens": 44, "ignore_eos": True}),
    (LONG, {"repetition_penalty": 1.3, "max_new_tokens": 44, "ignore_eos": True}),
]


@pytest.mark.short
def test_the_text_of_the_demo_model(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """With the type of number that a GPU has by default, and in a random order."""
    order = f"random:{request.config.option.seed}"
    options = small(dtype="bfloat16", cuda_graphs=1, max_batch_size=1)
    with on_card("demo", tmp_path / "reports", *options, order=order) as server:
        assert answer(server, START)["generated_text"] == CONTINUED
    assert IS_REAL or sum(report["counters"]["graph_launches"] for report in reports_in(tmp_path / "reports")) > 0


def _leave(server: RunningServer, after: int) -> None:
    """Read some events of a stream, and close the connection."""
    body = {"inputs": START, "parameters": {"max_new_tokens": 60, "ignore_eos": True}}
    with httpx.stream("POST", f"{server.url}/generate_stream", json=body, timeout=ANSWER_LIMIT_S) as stream:
        for number, _ in enumerate(line for line in stream.iter_lines() if line.startswith("data:")):
            if number >= after:
                return


def _streamed(server: RunningServer, inputs: str, parameters: dict[str, Any]) -> str:
    body = {"inputs": inputs, "parameters": {"max_new_tokens": 8} | parameters}
    answered = httpx.post(f"{server.url}/generate_stream", json=body, timeout=ANSWER_LIMIT_S)
    events = [json.loads(line[5:]) for line in answered.text.splitlines() if line.startswith("data:")]
    return str(events[-1]["generated_text"])


def test_all_at_once_is_what_each_says_alone(tmp_path: Path, order: str) -> None:
    """Requests share a cache of fewer tokens than they take in the end: some are preempted. The texts are the CPU's."""
    tight = small(max_batch_total_tokens=112, max_batch_size=4)
    with on_cpu("demo", *small()) as server:
        crowded, expected = (
            [said(answer(server, inputs, **parameters)) for inputs, parameters in asked] for asked in (CROWDED, ASKED)
        )
    with on_card("demo", tmp_path / "reports", *tight, order=order) as server:
        assert all_at_once(server, CROWDED) == crowded
        leavers = [threading.Thread(target=_leave, args=(server, after)) for after in (0, 3)]
        for leaver in leavers:
            leaver.start()
        assert all_at_once(server, ASKED) == expected
        for leaver in leavers:
            leaver.join()
        texts = [_streamed(server, inputs, parameters) for inputs, parameters in ASKED[:2]]
        metrics = metrics_of(httpx.get(f"{server.url}/metrics").text)
    assert texts == [text for text, _, _ in expected[:2]]
    # A real GPU answers one before the next has come.
    assert IS_REAL or sum(value for name, value in metrics.items() if name.startswith("tgi_request_preempted")) > 0
