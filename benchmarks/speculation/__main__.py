"""What drafts gain: `python -m benchmarks.speculation [--model FOLDER]`.

Two servers of one model, with drafts and without, one after the other in every round of a cell. Five kinds of text,
with `--speculate 5`: text that repeats itself (greedy answers of a model with random weights do), JSON under a schema,
text drawn at a temperature of 1, which nothing predicts, and a file that is repeated with small edits, from the prompt
and from `prediction`. Then a model of 0.5B beside a draft model of 15M with random weights, which is never right and
must cost nothing. Requests are answered one after the other by each of 1, 8 and 32 clients.

A quarter of an hour on two quiet cores; stop everything else first. --kinds, --clients and --rounds measure a part:
`--kinds drawn --clients 32 --rounds 9`. A part is written to a file only with --out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.peers.checkpoints import checkpoint
from benchmarks.peers.machine import processor
from benchmarks.server import Server
from benchmarks.speculation.texts import KINDS, TOKENS, Texts

OUT = Path(__file__).parents[1] / "results" / "speculation.json"
CLIENTS = (1, 8, 32)
ROUNDS = 3
# Beside a draft model that is never right; a step of its model takes three times as long.
DRAFTED = "drawn, draft model"
DRAFTED_TOKENS = 64
# What each cell must reach, of the tokens per second without drafts, and the edited files with one client.
LEAST, LEAST_EDITED = 0.97, 2.0


@dataclass(frozen=True, slots=True)
class Pair:
    """Two servers of a model; the second one drafts."""

    servers: tuple[Server, Server]
    texts: Texts

    def stop(self) -> None:
        """Both."""
        for server in self.servers:
            server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None, help="a checkpoint; otherwise one of 135M random weights")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS, DRAFTED], default=[*KINDS, DRAFTED])
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    cells = []
    kinds = [kind for kind in options.kinds if kind != DRAFTED]
    if kinds:
        model = str(options.model or checkpoint("135M"))
        cells += _cells(_pair(model, options.dtype, TOKENS, "--speculate", "5"), kinds, options)
    if DRAFTED in options.kinds:
        draft = str(checkpoint("15M", vocabulary_of="0.5B"))
        pair = _pair(str(checkpoint("0.5B")), options.dtype, DRAFTED_TOKENS, "--speculator", draft)
        cells += _cells(pair, [DRAFTED], options)
    report = {
        "model": str(options.model or "135M"), "dtype": options.dtype, "processor": processor(),
        "cores": os.cpu_count(), "rounds": options.rounds, "cells": cells,
    }  # fmt: skip
    is_whole = len(options.kinds) > len(KINDS) and tuple(options.clients) == CLIENTS and options.rounds >= ROUNDS
    out = options.out or (OUT if is_whole else None)
    if out is not None:
        out.write_text(json.dumps(report, indent=1) + "\n")
    missed = [cell for cell in cells if cell["ratio"] < cell["least"]]
    print(f"{len(cells) - len(missed)} of {len(cells)} cells reach what they must")


def _pair(model: str, dtype: str, tokens: int, *drafting: str) -> Pair:
    """drafting: options of the second server."""
    plain = Server(8191, dtype, model=model, arguments=("--speculate", "0"))
    try:
        num_ids = Tokenizer.from_file(str(Path(model) / "tokenizer.json")).get_vocab_size()
        texts = Texts(plain.url, num_ids, tokens)
        return Pair((plain, Server(8192, dtype, model=model, arguments=drafting)), texts)
    except BaseException:
        plain.stop()
        raise


def _cells(pair: Pair, kinds: Sequence[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    try:
        return [_cell(pair, kind, clients, options.rounds) for kind in kinds for clients in options.clients]
    finally:
        pair.stop()


def _cell(pair: Pair, kind: str, clients: int, rounds: int) -> dict[str, Any]:
    """Rates are medians of the rounds, the ratio is that of the rounds' own ratios, which drift alike. The first round
    is not counted. The servers change places from round to round."""
    off: list[float] = []
    on: list[float] = []
    before = _drafts(pair.servers[1])
    for number in range(rounds + 1):
        for drafts in (False, True) if number % 2 else (True, False):
            (on if drafts else off).append(_round(pair, kind, clients, 1 + number, drafts=drafts))
    ratios = [b / a for a, b in zip(off[1:], on[1:], strict=True)]
    drafted, right = (b - a for a, b in zip(before, _drafts(pair.servers[1]), strict=True))
    without, rate, ratio = statistics.median(off[1:]), statistics.median(on[1:]), statistics.median(ratios)
    cell = {
        "text": kind, "clients": clients, "tokens_per_s": rate, "tokens_per_s_without": without, "ratio": ratio,
        "ratios": ratios, "least": LEAST_EDITED if kind.startswith("edited") and clients == 1 else LEAST,
        "drafted": drafted, "right": right,
    }  # fmt: skip
    spread = f"{ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f}), at least {cell['least']}"
    share = f"{right:.0f} of {drafted:.0f} right"
    print(f"{kind}, {clients} clients: {without:.0f} -> {rate:.0f} tokens/s, {spread}; {share}", flush=True)
    return cell


def _round(pair: Pair, kind: str, clients: int, seed: int, *, drafts: bool) -> float:
    """Tokens per second of all clients together."""
    per_client = 3 if clients == 1 else 2
    url = pair.servers[drafts].url
    kind = "drawn" if kind == DRAFTED else kind

    def ask(client: int, number: int) -> Any:
        return pair.texts.ask(kind, seed * 1000 + client * 10 + number, drafts=drafts)

    def one(client: int) -> int:
        return sum(ask(client, number).tokens_from(url) for number in range(per_client))

    with ThreadPoolExecutor(clients) as pool:
        # What edited texts are is asked for before the time counts.
        list(pool.map(lambda client: [ask(client, number) for number in range(per_client)], range(clients)))
        started = time.perf_counter()
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
