"""What `launcher bench --replay` makes of a log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.bench.made_up_prompts import MadeUpPrompts
from launcher.bench.replay_log import Hashed, read_log

ROW = {
    "time": "2026-01-02T03:04:05.000Z", "status": 200, "stream": True, "finish_reasons": ["length"], "tokens_in": 9,
    "tokens_cached": 4, "tokens_out": 6, "first_token_s": 0.5, "duration_s": 1.0,
}  # fmt: skip


def log(path: Path, *rows: dict[str, Any]) -> Path:
    file = path / "log"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_bodies_in_the_order_of_their_arrival(tmp_path: Path) -> None:
    generate = {**ROW, "path": "/generate", "body": '{"inputs": "a"}', "stream": False}
    file = log(
        tmp_path,
        {**generate, "time": "2026-01-02T03:04:06.500Z"},
        {**ROW, "path": "/v1/completions", "body": '{"prompt":  "b"}'},
        {**ROW, "path": "/tokenize", "body": "{}"},
        {**ROW, "path": "/generate", "body": "no JSON", "status": 422},
        {**ROW, "path": "/generate", "body": "{}", "status": 429},
        {**ROW, "path": "/generate", "body": "[1]"},
    )
    found = read_log(file)
    sent = [(one.at_s, one.path, one.body) for one in found.arrivals]
    assert sent == [
        (0.0, "/v1/completions", b'{"prompt":  "b"}'),
        (0.0, "/generate", b"{}"),
        (1.5, "/generate", b'{"inputs": "a"}'),
    ]
    assert found.left_out == {"of other routes": 1, "refused or failed": 1, "without a JSON object": 1}
    assert (found.prompt_tokens, found.cached_tokens, found.output_tokens) == (18, 8, 12)
    assert found.first_token_s == [0.5] and len(read_log(file, most=1).arrivals) == 1


def test_a_trace_has_a_request_for_each_generation(tmp_path: Path) -> None:
    prompt = {"tokens": 70, "cached": 0, "hash_ids": [5, 6]}
    found = read_log(log(tmp_path, {**ROW, "finish_reasons": ["length"] * 2, "prompts": [prompt]}))
    assert [one.hashed for one in found.arrivals] == [
        Hashed(hash_ids=[5, 6], num_tokens=70, block=64, output_tokens=3)
    ] * 2


def test_a_trace_of_mooncake(tmp_path: Path) -> None:
    rows = [{"timestamp": at, "input_length": 600, "output_length": 7, "hash_ids": [1, 2]} for at in (2500, 500)]
    found = read_log(log(tmp_path, *rows))
    assert [one.at_s for one in found.arrivals] == [0.0, 2.0]
    assert found.arrivals[0].hashed == Hashed(hash_ids=[1, 2], num_tokens=600, block=512, output_tokens=7)
    assert (found.prompt_tokens, found.cached_tokens) == (1200, None)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "has no request to replay: no lines"),
        ([ROW], "1 without prompts \\(`--request-log-level trace` or `full` records them\\)"),
        ([{"a": 1}], "line 1: is neither a line of a request log nor of Mooncake's trace"),
        ([{"timestamp": 1}], "the line of 1 has no form of ours"),
    ],
)
def test_files_that_cannot_be_replayed(tmp_path: Path, rows: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_log(log(tmp_path, *rows))
    with pytest.raises(ValueError, match="No such file"):
        read_log(tmp_path / "nowhere")


def prompt(ids: list[int], tokens: int, cached: int = 0) -> Hashed:
    return Hashed(hash_ids=ids, num_tokens=tokens, block=64, cached_tokens=cached, output_tokens=1)


def test_made_up_prompts_begin_alike_where_the_recorded_ones_did() -> None:
    made = MadeUpPrompts(range(1000), seed=0)
    one, other, longer = made.ids(prompt([1, 2], 100)), made.ids(prompt([1, 3], 100)), made.ids(prompt([1, 2], 100))
    assert len(one) == len(other) == 100 and one[:64] == other[:64] and one[64:] != other[64:] and one == longer
    assert MadeUpPrompts(range(1000), seed=1).ids(prompt([1, 2], 100)) != one


def test_the_next_turn_goes_on_inside_a_block() -> None:
    made = MadeUpPrompts(range(1000), seed=0)
    first = made.ids(prompt([1, 2], 100))
    second = made.ids(prompt([1, 3, 4], 150, cached=96))
    third = made.ids(prompt([1, 3, 4, 5], 200, cached=150))
    assert second[:96] == first[:96] and second[96:100] != first[96:] and third[:150] == second
    assert len(made.ids(prompt([9], 200))) == 200, "a log with fewer numbers than its tokens"
