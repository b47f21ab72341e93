"""Which replica a conversation's next turn goes to: the prompt tokens found in the cache, by policy.

Each conversation sends its whole history with each turn, as chats do. The replicas share one machine.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.server import Server
from benchmarks.stopping import exit_on_signals
from launcher.bench.prompts import WORDS
from wire.cli.replica_options import ReplicaPolicy

POLICIES: tuple[ReplicaPolicy, ...] = ("prefix", "least", "round_robin")


async def conversation(client: httpx.AsyncClient, number: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the usage of each turn."""
    chosen = random.Random(number)
    messages: list[dict[str, str]] = []
    found = []
    for _ in range(options.turns):
        messages.append({"role": "user", "content": " ".join(chosen.choices(WORDS, k=options.words))})
        body = {"messages": messages, "max_tokens": options.new_tokens, "temperature": 0, "ignore_eos": True}
        began = time.perf_counter()
        answer = await client.post("/v1/chat/completions", json=body)
        answer.raise_for_status()
        told = answer.json()
        found.append({**told["usage"], "seconds": time.perf_counter() - began})
        messages.append(told["choices"][0]["message"])
        await asyncio.sleep(chosen.random() * options.pause)
    return found


async def load(url: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Hold all conversations at once, and return the turns after the first."""
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        held = await asyncio.gather(*(conversation(client, n, options) for n in range(options.conversations)))
    return [turn for turns in held for turn in turns[1:]]


def measure(policy: ReplicaPolicy, options: argparse.Namespace) -> tuple[float, float]:
    """Return the share of prompt tokens in the cache, and the median seconds of a turn."""
    arguments = ("--num-replica", str(options.replicas), "--replica-policy", policy) if options.replicas > 1 else ()
    server = Server(options.port, "float32", arguments=arguments)
    try:
        turns = asyncio.run(load(server.url, options))
    finally:
        server.stop()
    cached = sum(turn["prompt_tokens_details"]["cached_tokens"] for turn in turns)
    seconds = sorted(turn["seconds"] for turn in turns)
    return cached / sum(turn["prompt_tokens"] for turn in turns), seconds[len(seconds) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policies", nargs="+", default=POLICIES, choices=POLICIES)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--words", type=int, default=150, help="of each turn")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--pause", type=float, default=1.0, help="most seconds between two turns")
    parser.add_argument("--port", type=int, default=18739)
    options = parser.parse_args()
    exit_on_signals()
    table = Table("policy", "prompt tokens in the cache", "median turn, s")
    for policy in options.policies:
        share, seconds = measure(policy, options)
        table.add_row(policy, f"{share:.1%}", f"{seconds:.2f}")
        print(f"{policy}: {share:.1%} in the cache, a turn takes {seconds:.2f} s", flush=True)
    Console().print(table)


if __name__ == "__main__":
    main()
