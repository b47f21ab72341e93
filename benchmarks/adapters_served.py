"""What LoRA adapters cost a server: `python -m benchmarks.adapters_served [--shape 135M 0.5B] [--clients 8 32]`.

One server with the eight adapters of `benchmarks.adapters`, on all linear layers or, with `--layers few`, on queries
and values. Its clients ask for the base model, for the adapters in turn, and for one adapter, each kind after the
other, again and again: short prompts, each its own, and answers of one length. For a quiet machine: times are those of
the clock. The result goes to `benchmarks/results/adapters_served.json`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.adapters import ALL, FEW, NUMBER, RANK, adapter_folders
from benchmarks.demo import prompt
from benchmarks.peers.checkpoints import SHAPES, checkpoint
from benchmarks.peers.machine import processor
from benchmarks.server import Server
from benchmarks.stopping import exit_on_signals
from launcher.bench.apis import Sampling, TgiApi
from launcher.bench.load import Load, Target

OUT = Path(__file__).parent / "results" / "adapters_served.json"
BASE_MODEL = "none"


@dataclass(frozen=True)
class Result:
    """Output tokens per second of each repeat."""

    shape: str
    dtype: str
    clients: int
    adapters: str
    base: Sequence[float]
    with_adapters: Sequence[float]

    @property
    def kept(self) -> float:
        """The share of the base model's tokens per second, of each pair of neighbours in time; their median."""
        return median(own / base for base, own in zip(self.base, self.with_adapters, strict=True))


class AdaptersInTurn(TgiApi):
    """Each request asks for the next one of `names`, from the first again after the last; "" is the base model."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__(Sampling(None, ignore_eos=True))
        self._names = itertools.cycle(names)

    def body(self, prompt: str, num_tokens: int) -> dict[str, Any]:
        body = super().body(prompt, num_tokens)
        if name := next(self._names):
            body["parameters"]["adapter_id"] = name
        return body


def measure(shape: str, args: argparse.Namespace) -> list[Result]:
    folders = adapter_folders(shape, args.layers)
    kinds = {BASE_MODEL: [""], "mixed": list(folders), "one": list(folders)[:1]}
    entries = ",".join(f"{name}={folder}" for name, folder in folders.items())
    server = Server(args.port, args.dtype, model=str(checkpoint(shape)), arguments=("--lora-adapters", entries))
    try:
        return [r for clients in args.clients for r in _of_clients(server.url, shape, clients, kinds, args)]
    finally:
        server.stop()


def _of_clients(
    url: str, shape: str, clients: int, kinds: Mapping[str, Sequence[str]], args: argparse.Namespace
) -> list[Result]:
    rates: dict[str, list[float]] = {name: [] for name in kinds}
    # No two cells have a prompt in common, which the prefix cache would know.
    fresh = itertools.count(1_000_000 * clients)
    for repeat in range(args.repeats + 1):
        for name, adapters in kinds.items():
            prompts = [prompt(next(fresh), args.prompt_words) for _ in range(2 * clients if repeat else clients)]
            load = Load(Target(url=url, api=AdaptersInTurn(adapters)), args.new_tokens)
            cell = uvloop.run(load.closed(prompts, clients))
            if cell.errors:
                raise SystemExit(f"{cell.errors} requests failed: {cell.first_error}")
            if repeat:  # the first round warms up
                rates[name].append(round(cell.output_tokens_per_s, 1))
    base = rates.pop(BASE_MODEL)
    return [Result(shape, args.dtype, clients, name, base, own) for name, own in rates.items()]


def _table(results: list[Result]) -> Table:
    table = Table(title=f"{processor()}; {os.cpu_count()} cores; tokens/s, medians")
    for column in ("shape", "clients", "adapters", "base", "with", "kept"):
        table.add_column(column, justify="right")
    for r in results:
        rates = f"{median(r.base):.0f}", f"{median(r.with_adapters):.0f}"
        table.add_row(r.shape, str(r.clients), r.adapters, *rates, f"{r.kept:.3f}")
    return table


def main() -> None:
    exit_on_signals()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["135M", "0.5B"])
    parser.add_argument("--layers", choices=(ALL, FEW), default=ALL)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--clients", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--prompt-words", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--port", type=int, default=8094)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    results = [result for shape in args.shape for result in measure(shape, args)]
    Console(width=100).print(_table(results))
    report = {
        "processor": processor(),
        "cores": os.cpu_count(),
        "prompt_words": args.prompt_words,
        "new_tokens": args.new_tokens,
        "rank": RANK,
        "layers": args.layers,
        "number": NUMBER,
        "cells": [asdict(r) | {"kept": round(r.kept, 4)} for r in results],
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
