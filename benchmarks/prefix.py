"""What the prefix cache saves: prompts that share most of their text, with the cache and without, in one run.

Every request has an ending of its own; the first one of a server computes the shared beginning, all others find it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.demo import prompt
from benchmarks.server import Server, closed_cell
from benchmarks.stopping import exit_on_signals
from launcher.bench.results import Cell

OUT = Path(__file__).parent / "out" / "prefix.json"


def prompts(first: int, count: int, num_words: int, shared: float) -> list[str]:
    """`count` prompts of about `num_words` tokens, the first `shared` of which are the same in all."""
    num_shared = round(num_words * shared)
    beginning = prompt(0, num_shared)
    return [f"{beginning} {prompt(first + i, num_words - num_shared)}" for i in range(1, count + 1)]


def measure(port: int, levels: list[int], options: argparse.Namespace, caching: bool) -> dict[int, Cell]:
    server = Server(port, "float32", PREFIX_CACHING=str(int(caching)))
    words, shared = options.prompt_words, options.shared
    try:
        closed_cell(server.url, prompts(100_000, 2, words, shared), 1, 2)
        return {
            level: closed_cell(server.url, prompts(1000 * level, 4 * level, words, shared), level, options.new_tokens)
            for level in levels
        }
    finally:
        server.stop()


def main() -> None:
    exit_on_signals()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", default="1,8", help="comma-separated")
    parser.add_argument("--prompt-words", type=int, default=1000)
    parser.add_argument("--shared", type=float, default=0.9, help="share of the prompt that all have in common")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--port", type=int, default=8094)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    levels = [int(c) for c in options.concurrency.split(",")]

    without = measure(options.port, levels, options, caching=False)
    with_cache = measure(options.port, levels, options, caching=True)
    table = Table(title=f"{options.prompt_words} words, {options.shared:.0%} of them shared")
    for column in ("concurrency", "TTFT p50 ms without", "with", "ratio", "output tok/s without", "with", "errors"):
        table.add_column(column, justify="right")
    for level in levels:
        a, b = without[level], with_cache[level]
        table.add_row(
            str(level),
            f"{a.ttft_p50 * 1e3:.0f}",
            f"{b.ttft_p50 * 1e3:.0f}",
            f"{a.ttft_p50 / b.ttft_p50:.1f}",
            f"{a.output_tokens_per_s:.0f}",
            f"{b.output_tokens_per_s:.0f}",
            str(a.errors + b.errors),
        )
    Console(width=120).print(table)
    report = {
        "options": {k: str(v) for k, v in vars(options).items() if k != "out"},
        "without": [c.as_json() for c in without.values()],
        "with": [c.as_json() for c in with_cache.values()],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
