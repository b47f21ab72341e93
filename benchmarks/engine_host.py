"""What a decode step costs on the host: `python -m benchmarks.engine_host`.

Two models: `stub`, whose forward hands out logits that are there already, so that all time is the engine's own (on a
GPU it must hide under the step); and `demo`, the embedded model, whose whole step on a CPU is what a user waits for.
In process, without gRPC. A step is timed in two parts: submit (inputs, forward, sampling) and collect (ids, text).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model_server.attention.choice import AttentionChoice
from model_server.batch.sequence import NewRequest
from model_server.distributed.placement import Placement
from model_server.engine.calls import DecodeCall, PrefillCall
from model_server.engine.engine import Engine, EngineOptions
from model_server.memory.kv_cache import KvCache, KvShape
from model_server.models.load import load_runner
from model_server.models.model import describe
from model_server.runner.runner import ModelInputs, Runner, RunnerTraits
from model_server.sampling.parameters import SamplingParameters, StoppingParameters
from model_server.sampling.sampler import Sampler
from model_server.text.tokenizer import Tokenizer
from model_server.weights.checkpoint import examine
from wire import demo_model

BLOCK = 16
PROMPT_TOKENS = 40
CPU = torch.device("cpu")
SAMPLING = {
    "greedy": SamplingParameters(),
    "drawn": SamplingParameters(do_sample=True, temperature=0.9, seed=7),
    "penalised": SamplingParameters(do_sample=True, temperature=0.9, top_k=10, repetition_penalty=1.1, seed=7),
}


@dataclass
class StubRunner:
    """Satisfies `Runner`; computes nothing."""

    vocab_size: int
    max_positions: int | None = None
    kv_shapes: tuple[KvShape, ...] = (KvShape(1, 1, 1),)
    traits = RunnerTraits()

    def __post_init__(self) -> None:
        self._logits = torch.zeros(256, self.vocab_size)
        self._logits[:, 100] = 1.0

    def reserve_positions(self, max_positions: int) -> None:
        """It has no tables."""

    def forward(self, inputs: ModelInputs, cache: KvCache) -> Tensor:
        rows = inputs.attention.slots if inputs.logit_rows is None else inputs.logit_rows
        return self._logits[: rows.shape[0]]


def runner_of(name: str, vocab_size: int) -> Runner:
    if name == "stub":
        return StubRunner(vocab_size)
    model = describe(examine(demo_model.path()))
    return load_runner(model, Placement(CPU, torch.float32), AttentionChoice(None, CPU))


def start(runner: Runner, tokenizer: Tokenizer, rows: int, steps: int, sampling: SamplingParameters) -> Engine:
    """An engine with a batch 0 of `rows` requests, prefilled."""
    options = EngineOptions(device=CPU, block_size=BLOCK, prompt_logprobs_allowed=False, chunking=True)
    engine = Engine(runner, tokenizer, Sampler(runner.vocab_size, CPU), options)
    tokens = PROMPT_TOKENS + steps
    blocks = -(-tokens // BLOCK)
    engine.set_cache(KvCache(runner.kv_shapes, rows * blocks + 1, BLOCK, torch.float32, CPU))
    requests = []
    for i in range(rows):
        table = 1 + i * blocks + np.arange(blocks)
        requests.append(
            NewRequest(
                id=i, input_ids=tuple(20 + (i + j) % 200 for j in range(PROMPT_TOKENS)), sampling=sampling,
                stopping=StoppingParameters(max_new_tokens=steps, ignore_eos_token=True),
                prefill_logprobs=False, top_n_tokens=0, blocks=table.astype(np.int32),
                cache_len=0, chunk_len=None,
            )
        )  # fmt: skip
    engine.submit_prefill(PrefillCall(batch_id=0, sequence=0), requests)()
    return engine


def measure(engine: Engine, steps: int) -> tuple[float, float]:
    """Medians of submitting and of collecting a step, in microseconds of this thread, which leaves out waiting."""
    step = DecodeCall(batch_ids=(0,), sequence=1)
    halves: tuple[list[float], list[float]] = ([], [])
    for _ in range(steps):
        begun = time.thread_time()
        collect: Callable[[], object] = engine.submit_decode(step)
        submitted = time.thread_time()
        collect()
        halves[0].append(submitted - begun)
        halves[1].append(time.thread_time() - submitted)
    submit, collected = (statistics.median(half) * 1e6 for half in halves)
    return submit, collected


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=["stub", "demo"], default="stub")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--sampling", choices=list(SAMPLING), default="greedy")
    parser.add_argument("--vocab", type=int, help="of the stub; small by default, so that sampling is cheap")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = Tokenizer.load(demo_model.path())
    with torch.inference_mode():
        runner = runner_of(asked.model, asked.vocab or 1024)
        for rows in asked.rows:
            engine = start(runner, tokenizer, rows, asked.steps + 30, SAMPLING[asked.sampling])
            measure(engine, 20)
            submit, collect = measure(engine, asked.steps)
            print(json.dumps({"model": asked.model, "sampling": asked.sampling, "rows": rows,
                              "submit_us": round(submit, 1), "collect_us": round(collect, 1)}))  # fmt: skip


if __name__ == "__main__":
    main()
