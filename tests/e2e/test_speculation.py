"""`--speculate` through the whole server: the same answers in fewer steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from support.launched import sabotaged
from support.metrics_text import metrics_of
from support.running_server import RunningServer, running_server

pytestmark = [pytest.mark.e2e, pytest.mark.long]

SCHEMA = {
    "type": "object",
    "properties": {"occupation": {"enum": ["programmer", "librarian"]}, "departments": {"enum": ["all of them"]}},
    "required": ["occupation", "departments"],
}
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "repeated": {"ignore_eos": True, "max_new_tokens": 90},
    "drawn": {"seed": 4, "temperature": 0.8, "ignore_eos": True, "max_new_tokens": 40},
    "penalised": {"repetition_penalty": 1.3, "ignore_eos": True, "max_new_tokens": 40},
    "JSON": {"grammar": {"type": "json", "value": SCHEMA}},
    "top tokens": {"top_n_tokens": 3},
    "stopped": {"stop": ["9"], "max_new_tokens": 90},
}


# Measured on a machine that is busy with something else, long steps may look so dear that no draft pays.
_CHEAP_STEPS = """
import os
if os.environ.get("RANK"):
    from model_server.features.drafts import costs
    costs.step_costs = lambda *_: [(1, 1e-3), (128, 2e-3)]
"""


# A draft model whose steps seem to cost nothing: the model itself, so that its guesses are right.
_CHEAP_DRAFTS = """
import os
if os.environ.get("RANK"):
    from model_server.features.drafts import costs
    costs.step_costs = lambda runner, *_: [(1, 1e-3 if type(runner).__name__ == "DraftedRunner" else 1e-6)]
"""


# As on a GPU: windows that the device makes, and calls that are submitted before the last one is answered.
_ON_A_DEVICE = (
    _CHEAP_STEPS
    + """
    from model_server.engine.engine import Engine
    from model_server.features.drafts import load as loading
    from model_server.features.drafts.device.speculator import DeviceSpeculator
    from model_server.features.drafts.speculator import Speculator
    Engine._runs_ahead = True
    Speculator._draft = None  # nothing is left to the host
    loading.lookup_speculator = lambda traits, most, rows, device, *, alone: DeviceSpeculator(
        most, rows, device, traits.block_size, alone=alone
    )
