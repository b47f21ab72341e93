"""Accounts: their limits on a clock of the test's, and the file's changes."""

from __future__ import annotations

import asyncio
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from router.errors import ForbiddenError, RateLimitError
from router.keys import accounts as accounts_module
from router.keys.account import Account
from router.keys.accounts import Accounts
from router.keys.bucket import Bucket, spelled_wait
from router.metrics import Metrics
from wire.keys import Key, digest_of


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def key(name: str = "a", **changes: Any) -> Key:
    return Key(name=name, digest=digest_of(name.encode()), **changes)


def account(clock: Clock, **changes: Any) -> Account:
    metrics = Metrics()
    metrics.add_values("key", ["a"])
    return Account(key(**changes), metrics, clock)


def test_a_bucket_refills_continuously_and_holds_a_minute() -> None:
    clock = Clock()
    bucket = Bucket(60, clock)
    bucket.charge(60)
    assert (bucket.level, bucket.wait_s(1), bucket.full_in_s) == (0, 1, 60)
    clock.now += 2.5
    assert (bucket.level, bucket.wait_s(1), bucket.full_in_s) == (2.5, 0, 57.5)
    clock.now += 1000
    assert bucket.level == 60
    bucket.charge(90)
    assert bucket.wait_s(0) == 30


@pytest.mark.parametrize(
    ("seconds", "spelled"), [(0, "0ms"), (0.1201, "121ms"), (0.12, "120ms"), (1.5, "1.5s"), (59, "59s"), (360, "6m0s")]
)
def test_waits_are_spelled_as_openai_does(seconds: float, spelled: str) -> None:
    assert spelled_wait(seconds) == spelled


def test_requests_a_minute() -> None:
    clock = Clock()
    one = account(clock, requests_per_minute=2)
    for _ in range(2):
        one.admit()
        one.end()
    with pytest.raises(RateLimitError, match="2 requests per minute: try again in 30s") as refused:
        one.admit()
    assert (refused.value.kind, refused.value.retry_after_s, one.num_running) == ("requests", 30, 0)
    clock.now += 30
    one.admit()


def test_tokens_overshoot_by_what_runs_and_are_paid_back() -> None:
    clock = Clock()
    one = account(clock, tokens_per_minute=600)
    one.admit()
    one.prompted(500)
    one.admit()
    one.generated(200)
    with pytest.raises(RateLimitError, match="600 tokens per minute") as refused:
        one.admit()
    assert (refused.value.kind, refused.value.retry_after_s) == ("tokens", 10)
    clock.now += 10
    one.admit()


def test_concurrent_requests() -> None:
    one = account(Clock(), concurrent=1)
    one.admit()
    with pytest.raises(RateLimitError) as refused:
        one.admit()
    assert refused.value.kind == "concurrency"
    one.end()
    one.admit()


def test_a_refused_request_takes_nothing() -> None:
    one = account(Clock(), concurrent=1, requests_per_minute=5)
    one.admit()
    for _ in range(9):
        with pytest.raises(RateLimitError):
            one.admit()
    assert one.openai_headers()["x-ratelimit-remaining-requests"] == "4"


def test_models_and_scopes() -> None:
    one = account(Clock(), models=frozenset({"chat"}), scopes=frozenset({"metrics"}))
    one.check_model(("served", "chat"))
    one.check_scope("metrics")
    with pytest.raises(ForbiddenError, match="may not use the model tuned; it may use chat"):
        one.check_model(("tuned",))
    with pytest.raises(ForbiddenError, match="no scope `inference`"):
        one.check_scope("inference")


def test_a_new_row_keeps_what_was_used() -> None:
    clock = Clock()
    accounts = Accounts([key(requests_per_minute=10), key("b")], Metrics(), clock)
    one = accounts.find(b"a")
    assert one is not None
    for _ in range(10):
        one.admit()
    accounts.set([Key(name="a", digest=digest_of(b"new"), requests_per_minute=12)])
    assert accounts.find(b"a") is None and accounts.find(b"b") is None and accounts.find(b"new") is one
    assert (one.num_running, one.openai_headers()["x-ratelimit-remaining-requests"]) == (10, "2")


def test_an_expired_key_is_unknown() -> None:
    now = datetime.now(UTC)
    accounts = Accounts(
        [key(expires=now - timedelta(seconds=1)), key("b", expires=now + timedelta(hours=1))], Metrics()
    )
    assert accounts.find(b"a") is None and accounts.find(b"b") is not None


async def test_the_file_is_followed_and_a_bad_one_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(accounts_module, "LOOK_EVERY_S", 0.001)
    path = tmp_path / "keys.yaml"
    path.write_text("not yet")
    accounts = Accounts([key()], Metrics())
    following = asyncio.create_task(accounts.follow(path, None))
    await asyncio.sleep(0)

    async def put(text: str, done: Any) -> None:
        (tmp_path / "new").write_text(text)
        os.replace(tmp_path / "new", path)
        async with asyncio.timeout(30):
            while not done():  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    await put(f"- {{name: b, hash: 'sha256:{digest_of(b'b').hex()}'}}", lambda: accounts.find(b"b"))
    assert accounts.find(b"a") is None
    await put("- {name: c, hash: wrong}", lambda: "stay as they were" in caplog.text)
    assert accounts.find(b"b") is not None and "wrong" not in caplog.text.replace("`hash`", "")
    following.cancel()


def test_only_a_hundred_keys_have_labels() -> None:
    metrics = Metrics()
    Accounts([key(f"k{number}") for number in range(150)], metrics)
    assert (metrics.value_of("key", "k99"), metrics.value_of("key", "k100")) == ("k99", "other")
    assert metrics.render().count(b"tgi_key_requests{") == 101
