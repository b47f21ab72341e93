"""The file with a line for each request: what it says, what it must not say, and what becomes of a full disk."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from router_fakes import Router, says

from router.config import RouterConfig, check
from router.errors import ArgumentValidation, StartupError
from router.metrics import Metrics
from router.request_log import RequestLog, block_hashes
from router.server.exchange import Exchange
from wire.keys import Key, digest_of

MakeRouter = Callable[..., Router]
ALICE = {"authorization": "Bearer tk-alice"}
KEY = Key(name="alice", digest=digest_of(b"tk-alice"))


def config(path: Path, **options: Any) -> RouterConfig:
    return RouterConfig(tokenizer_name="some/model", request_log=path, **options)


def lines(router: Router, path: Path) -> list[dict[str, Any]]:
    router.resources.close()  # writes what waits
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_each_request_has_a_line_without_its_text(make_router: MakeRouter, tmp_path: Path) -> None:
    path = tmp_path / "log"
    router = make_router(lambda _: says("sec", "ret"), config=config(path), keys=[KEY])
    chat = {"messages": [{"role": "user", "content": "secret"}], "model": "tgi"}
    assert (await router.post("/v1/chat/completions", chat, **ALICE)).status_code == 200
    assert (await router.post("/v1/completions", {"prompt": "secret", "stream": True, "n": 2}, **ALICE)).is_success
    assert (await router.post("/generate", {"inputs": "secret", "parameters": {"top_p": 7}}, **ALICE)).is_error
    assert (await router.post("/secret", {})).status_code == 401
    await router.get("/health")
    found = lines(router, path)
    assert [(one["route"], one["status"], one["key"]) for one in found] == [
        ("chat_completions", 200, "alice"), ("completions", 200, "alice"), ("generate", 422, "alice"), ("", 401, None),
    ]  # fmt: skip
    whole, stream, refused, _ = found
    assert (whole["stream"], stream["stream"]) == (False, True)
    assert (whole["model"], whole["finish_reasons"], whole["tokens_out"]) == ("some/model", ["length"], 2)
    # The prompt of both choices counts once.
    assert (stream["finish_reasons"], stream["tokens_out"]) == (["length"] * 2, 4)
    assert 0 < stream["tokens_in"] < whole["tokens_in"]
    assert 0 <= whole["queue_s"] <= whole["duration_s"] and whole["first_token_s"] <= whole["duration_s"]
    assert refused["refused"].startswith("validation reason=") and refused["tokens_in"] == 0
    assert "secret" not in path.read_text() and "prompts" not in whole
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_a_trace_says_which_prompts_begin_alike(make_router: MakeRouter, tmp_path: Path) -> None:
    path = tmp_path / "log"
    router = make_router(config=config(path, request_log_level="trace"))
    for end in ("one", "two"):
        prompt = [5] * 130 + [len(end), ord(end[0])]
        assert (await router.post("/v1/completions", {"prompt": prompt})).status_code == 200
    (one,), (two,) = (line["prompts"] for line in lines(router, path))
    assert one["tokens"] == two["tokens"] == 132 and len(one["hash_ids"]) == 3
    assert one["hash_ids"][:2] == two["hash_ids"][:2] and one["hash_ids"][2] != two["hash_ids"][2]
    assert len(set(one["hash_ids"])) == 3  # the same tokens at another place are another beginning


async def test_bodies_and_answers_byte_for_byte(make_router: MakeRouter, tmp_path: Path) -> None:
    path = tmp_path / "log"
    router = make_router(lambda _: says("sec", "ret"), config=config(path, request_log_level="full"), keys=[KEY])
    whole = await router.post("/v1/completions", {"prompt": "one"}, **ALICE)
    stream = await router.post("/v1/completions", {"prompt": "two", "stream": True}, **ALICE)
    usual = await router.post("/models", {"one": "two"}, **ALICE)
    refused = await router.post("/generate", raw=("[" * 500 + "\xff\n").encode(), **ALICE)
    found = lines(router, path)
    assert [line["path"] for line in found] == ["/v1/completions", "/v1/completions", "/models", "/generate"]
    assert [line["answer"] for line in found] == [answer.text for answer in (whole, stream, usual, refused)]
    assert json.loads(found[0]["body"]) == {"prompt": "one"} and stream.text.startswith("data: ")
    assert json.loads(found[1]["body"]) == {"prompt": "two", "stream": True}
    assert found[3]["body"] == "[" * 500 + "\xff\n"
    assert "tk-alice" not in path.read_text()
    assert [len(prompt["hash_ids"]) for line in found for prompt in line.get("prompts", [])] == [1, 1]


async def test_the_level_full_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    RequestLog(tmp_path / "log", Metrics(), level="full").close()
    assert "has the text of all prompts and answers" in caplog.text


def test_bodies_that_wait_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.request_log._MOST_WAITING_BYTES", 100)
    metrics = Metrics()
    log = RequestLog(tmp_path / "log", metrics, level="full")
    exchange = Exchange()
    exchange.num_bytes = 101
    log.add({}, {}, exchange)
    log.close()
    assert b"\ntgi_request_log_dropped 1\n" in metrics.render()


def test_hashes_are_of_the_salt() -> None:
    assert block_hashes((1, 2), b"a") == block_hashes((1, 2), b"a") != block_hashes((1, 2), b"b")
    assert block_hashes((), b"a") == []
    assert all(0 <= number < 2**48 for number in block_hashes(tuple(range(1000)), b"a"))


def test_files_take_turns(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = RequestLog(path, Metrics(), size=4096)
    for number in range(400):
        log.add({"number": number, "x": "y" * 100}, {})
    log.close()
    names = ["log", *(f"log.{number}" for number in range(1, 5))]
    assert sorted(os.listdir(tmp_path)) == names
    assert all((tmp_path / name).stat().st_size <= 4096 for name in names)
    texts = [(tmp_path / name).read_text() for name in reversed(names)]
    numbers = [json.loads(line)["number"] for text in texts for line in text.splitlines()]
    assert numbers == list(range(400 - len(numbers), 400))


def test_what_cannot_be_written_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    log = RequestLog(Path("/dev/full"), metrics)
    for _ in range(3):
        log.add({}, {})
    log.close()
    log.add({}, {})  # counts what the thread has lost
    assert b"\ntgi_request_log_dropped 3\n" in metrics.render()
    assert caplog.text.count("The request log cannot be written") == 1


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=f"`--request-log` {tmp_path}: Is a directory"):
        RequestLog(tmp_path, Metrics())


@pytest.mark.parametrize("options", [{"request_log_level": "usage"}, {"request_log_size": 5000}])
def test_options_without_a_file(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentValidation, match="needs `--request-log`"):
        check(RouterConfig(**options))
