"""One round of every attack on one server; after each of them everything must be as it was."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from hostile.attacks.bodies import random_bodies
from hostile.attacks.expensive import chained_responses, expensive_grammars, split_heads
from hostile.attacks.grpc_calls import grpc_calls
from hostile.attacks.image_servers import image_servers
from hostile.attacks.launches import damaged_folders, interrupted_launches
from hostile.attacks.leaving import leaving_clients
from hostile.attacks.mixed_load import MixedLoad
from hostile.attacks.overload import overload
from hostile.attacks.pictures import random_pictures
from hostile.attacks.silent_tls import silent_tls
from hostile.attacks.sockets import raw_bytes
from hostile.attacks.workers import killed_workers
from hostile.invariants import Invariants
from hostile.loop_watch import Hold, holds_in
from hostile.random_bodies import MARK
from hostile.target import KEY, Target

_TRACEBACK = "Traceback (most recent call last)"
_UNREADABLE = re.compile(re.escape(_TRACEBACK) + r"[^Z]*?protobuf\.message\.DecodeError")
"""gRPC's own record of a message that is none; no time of a later record lies in it."""
Attack = Callable[[Target, random.Random, int], Awaitable[Counter[str]]]


@dataclass(frozen=True)
class Sizes:
    """How much of each attack is in a round: requests, connections, calls, pictures or starts; of the mixed load
    seconds."""

    bodies: int = 0
    raw: int = 0
    leaving: int = 0
    grpc: int = 0
    workers: int = 0
    overload: int = 0
    mixed_seconds: int = 0
    launches: int = 0
    folders: int = 0
    pictures: int = 0
    grammars: int = 0
    responses: int = 0
    heads: int = 0
    image_servers: int = 0
    silent_tls: int = 0


@dataclass
class Outcome:
    """One attack of one round."""

    name: str
    seconds: float
    seen: Counter[str]
    memory: dict[str, int] = field(default_factory=dict)
    slowest: Hold | None = None  # of the router's event loop, by the processor time that it took


class Rounds:
    """Attacks on one target. Every random choice follows from the seed; the server's timing does not."""

    def __init__(
        self, target: Target, seed: int, sizes: Sizes, mixed: MixedLoad | None = None, *, prefix: str = ""
    ) -> None:
        """prefix: of the names of its processes in outcomes."""
        self._target = target
        self._prefix = prefix
        self._source = random.Random(seed)
        self._log_read = 0
        self._holds_read = 0
        self._invariants = Invariants(target.server, {"authorization": f"Bearer {KEY}"})
        self._slowest_hold()  # those of the start
        self._attacks: list[tuple[str, Attack, int]] = [
            ("random bodies", random_bodies, sizes.bodies),
            ("raw bytes", raw_bytes, sizes.raw),
            ("clients that leave", leaving_clients, sizes.leaving),
            ("gRPC calls", grpc_calls(self._invariants.socket), sizes.grpc),
            ("killed workers", killed_workers, sizes.workers),
            ("overload", overload, sizes.overload),
            ("mixed load", mixed or MixedLoad(), sizes.mixed_seconds),
            ("interrupted launches", interrupted_launches, sizes.launches),
            ("damaged model folders", damaged_folders, sizes.folders),
            ("random pictures", random_pictures, sizes.pictures),
            ("expensive grammars", expensive_grammars, sizes.grammars),
            ("chained responses", chained_responses, sizes.responses),
            ("split heads", split_heads, sizes.heads),
            ("image servers", image_servers, sizes.image_servers),
            ("silent TLS", silent_tls, sizes.silent_tls),
        ]

    def one(self) -> Iterator[Outcome]:
        """Raises AssertionError as soon as something is not as it should be."""
        for name, attack, count in self._attacks:
            if count == 0:
                continue
            started = time.monotonic()
            seen = asyncio.run(self._run(attack, count))
            seconds = time.monotonic() - started
            self._invariants.check()
            self._check_log()
            sizes = self._invariants.memory_of_all()
            memory = {self._prefix + process: size for process, size in sizes.items()}
            yield Outcome(name, seconds, seen, memory, self._slowest_hold())

    async def _run(self, attack: Attack, count: int) -> Counter[str]:
        return await attack(self._target, self._source, count)

    def _slowest_hold(self) -> Hold | None:
        """Since the last call."""
        if self._target.holds is None:
            return None
        holds, self._holds_read = holds_in(self._target.holds, self._holds_read)
        return max(holds, key=lambda hold: hold.used_s, default=None)

    def _check_log(self) -> None:
        end = self._target.server.log_size()
        log = _UNREADABLE.sub("", self._target.server.log(self._log_read))
        self._log_read = end
        for word in (KEY, MARK, _TRACEBACK):
            position = log.find(word)
            assert position < 0, f"{word!r} is in the log: {log[max(0, position - 500) : position + 1500]}"
