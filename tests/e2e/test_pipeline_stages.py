"""A pipeline of stages through the whole server: the same answers as from one shard."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from support.running_server import RunningServer, running_server

# The steps of stages are tested without servers in tests/parity/test_chunks.py.
pytestmark = [pytest.mark.e2e, pytest.mark.long]

SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}, "required": ["name"]}
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"ignore_eos": True},
    "drawn": {"seed": 4, "temperature": 0.8, "ignore_eos": True},
    "penalised": {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "ignore_eos": True},
    "JSON": {"grammar": {"type": "json", "value": SCHEMA}},
    "top tokens": {"top_n_tokens": 3},
    "stopped": {"stop": ["9"], "max_new_tokens": 90},
}


@pytest.fixture(scope="module")
def servers() -> Iterator[list[RunningServer]]:
    """One shard, and two stages of two shards."""
    with (
        running_server("demo", "--dtype", "float32") as alone,
        running_server("demo", "--dtype", "float32", "--num-stage", "2", "--num-shard", "2") as staged,
    ):
        yield [alone, staged]


def said(server: RunningServer, parameters: dict[str, Any]) -> Any:
    inputs = "one, two, three, four, one, two, three, four, one, two, three"
    body = {"inputs": inputs, "parameters": {"max_new_tokens": 30, "details": True} | parameters}
    answer = httpx.post(f"{server.url}/generate", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    details = answer.json()["details"]
    top = [[one["id"] for one in place] for place in details.get("top_tokens") or []]
    return answer.json()["generated_text"], [one["id"] for one in details["tokens"]], top, details["finish_reason"]


def test_the_same_answers_alone_and_together(servers: list[RunningServer]) -> None:
    alone, staged = servers
    expected = {kind: said(alone, parameters) for kind, parameters in ASKED.items()}
    twice = [*ASKED, *ASKED]
    with ThreadPoolExecutor(len(twice)) as pool:
        together = list(pool.map(lambda kind: said(staged, ASKED[kind]), twice))
    assert together == [expected[kind] for kind in twice]


def test_several_answers_to_one_request(servers: list[RunningServer]) -> None:
    body = {"model": "demo", "prompt": "one, two,", "n": 3, "seed": 5, "temperature": 0.9, "max_tokens": 12}
    answers = [httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json() for server in servers]
    texts = [[choice["text"] for choice in answer["choices"]] for answer in answers]
    assert texts[0] == texts[1] and len(set(texts[0])) > 1


def test_a_request_that_is_refused_leaves_the_others(servers: list[RunningServer]) -> None:
    _, staged = servers
    bad = {"inputs": "x", "parameters": {"grammar": {"type": "regex", "value": "a("}}}
    assert httpx.post(f"{staged.url}/generate", json=bad, timeout=60).status_code >= 400
    assert said(staged, ASKED["greedy"])[3] == "length"
