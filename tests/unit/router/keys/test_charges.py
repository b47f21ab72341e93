"""The front charges requests of batches to their keys, and says how long to wait."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from router.keys import charges
from router.keys.accounts import Accounts
from router.keys.charges import charging, wait_of
from router.metrics import Metrics
from wire.keys import Key, digest_of


async def test_a_request_waits_for_its_key(tmp_path: Path) -> None:
    now = [0.0]
    keys = [
        Key(name="slow", digest=digest_of(b"one"), requests_per_minute=2, concurrent=1),
        Key(name="free", digest=digest_of(b"two")),
    ]
    metrics = Metrics()
    accounts = Accounts(keys, metrics, lambda: now[0], part="front")
    server = await charging(tmp_path / "limits", accounts)
    try:
        assert [await wait_of(tmp_path / "limits", "slow") for _ in range(4)] == [0, 0, 30, 30]
        assert [await wait_of(tmp_path / "limits", name) for name in ("free", "gone")] == [0, 0]
        now[0] = 30.0
        both = await asyncio.gather(*(wait_of(tmp_path / "limits", "slow") for _ in range(2)))
        assert sorted(both) == [0, 30]
    finally:
        server.close()
        await asyncio.sleep(0.01)  # for the transports to close
    text = metrics.render().decode()
    assert 'tgi_key_requests{key="slow"} 3' in text
    assert 'tgi_key_refused{key="slow",reason="requests"} 3' in text
    account = accounts.named("slow")
    assert account is not None and account.num_running == 0


async def test_a_front_that_is_gone_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await wait_of(tmp_path / "none", "a") > 0

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    monkeypatch.setattr(charges, "_TIMEOUT_S", 0.05)
    for number, answer in enumerate((hang_up, say_nothing)):
        server = await asyncio.start_unix_server(answer, tmp_path / str(number))
        assert await wait_of(tmp_path / str(number), "a") > 0
        server.close()
        await asyncio.sleep(0.01)  # for the transports to close
