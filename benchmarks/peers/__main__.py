"""`python -m benchmarks.peers`: every installed server on the same checkpoints, prompts and lengths, in turns.

Order: repeat by repeat, shape by shape, server by server; each server alone on the machine, started anew for each
repeat, after a look at the machine's own limits, with one unmeasured round per cell. A cell counts only if other
processes used less than a tenth of a core; it is measured again otherwise, twice at most. Results are kept after every
server, so that an interrupted run goes on where it stopped; --fresh forgets them.

With --quantized, which stands for
  --peers tercet,llama.cpp,openvino --precisions int8,int4 --shapes 0.5B,1.1B --lengths 128:64
  --rounds 1 --out benchmarks/peers/results/quantized.json
where they are not given: int8 is `--quantize eetq`, Q8_0 and OpenVINO's int8, int4 is gptq in groups of 128, Q4_K_M and
OpenVINO's int4 in groups of 128. `--peers tercet,llama.cpp --precisions q8_0,q4_k_m` compares both on the same GGUF
files. The first run converts the checkpoints, a few minutes for each shape. `--precisions
bfloat16,int8,int4` measures plain weights beside them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import uvloop

from benchmarks.peers import report
from benchmarks.peers.checkpoints import SHAPES, checkpoint
from benchmarks.peers.machine import limits
from benchmarks.peers.quantized import BITS, weights_of
from benchmarks.peers.servers import PEERS, Peer, RunningPeer
from benchmarks.stopping import exit_on_signals
from launcher.bench.apis import OpenAiApi, Sampling, TgiApi
from launcher.bench.load import Load, Target
from launcher.bench.prompts import PromptMaker, offsets_of
from launcher.bench.results import Cell

OUT = Path(__file__).parent.parent / "out" / "peers" / "peers.json"
QUANTIZED = {
    "peers": "tercet,llama.cpp,openvino",
    "precisions": "int8,int4",
    "shapes": "0.5B,1.1B",
    "lengths": "128:64",
    "rounds": 1,
    "out": Path(__file__).parent / "results" / "quantized.json",
}
TRIES = 3


@dataclass(frozen=True)
class Job:
    """One cell to measure."""

    prompt: int
    output: int
    concurrency: int
    rounds: int | None = None  # None: three, fewer of many clients, a minute at most on two cores

    @property
    def name(self) -> str:
        return f"{self.prompt}->{self.output} c={self.concurrency}"

    @property
    def num_requests(self) -> int:
        rounds = self.rounds or (2 if self.concurrency >= 32 else 3)
        return max(rounds * self.concurrency, 6)


def main() -> None:
    exit_on_signals()
    options = _options()
    results: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() and not options.fresh else {}
    results.setdefault("runs", [])
    for peer, shape, precision, repeat in _turns(options):
        jobs = list(_missing(results["runs"], (peer.name, shape, precision, repeat), options))
        if not jobs:
            continue
        print(f"{time.strftime('%H:%M:%S')} {peer.name}, {shape}, {precision}, repeat {repeat + 1}", flush=True)
        results["runs"].append(_run(peer, shape, precision, repeat, jobs, options.port))
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    report.show(results)
    report.write(results, options.out)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    peers = "comma-separated, each with a precision of its own if you like (vllm:float32); only those installed"
    precisions = (
        "of bfloat16, float16, float32, int8, int4, for peers without their own; of the first three the better counts"
    )
    parser.add_argument("--quantized", action="store_true", help="int8 and int4 weights, see above")
    parser.add_argument("--peers", default=",".join(PEERS), help=peers)
    parser.add_argument("--shapes", default="135M,0.5B", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--lengths", default="128:64,512:16", help="prompt:output, comma-separated")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--precisions", default="bfloat16", help=precisions)
    rounds = "requests of each client in a cell, six in all at least; by default three, two from 32 clients on"
    parser.add_argument("--rounds", type=int, default=None, help=rounds)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--port", type=int, default=8095)
    parser.add_argument("--fresh", action="store_true", help="forget what was measured before")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    if options.quantized:
        parser.set_defaults(**QUANTIZED)
        options = parser.parse_args()
    return options


def _turns(options: argparse.Namespace) -> Iterator[tuple[Peer, str, str, int]]:
    wanted = []
    for entry in options.peers.split(","):
        name, _, precision = entry.partition(":")
        precisions = [precision] if precision else options.precisions.split(",")
        wanted += [(PEERS[name], each) for each in precisions if each in PEERS[name].precisions]
    wanted.sort(key=lambda turn: ("plain", *BITS).index(weights_of(turn[1])))  # what is compared comes close together
    for repeat in range(options.repeats):
        for shape in options.shapes.split(","):
            for peer, precision in wanted:
                if peer.installed():
                    yield peer, shape, precision, repeat


def _run(peer: Peer, shape: str, precision: str, repeat: int, jobs: list[Job], port: int) -> dict[str, Any]:
    """One start of one server: its cells, or why there are none."""
    run: dict[str, Any] = {
        "peer": peer.name, "version": peer.version(), "shape": shape, "precision": precision, "repeat": repeat,
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"), "machine": limits(), "cells": {},
    }  # fmt: skip
    try:
        server = RunningPeer(peer, shape, precision, port)
    except RuntimeError as error:
        run["failed"] = str(error)
        print(f"  did not start: {str(error)[-300:]}")
        return run
    run["start_s"] = server.start_s
    try:
        for job in jobs:
            cell, others = _cell(server, peer, shape, job, seed=repeat)
            run["cells"][job.name] = {**cell.as_json(), "other_cores": others}
            latencies = f"TTFT {cell.ttft_p50 * 1e3:.0f} ms, TPOT {cell.tpot_p50 * 1e3:.1f} ms"
            print(f"  {job.name}: {cell.output_tokens_per_s:.1f} tok/s, {latencies}, {cell.errors} errors, others used "
                  f"{others:.2f} cores", flush=True)  # fmt: skip
    finally:
        server.stop()
    return run


def _missing(runs: list[dict[str, Any]], turn: tuple[str, str, str, int], options: argparse.Namespace) -> Iterator[Job]:
    """The cells of this turn (peer, shape, precision, repeat) that have not been measured, or not so that they count;
    none if it did not start."""
    earlier = [r for r in runs if (r["peer"], r["shape"], r["precision"], r["repeat"]) == turn]
    if not any("failed" in r for r in earlier):
        measured = {name for r in earlier for name, cell in r["cells"].items() if not report.fault(cell)}
        yield from (job for job in _jobs(options) if job.name not in measured)


def _jobs(options: argparse.Namespace) -> Iterator[Job]:
    for lengths in options.lengths.split(","):
        prompt, output = map(int, lengths.split(":"))
        for concurrency in map(int, options.concurrency.split(",")):
            yield Job(prompt, output, concurrency, options.rounds)


def _cell(server: RunningPeer, peer: Peer, shape: str, job: Job, seed: int) -> tuple[Cell, float]:
    """The cell, and how many cores other processes used in the meantime."""
    # Where end-of-sequence cannot be ignored, random weights seldom draw it; the report names short answers.
    greedy = Sampling(None, ignore_eos=peer.knows_ignore_eos)
    api = TgiApi(greedy) if peer.api == "tgi" else OpenAiApi(greedy, _model_name(peer, shape))
    target = Target(url=server.url, api=api)
    tokenizer = offsets_of(str(checkpoint(shape) / "tokenizer.json"))
    for attempt in range(TRIES):
        maker = PromptMaker(job.prompt, 1000 * seed + attempt, cut=tokenizer)
        warm = [maker.prompt(-1 - i) for i in range(job.concurrency)]
        prompts = [maker.prompt(i) for i in range(job.num_requests)]
        uvloop.run(Load(target, min(job.output, 8)).closed(warm, job.concurrency))
        clock = _Clock(server)
        cell = uvloop.run(Load(target, job.output).closed(prompts, job.concurrency))
        others = clock.other_cores()
        if others < report.QUIET_CORES:
            break
    return cell, others


def _model_name(peer: Peer, shape: str) -> str:
    return str(checkpoint(shape)) if peer.name == "transformers" else "model"


class _Clock:
    """Who used the processors since it was made."""

    def __init__(self, server: RunningPeer) -> None:
        self._server = server
        self._started = time.perf_counter()
        self._all, self._ours = self._busy(), self._of_this_run()

    def other_cores(self) -> float:
        busy = self._busy() - self._all - (self._of_this_run() - self._ours)
        return max(0.0, busy / (time.perf_counter() - self._started))

    def _of_this_run(self) -> float:
        own = psutil.Process().cpu_times()
        return float(own.user + own.system) + self._server.cpu_seconds()

    @staticmethod
    def _busy() -> float:
        times = psutil.cpu_times()
        return float(times.user + times.nice + times.system)


if __name__ == "__main__":
    main()
