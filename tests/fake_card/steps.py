"""What a step of a large shape asks of the card: steps.py 1B|8B|MoE [OUT.json], under FAKE_CARD_KERNELS=null.

For decode steps of several batch sizes, greedy and sampled, and for prompts of several lengths: launches, replays,
copies, bytes and waits of a step, and the host's CPU time. Weights are pages that are never touched, so 8B fits into a
few GB. With FAKE_CARD_LOG=FILE the calls of one step of each kind are in FILE, between MARK lines.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from stand_in.counters import Counts, counted, log_calls, log_line

from benchmarks.gpu.subjects import shapes
from benchmarks.gpu.subjects.drive import Driver, make_engine, random_cache
from benchmarks.gpu.subjects.graph_hooks import capture, graphed
from benchmarks.gpu.subjects.synthetic import engine_tokenizer, make_decoder
from model_server.device import enter
from model_server.sampling.parameters import SamplingParameters

NUM_BLOCKS = 20_000
LONGEST = 16_384
CONTEXT, STEPS = 1024, 50
BATCHES = (1, 32, 256)
PROMPTS = (32, 512, 8192)
SAMPLINGS: dict[str, Callable[[int], SamplingParameters]] = {
    "greedy": lambda row: SamplingParameters(),
    "sampled": lambda row: SamplingParameters(do_sample=True, temperature=0.8, top_p=0.9, seed=row),
}


def _told(grown: Counts, steps: int, cpu_s: float) -> dict[str, float]:
    return {counter.name.lower(): round(number / steps, 2) for counter, number in grown.items() if number} | {
        "host_us": round(cpu_s / steps * 1e6)
    }


def decode(driver: Driver, batch: int, name: str) -> dict[str, float]:
    """Of one step, in the mean of many."""
    rows = driver.rows_at(batch, CONTEXT, STEPS + 20, SAMPLINGS[name])
    driver.pace(rows, 5)
    log_calls(True)
    log_line(f"decode of {batch} rows, {name}")
    driver.pace(rows, 1)
    log_line("end")
    log_calls(False)
    began = time.thread_time()
    with counted() as grown:
        driver.pace(rows, STEPS)
    return _told(grown, STEPS + 1, time.thread_time() - began)


def prefill(driver: Driver, tokens: int) -> dict[str, float]:
    """Of a prompt that is computed in one step, the third time."""
    for attempt in range(3):
        driver.engine.clear(None)
        driver.blocks.reset()
        requests = [driver.request(driver.random_prompt(tokens), 8)]
        log_calls(attempt == 2)
        log_line(f"prompt of {tokens} tokens")
        began = time.thread_time()
        with counted() as grown:
            driver.prefill(requests)
        cpu_s = time.thread_time() - began
        log_calls(False)
    return _told(grown, 1, cpu_s)


def main() -> None:
    if os.environ.get("FAKE_CARD_KERNELS") != "null":
        raise SystemExit("Run it under FAKE_CARD_KERNELS=null: the interpreter would take hours")
    small, large, mixture = shapes.by_size(False)
    shape = {"1B": small, "8B": large, "MoE": mixture}[sys.argv[1] if len(sys.argv) > 1 else "8B"]
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    log_calls(False)
    found: dict[str, Any] = {"torch": torch.__version__, "shape": shape.name}
    with enter(device):
        runner = graphed(make_decoder(shape, device, torch.bfloat16), device, BATCHES)
        engine = make_engine(runner, device, engine_tokenizer(shape.vocab))
        random_cache(engine, NUM_BLOCKS, torch.bfloat16)
        capture(engine, LONGEST)
        driver = Driver(engine)
        for batch in BATCHES:
            for name in SAMPLINGS:
                found[f"decode of {batch} rows, {name}"] = decode(driver, batch, name)
        for tokens in PROMPTS:
            found[f"prompt of {tokens} tokens"] = prefill(driver, tokens)
    text = json.dumps(found, indent=1)
    print(text)
    if len(sys.argv) > 2:
        Path(sys.argv[2]).write_text(text + "\n")


if __name__ == "__main__":
    main()
