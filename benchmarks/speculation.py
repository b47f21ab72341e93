"""What drafts gain: `python -m benchmarks.speculation [--model FOLDER]`.

Two servers of one model, with `--speculate 5` and without, one after the other in every cell. Three kinds of text: text
that repeats itself (greedy answers of a model with random weights do), JSON under a schema, and text drawn at a
temperature of 1, which nothing predicts. Requests are answered one after the other by each of 1, 8 and 32 clients.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.peers.checkpoints import checkpoint
from benchmarks.server import Server

OUT = Path(__file__).parent / "results" / "speculation.json"
CLIENTS = (1, 8, 32)
TOKENS = 160
ROUNDS = 3
SCHEMA = {
    "type": "object",
    "properties": {
        name: {"enum": [f"the first choice of {name}", f"another choice of {name}"]}
        for name in ("colour", "material", "destination", "occupation")
    },
    "required": ["colour", "material", "destination", "occupation"],
}
KINDS: dict[str, dict[str, Any]] = {
    "repeats itself": {"ignore_eos": True},
    "JSON under a schema": {"grammar": {"type": "json", "value": SCHEMA}},
    "drawn": {"ignore_eos": True, "do_sample": True, "temperature": 1.0},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=None, help="a checkpoint; otherwise one of 135M random weights")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    model = options.model or checkpoint("135M")
    servers = [
        Server(port, options.dtype, model=str(model), arguments=("--speculate", str(most)))
        for port, most in ((8191, 0), (8192, 5))
    ]
    try:
        cells = [_cell(servers, kind, clients) for kind in KINDS for clients in CLIENTS]
    finally:
        for server in servers:
            server.stop()
    report = {"model": str(options.model or "135M"), "dtype": options.dtype, "cores": os.cpu_count(), "cells": cells}
    options.out.write_text(json.dumps(report, indent=1) + "\n")


def _cell(servers: list[Server], kind: str, clients: int) -> dict[str, Any]:
    rates: list[list[float]] = [[], []]
    before = [_drafts(server) for server in servers]
    for number in range(ROUNDS + 1):
        for rate, server in zip(rates, servers, strict=True):
            rate.append(_round(server, kind, clients, seed=1 + number))
    off, on = (statistics.median(rate[1:]) for rate in rates)
    drafted, right = (b - a for a, b in zip(before[1], _drafts(servers[1]), strict=True))
    cell = {
        "text": kind, "clients": clients, "tokens_per_s": on, "tokens_per_s_without": off, "ratio": on / off,
        "drafted": drafted, "right": right,
    }  # fmt: skip
    share = f"{right:.0f} of {drafted:.0f} right"
    print(f"{kind}, {clients} clients: {off:.0f} -> {on:.0f} tokens/s, {on / off:.2f}; {share}", flush=True)
    return cell


def _round(server: Server, kind: str, clients: int, seed: int) -> float:
    """Tokens per second of all clients together."""
    per_client = 3 if clients == 1 else 2

    def one(client: int) -> int:
        tokens = 0
        for number in range(per_client):
            parameters = {"max_new_tokens": TOKENS, "details": True} | KINDS[kind]
            if parameters.get("do_sample"):
                parameters["seed"] = seed * 1000 + client * 10 + number
            body = {"inputs": f"Text number {seed * 1000 + client * 10 + number}: ", "parameters": parameters}
            request = urllib.request.Request(
                f"{server.url}/generate", json.dumps(body).encode(), {"content-type": "application/json"}
            )
            with urllib.request.urlopen(request) as answer:
                tokens += json.load(answer)["details"]["generated_tokens"]
        return tokens

    started = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        total = sum(pool.map(one, range(clients)))
    return total / (time.perf_counter() - started)


def _drafts(server: Server) -> tuple[float, float]:
    """Tokens that were drafted so far, and of these the right ones."""
    with urllib.request.urlopen(f"{server.url}/metrics") as answer:
        lines = [line.split() for line in answer.read().decode().splitlines()]
    values = [(words[0], float(words[1])) for words in lines if len(words) == 2]
    drafted, right = (
        sum(value for name, value in values if name.startswith(f"tgi_speculation_{what}_tokens{{"))
        for what in ("drafted", "accepted")
    )
    return drafted, right


if __name__ == "__main__":
    main()
