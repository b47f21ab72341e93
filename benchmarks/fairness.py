"""How long ordinary requests take beside requests that cost the router seconds each.

The attacks come from a process of their own, all at once; beside them this one asks for four things over and over: what
only needs the event loop, a short generation, a short chat, and a grammar that is not yet known.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import string
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.server import Server
from benchmarks.stopping import exit_on_signals

OUT = Path(__file__).parent / "out" / "fairness.json"
CHAT = "/v1/chat/completions"
PROBED_AFTERWARDS_S = 2.0
"""Long enough for memory to be given back."""
LEAVE_AFTER_S = 0.5
Asked = tuple[str, dict[str, Any]]


def text(num_bytes: int, seed: int) -> str:
    source = random.Random(seed)
    words = [f"{''.join(source.choices(string.ascii_lowercase, k=source.randint(2, 9)))}" for _ in range(2000)]
    return " ".join(source.choices(words, k=num_bytes // 5))[:num_bytes]


def generation(inputs: str, **parameters: Any) -> Asked:
    return "/generate", {"inputs": inputs, "parameters": {"max_new_tokens": 2} | parameters}


def chat(*contents: str) -> Asked:
    return CHAT, {"messages": [{"role": "user", "content": content} for content in contents], "max_tokens": 2}


def dear_grammar(number: int) -> Asked:
    numbers = {f"n{i}": {"type": "integer", "multipleOf": 9973 + 50 * number + i} for i in range(12)}
    return generation("x", grammar={"type": "json", "value": {"type": "object", "properties": numbers}})


ATTACKS: dict[str, Callable[[], list[Asked]]] = {
    "nothing": list,
    "16 prompts of 1.9 MB, cut": lambda: [generation(text(1_900_000, i % 4), truncate=16) for i in range(16)],
    "8 /tokenize of 1.9 MB": lambda: [("/tokenize", {"inputs": text(1_900_000, i % 4)}) for i in range(8)],
    "100 chats of 10,000 messages": lambda: [chat(*(f"hello {i}" for i in range(10_000)))] * 100,
    "64 chats of 1.8 MB": lambda: [chat(text(1_800_000, 0))] * 64,
    "64 grammars of seconds, left": lambda: [dear_grammar(number) for number in range(64)],
}


def attack(url: str, name: str) -> None:
    """Runs in a process of its own and ends with the last answer."""
    asyncio.run(_attack(url, ATTACKS[name](), LEAVE_AFTER_S if name.endswith("left") else None))


async def _attack(url: str, asked: list[Asked], leave_after_s: float | None) -> None:
    bodies = {id(body): json.dumps(body).encode() for _, body in asked}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        headers = {"content-type": "application/json"}
        tasks = [
            asyncio.create_task(client.post(path, content=bodies[id(body)], headers=headers)) for path, body in asked
        ]
        if tasks:
            await asyncio.wait(tasks, timeout=leave_after_s)
        for task in tasks:
            task.cancel()


async def probe(url: str, is_over: Callable[[], bool]) -> dict[str, list[float]]:
    """Seconds of each answer, by kind, until it is over."""
    numbers = iter(range(10**9))
    kinds: dict[str, Callable[[], Asked | None]] = {
        "event loop": lambda: None,
        "generate": lambda: generation("Once upon a time there was a small house near the sea. " * 4),
        "chat": lambda: chat("Hello"),
        "new grammar": lambda: generation("x", grammar={"type": "regex", "value": f"[a-z]{{3}}{next(numbers)}"}),
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}

    async def repeat(kind: str) -> None:
        while not is_over():
            asked = kinds[kind]()
            began = time.perf_counter()
            answer = await (client.get("/info") if asked is None else client.post(asked[0], json=asked[1]))
            seconds[kind].append(time.perf_counter() - began)
            assert answer.status_code == 200, answer.text
            await asyncio.sleep(0.02)

    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        await asyncio.gather(*map(repeat, kinds))
    return seconds


def measure(url: str, name: str, router: psutil.Process) -> dict[str, Any]:
    process = multiprocessing.get_context("spawn").Process(target=attack, args=(url, name))
    process.start()
    until = [time.monotonic() + 3 * PROBED_AFTERWARDS_S]

    def is_over() -> bool:
        if process.is_alive():
            until[0] = time.monotonic() + PROBED_AFTERWARDS_S
        return time.monotonic() > until[0]

    seconds = asyncio.run(probe(url, is_over))
    process.join()
    measured: dict[str, Any] = {kind: summary(sorted(values)) for kind, values in seconds.items()}
    return measured | {"router_rss_mib": router.memory_info().rss >> 20}


def summary(ordered: list[float]) -> dict[str, float]:
    """Milliseconds."""
    half, most = ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)]
    return {"p50_ms": 1000 * half, "p99_ms": 1000 * most, "max_ms": 1000 * ordered[-1]}


def main() -> None:
    exit_on_signals()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8096)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for name in ATTACKS:
        server = Server(options.port, "float32")
        try:
            family = psutil.Process(server.process.pid).children(recursive=True)
            router = next(process for process in family if "router" in process.cmdline())
            warm_until = time.monotonic() + 1
            asyncio.run(probe(server.url, lambda until=warm_until: time.monotonic() > until))
            results[name] = measure(server.url, name, router)
        finally:
            server.stop()
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    show(results)


def show(results: dict[str, Any]) -> None:
    kinds = [kind for kind in next(iter(results.values())) if kind != "router_rss_mib"]
    table = Table("Beside", *(f"{kind}\np50 / p99 / max ms" for kind in kinds), "router MiB afterwards")
    for name, measured in results.items():
        cells = [" / ".join(f"{value:.0f}" for value in measured[kind].values()) for kind in kinds]
        table.add_row(name, *cells, str(measured["router_rss_mib"]))
    Console().print(table)


if __name__ == "__main__":
    main()
