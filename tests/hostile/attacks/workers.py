"""The processes that render templates and check grammars are killed: the requests after that are served."""

from __future__ import annotations

import contextlib
import random
from collections import Counter

import psutil
from hostile.answers import check
from hostile.invariants import worker_processes
from hostile.target import Target


async def killed_workers(target: Target, source: random.Random, count: int) -> Counter[str]:
    """Each time one or both, then a chat with a grammar, which needs both."""
    seen: Counter[str] = Counter()
    async with target.client() as client:
        for index in range(count):
            seen["killed"] += _kill(target, source)
            grammar = {"type": "regex", "value": f"[ab]{{{index + 1}}}"}  # no answer that is remembered
            body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8, "response_format": grammar}
            answer = await client.post("/v1/chat/completions", json=body)
            check(answer, frozenset())
            seen["served"] += 1
    return seen


def _kill(target: Target, source: random.Random) -> int:
    workers = worker_processes(psutil.Process(target.server.process.pid))
    chosen = [worker for worker in workers if source.random() < 0.7]
    for worker in chosen:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.kill()
    return len(chosen)