"""
)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RunningServer]]:
    """The demo model without drafts, and on two ranks with drafts."""
    path, cheap = "demo", sabotaged(tmp_path_factory.mktemp("cheap"), _CHEAP_STEPS)
    drafts = ("--speculate", "7", "--num-shard", "2")
    with (
        running_server(path, "--dtype", "float32") as plain,
        running_server(path, "--dtype", "float32", *drafts, environ=cheap) as speculating,
    ):
        yield [plain, speculating]


def answer(server: RunningServer, parameters: dict[str, Any]) -> dict[str, Any]:
    inputs = "one, two, three, four, one, two, three, four, one, two, three"
    body = {"inputs": inputs, "parameters": {"max_new_tokens": 60, "details": True} | parameters}
    found = httpx.post(f"{server.url}/generate", json=body, timeout=60)
    assert found.status_code == 200, found.text
    return found.json()  # type: ignore[no-any-return]


def said(body: dict[str, Any]) -> Any:
    details = body["details"]
    tokens = [(one["id"], one["text"]) for one in details["tokens"]]
    top = [[one["id"] for one in place] for place in details.get("top_tokens") or []]
    return body["generated_text"], tokens, top, details["finish_reason"], details["generated_tokens"]


@pytest.mark.parametrize("kind", ASKED)
def test_the_same_answers(servers: list[RunningServer], kind: str) -> None:
    plain, speculating = (said(answer(server, ASKED[kind])) for server in servers)
    assert speculating == plain


def test_json_under_a_schema_takes_fewer_steps_than_tokens(servers: list[RunningServer]) -> None:
    _, speculating = servers
    before = metrics_of(httpx.get(f"{speculating.url}/metrics").text)
    tokens = answer(speculating, ASKED["JSON"])["details"]["generated_tokens"]
    after = metrics_of(httpx.get(f"{speculating.url}/metrics").text)
    rows = "tgi_request_skipped_tokens_count"
    assert after[rows] - before[rows] < 0.7 * tokens
    drafted, right = (f'tgi_speculation_{what}_tokens{{kind="grammar"}}' for what in ("drafted", "accepted"))
    assert 0 < after[right] - before[right] <= after[drafted] - before[drafted]


def test_usage_says_what_became_of_a_prediction(servers: list[RunningServer]) -> None:
    plain, speculating = servers
    body = {
        "model": "demo",
        "prompt": "one, two, one, two, one",
        "max_tokens": 40,
        "temperature": 0,
        "ignore_eos": True,
    }

    def ask(server: RunningServer, **more: Any) -> Any:
        found = httpx.post(f"{server.url}/v1/completions", json=body | more, timeout=60)
        assert found.status_code == 200, found.text
        return found.json()

    wanted = ask(plain)["choices"][0]["text"]
    before = metrics_of(httpx.get(f"{speculating.url}/metrics").text)
    answer = ask(speculating, prediction={"type": "content", "content": wanted + " and more"})
    after = metrics_of(httpx.get(f"{speculating.url}/metrics").text)
    assert answer["choices"][0]["text"] == wanted
    found = answer["usage"]["completion_tokens_details"]
    accepted, rejected = (found[f"{what}_prediction_tokens"] for what in ("accepted", "rejected"))
    names = [f'tgi_speculation_{what}_tokens{{kind="prediction"}}' for what in ("drafted", "accepted")]
    drafted, right = (after[name] - before[name] for name in names)
    assert accepted + rejected == drafted and 0 < accepted <= right <= 40
    assert "completion_tokens_details" not in ask(speculating)["usage"]


def test_every_token_has_its_event(servers: list[RunningServer]) -> None:
    body = {"inputs": "one, two, one, two, one", "parameters": {"max_new_tokens": 30, "ignore_eos": True}}
    streams = []
    for server in servers:
        with httpx.stream("POST", f"{server.url}/generate_stream", json=body, timeout=60) as found:
            events = [json.loads(line[5:]) for line in found.iter_lines() if line.startswith("data:")]
        streams.append([(event["index"], event["token"]["id"]) for event in events])
    assert streams[0] == streams[1] and len(streams[0]) == 30


@pytest.mark.weekly
def test_several_answers_to_a_prompt_where_the_device_drafts(
    servers: list[RunningServer], tmp_path_factory: pytest.TempPathFactory
) -> None:
    plain, _ = servers
    bodies = [
        {"n": 4, "seed": 3, "temperature": 0.8},
        {"n": 1, "best_of": 2, "seed": 3, "temperature": 0.8},
        {"n": 2, "seed": 3, "temperature": 0.8, "presence_penalty": 1.0, "logprobs": 2},
    ]
    inputs = {"model": "demo", "prompt": "one, two, three, four, one, two, three, four, one, two", "max_tokens": 50}

    def choices(server: RunningServer, body: dict[str, Any]) -> Any:
        found = httpx.post(f"{server.url}/v1/completions", json=inputs | {"ignore_eos": True} | body, timeout=60)
        assert found.status_code == 200, found.text
        return sorted((one["index"], one["text"], one["finish_reason"]) for one in found.json()["choices"])

    on_a_device = sabotaged(tmp_path_factory.mktemp("device"), _ON_A_DEVICE)
    with running_server("demo", "--dtype", "float32", "--speculate", "5", environ=on_a_device) as drafting:
        for _ in range(2):  # and again with prompts from the prefix cache
            for body in bodies:
                assert choices(drafting, body) == choices(plain, body)
        found = metrics_of(httpx.get(f"{drafting.url}/metrics").text)
    drafted, right = (found[f'tgi_speculation_{what}_tokens{{kind="lookup"}}'] for what in ("drafted", "accepted"))
    assert 20 < right <= drafted


@pytest.mark.weekly
def test_a_draft_model_changes_nothing_but_the_steps(
    servers: list[RunningServer], tmp_path_factory: pytest.TempPathFactory
) -> None:
    plain, _ = servers
    cheap = sabotaged(tmp_path_factory.mktemp("cheap_drafts"), _CHEAP_DRAFTS)
    options = ("--dtype", "float32", "--speculator", "demo", "--num-shard", "2", "--max-total-tokens", "400")
    with running_server("demo", *options, environ=cheap) as drafting, ThreadPoolExecutor(len(ASKED)) as clients:
        wanted = [said(answer(plain, asked)) for asked in ASKED.values()]
        for _ in range(2):  # and again with prompts from the prefix cache
            assert list(clients.map(lambda asked: said(answer(drafting, asked)), ASKED.values())) == wanted
        found = metrics_of(httpx.get(f"{drafting.url}/metrics").text)
    drafted, right = (found[f'tgi_speculation_{what}_tokens{{kind="model"}}'] for what in ("drafted", "accepted"))
    assert 50 < 0.5 * drafted < right <= drafted
    assert found["tgi_speculation_window"] <= 3
