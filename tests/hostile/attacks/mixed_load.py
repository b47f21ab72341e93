"""Many clients with mixed requests on a cache that holds a part of them: preempted and evicted, each gets what it gets
alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import httpx
from hostile.answers import check
from hostile.random_bodies import MARK
from hostile.target import Target
from support.metrics_text import metrics_of

_NUM_CLIENTS = 64
_LONG_SHARE = 0.5
_WORDS = ["river", "stone", "light", "seven", "12", "window", "quick", "under", "BLUE", "sing", "[x]", "é", "don't"]
Asked = tuple[str, dict[str, Any]]


class MixedLoad:
    """The attack, and what each of its requests was answered alone."""

    def __init__(
        self, *, num_long: int = 12, num_short: int = 28, long_tokens: tuple[int, int] = (300, 900), least: int = 0
    ) -> None:
        """`least`: the load goes on until so many answers were compared, however slow the machine."""
        self._least = least
        self._sizes = (num_long, num_short, long_tokens)
        self._alone: list[tuple[Asked, Any]] = []

    async def __call__(self, target: Target, source: random.Random, count: int) -> Counter[str]:
        """`count` seconds of load by 64 clients. Raises AssertionError on the first answer that differs."""
        async with target.client() as client:
            if not self._alone:
                for asked in self._requests(source):
                    self._alone.append((asked, await _answer(client, asked)))
            seen: Counter[str] = Counter()
            until = time.monotonic() + count
            async with _preemptions(client, seen, until):
                sources = (random.Random(source.random()) for _ in range(_NUM_CLIENTS))
                await asyncio.gather(*(self._repeat(client, own, until, seen) for own in sources))
        return seen

    async def _repeat(self, client: httpx.AsyncClient, source: random.Random, until: float, seen: Counter[str]) -> None:
        while time.monotonic() < until or seen["compared"] < self._least:
            num_long = self._sizes[0]
            kin = self._alone[:num_long] if source.random() < _LONG_SHARE else self._alone[num_long:]
            asked, alone = source.choice(kin)
            said = await _answer(client, asked)
            if said is None:
                seen["429"] += 1
                await asyncio.sleep(0.2)
                continue
            assert said == alone, f"not as alone: {asked}\nalone: {alone}\nnow: {said}"
            seen["compared"] += 1

    def _requests(self, source: random.Random) -> list[Asked]:
        num_long, num_short, (least, most) = self._sizes
        made: list[Asked] = [_native(source, source.randint(least, most)) for _ in range(num_long)]
        kinds = (_native, _streamed, _sampled, _with_grammar, _chat, _completion)
        return made + [kinds[index % len(kinds)](source, source.randint(1, 200)) for index in range(num_short)]


@contextlib.asynccontextmanager
async def _preemptions(client: httpx.AsyncClient, seen: Counter[str], until: float) -> AsyncIterator[None]:
    """Counts preemptions, the seconds in which new requests come, and those of them in which one was preempted."""

    async def watch() -> None:
        before = at_first
        while time.monotonic() < until:
            await asyncio.sleep(1)
            now = await count()
            seen["seconds"] += 1
            seen["seconds with a preemption"] += now > before
            before = now

    async def count() -> int:
        return int(metrics_of((await client.get("/metrics")).text)["tgi_request_preempted"])

    at_first = await count()
    watching = asyncio.create_task(watch())
    try:
        yield
        seen["preempted"] += await count() - at_first
    finally:
        watching.cancel()


async def _answer(client: httpx.AsyncClient, asked: Asked) -> Any:
    """What must not depend on other requests; None for one that was turned away."""
    path, body = asked
    answer = await client.post(path, json=body)
    check(answer, frozenset({429}))
    if answer.status_code == 429:
        return None
    if path == "/generate_stream":
        events = [json.loads(line[5:]) for line in answer.text.splitlines() if line.startswith("data:")]
        return events[-1]["generated_text"], [event["token"]["id"] for event in events]
    said = answer.json()
    if "choices" in said:
        return [(choice["index"], choice.get("text"), choice.get("message"), choice["finish_reason"])
                for choice in said["choices"]]  # fmt: skip
    return said["generated_text"], [token["id"] for token in said["details"]["tokens"]]


def _prompt(source: random.Random) -> str:
    return " ".join([MARK, *source.choices(_WORDS, k=source.choice([1, 5, 40, 200]))])


def _native(source: random.Random, tokens: int, **parameters: Any) -> Asked:
    fixed = {"max_new_tokens": tokens, "details": True, "ignore_eos": True}
    return "/generate", {"inputs": _prompt(source), "parameters": fixed | parameters}


def _streamed(source: random.Random, tokens: int) -> Asked:
    return "/generate_stream", _native(source, tokens)[1]


def _sampled(source: random.Random, tokens: int) -> Asked:
    return _native(source, tokens, do_sample=True, temperature=0.8, top_p=0.9, seed=source.randrange(2**32))


def _with_grammar(source: random.Random, tokens: int) -> Asked:
    return _native(source, tokens, grammar={"type": "regex", "value": f"[a-z ]{{{source.randint(1, 60)}}}"})


def _chat(source: random.Random, tokens: int) -> Asked:
    messages = [{"role": "user", "content": _prompt(source)}]
    return "/v1/chat/completions", {"messages": messages, "max_tokens": tokens, "temperature": 0}


def _completion(source: random.Random, tokens: int) -> Asked:
    prompts = [_prompt(source), _prompt(source)]
    return "/v1/completions", {"prompt": prompts, "max_tokens": tokens, "temperature": 0, "repetition_penalty": 1.2}
