"""The keys that are valid now, and the file that says so."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from router.errors import ArgumentValidation
from router.keys.account import Account
from router.keys.bucket import Clock
from router.metrics import Metrics
from wire.keys import Key, digest_of, read_keys
from wire.text.counting import counted

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0
Part = Literal["all", "front", "model"]
_State = tuple[int, int, int]


class Accounts:
    """Accounts by key; requests that run keep theirs when it is removed."""

    def __init__(
        self, keys: Sequence[Key], metrics: Metrics, clock: Clock = time.monotonic, *, part: Part = "all"
    ) -> None:
        """Make an account for each key.

        Args:
            part: Which of the limits hold here, where a front has some and each model's router the others.
        """
        self._metrics = metrics
        self._part = part
        self._clock = clock
        self._by_name: dict[str, Account] = {}
        self._by_digest: dict[bytes, Account] = {}
        self.guards_metrics = False
        """Whether GET /metrics needs a key."""
        self.set(keys)

    def set(self, keys: Sequence[Key]) -> None:
        """Replace the keys; those of the same name keep what they have used."""
        keys = [_limited_to(self._part, key) for key in keys]
        self._metrics.add_values("key", [key.name for key in keys])
        accounts: dict[str, Account] = {}
        for key in keys:
            account = self._by_name.get(key.name)
            if account is None:
                account = Account(key, self._metrics, self._clock)
            else:
                account.changed(key)
            accounts[key.name] = account
        self._by_name = accounts
        self._by_digest = {account.key.digest: account for account in accounts.values()}
        self.guards_metrics = any("metrics" in key.scopes for key in keys)

    def find(self, key: bytes) -> Account | None:
        """Return the account of a key that is valid now."""
        return _valid(self._by_digest.get(digest_of(key)))

    def named(self, name: str) -> Account | None:
        """Return the account of a name whose key is valid now."""
        return _valid(self._by_name.get(name))

    @classmethod
    def of_file(
        cls, path: Path | None, metrics: Metrics, resources: contextlib.ExitStack, *, part: Part = "all"
    ) -> Accounts | None:
        """Return a file's accounts, which follow it, and SIGUSR2, until `resources` are closed."""
        if path is None:
            return None
        state = _state(path)
        try:
            accounts = cls(read_keys(path), metrics, part=part)
        except ValueError as error:
            raise ArgumentValidation(f"`--keys-file`: {error}") from None
        loop = asyncio.get_running_loop()
        tasks = {loop.create_task(accounts.follow(path, state))}  # the loop itself holds no task

        def read() -> None:
            task = loop.create_task(accounts.read(path))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        def end() -> None:
            for task in tasks:
                task.cancel()
            loop.remove_signal_handler(signal.SIGUSR2)
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)

        loop.add_signal_handler(signal.SIGUSR2, read)
        resources.callback(end)
        return accounts

    async def follow(self, path: Path, state: _State | None) -> None:
        """Read the file whenever it is in another state; what is wrong with it is logged, and changes nothing."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            found = _state(path)
            if found != state:
                state = found
                await self.read(path)

    async def read(self, path: Path) -> None:
        """Take the file's keys."""
        try:
            keys = await asyncio.to_thread(read_keys, path)
        except ValueError as error:
            logger.error("the API keys stay as they were: %s", error)
            return
        self.set(keys)
        logger.info("%s from %s", counted(len(keys), "API key"), path)


def _valid(account: Account | None) -> Account | None:
    expires = None if account is None else account.key.expires
    return account if expires is None or datetime.now(UTC) < expires else None


def _limited_to(part: Part, key: Key) -> Key:
    """Return a key with the limits of a part: requests are the front's, tokens the model's."""
    if part == "front":
        return replace(key, tokens_per_minute=None)
    return replace(key, requests_per_minute=None, concurrent=None) if part == "model" else key


def _state(path: Path) -> _State | None:
    """Return what changes with the file, also where it is a link to another (Kubernetes' secrets)."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
