"""A real engine on a tiny checkpoint, driven as a router drives it: prompts in chunks, joining one after another.

As a process it is one rank: `python -m parity.engine_run RANK WORLD PORT CHECKPOINT BUDGET STAGES`; what it said is
written beside the checkpoint.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parity.protocol import CPU, prompts
from support.loading import load

from model_server.batch.growth import BlockGrowth
from model_server.batch.results import StepResult
from model_server.batch.sequence import NewRequest
from model_server.distributed.group import ProcessGroup, connect
from model_server.distributed.layout import Layout, Ranks
from model_server.distributed.stage_links import StageLinks
from model_server.engine.calls import DecodeCall, PrefillCall, Session
from model_server.engine.engine import Engine, EngineOptions
from model_server.memory.kv_cache import KvCache
from model_server.sampling.parameters import Grammar, SamplingParameters, StoppingParameters
from model_server.sampling.sampler import Sampler
from model_server.text.tokenizer import Tokenizer

BLOCK = 4
NEW_TOKENS = 10
KINDS = (
    SamplingParameters(),
    SamplingParameters(do_sample=True, temperature=1.5, seed=7),
    SamplingParameters(repetition_penalty=1.5, frequency_penalty=0.5),
    SamplingParameters(grammar=Grammar("regex", "[a-z ]{100}")),
    SamplingParameters(do_sample=True, top_p=0.8, absolute_frequency_penalty=1.0, seed=8),
)
LENGTHS = (13, 5, 21, 8, 16)


def make_engine(checkpoint: Path, group: ProcessGroup, budget: int, num_stages: int = 1) -> Engine:
    """An engine whose cache is full of NaN, with requests that grow."""
    ranks = Ranks.of(group, Layout.of(group.rank, group.size, num_stages=num_stages))
    runner = load(checkpoint, ranks=ranks)
    if runner.traits.recurrent is not None:
        runner.traits.recurrent.reserve(len(KINDS))
    options = EngineOptions(
        device=CPU, layout=ranks.layout, block_size=BLOCK, prompt_logprobs_allowed=True,
        chunking=True, grows=True,
    )  # fmt: skip
    links = StageLinks(ranks, CPU) if num_stages > 1 else None
    engine = Engine(runner, Tokenizer.load(checkpoint), Sampler(runner.vocab_size, CPU), options, links)
    engine.start(Session(max_prefill_tokens=budget))
    cache = KvCache(runner.kv_shapes, 128, BLOCK, torch.float32, CPU)
    for rows in cache.rows:
        rows.fill_(math.nan)
    engine.set_cache(cache)
    return engine


def make_requests() -> list[NewRequest]:
    """One request of each kind, with blocks for its prompt alone."""
    requests = []
    for number, (sampling, prompt) in enumerate(zip(KINDS, prompts(500, LENGTHS), strict=True)):
        count = -(-len(prompt) // BLOCK)
        blocks = np.arange(1 + number, 1 + number + 5 * count, 5, dtype=np.int32)  # interleaved with the others
        requests.append(
            NewRequest(
                id=number, input_ids=tuple(prompt.tolist()), sampling=sampling,
                stopping=StoppingParameters(max_new_tokens=NEW_TOKENS, ignore_eos_token=True),
                prefill_logprobs=number == 0, top_n_tokens=0, blocks=blocks,
                cache_len=0, chunk_len=None, state_slot=number,
            )
        )  # fmt: skip
    return requests


class Router:
    """Gives blocks when they are needed, and collects what the shard says: per request its tokens, text and prompt."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.said: dict[int, dict[str, Any]] = {}
        self._next_block = 64
        self._lengths: dict[int, list[int]] = {}  # tokens written, slots

    def whole(self, requests: Sequence[NewRequest]) -> dict[int, dict[str, Any]]:
        """All requests in one prefill, unchunked, each with all its blocks at once."""
        result = self._prefill(0, requests, None)
        return self._decode(result)

    def chunked(self, requests: Sequence[NewRequest]) -> dict[int, dict[str, Any]]:
        """One request after another joins the running batch, its first chunk being a token or two."""
        result: StepResult | None = None
        for number, request in enumerate(requests):
            first = dataclasses.replace(request, chunk_len=1 + number % 2)
            result = self._prefill(number, [first], 0 if number else None)
        assert result is not None
        return self._decode(result)

    def _prefill(self, batch_id: int, requests: Sequence[NewRequest], cached: int | None) -> StepResult:
        new_blocks = self._new_blocks()
        for request in requests:
            self._lengths[request.id] = [len(request.input_ids) + len(request.resume_ids), BLOCK * len(request.blocks)]
        call = PrefillCall(batch_id=batch_id, cached_id=cached, sequence=0, new_blocks=tuple(new_blocks))
        return self._take(self.engine.submit_prefill(call, list(requests))())

    def _decode(self, result: StepResult) -> dict[int, dict[str, Any]]:
        while result.batch is not None:
            call = DecodeCall(batch_ids=(0,), sequence=0, new_blocks=tuple(self._new_blocks()))
            result = self._take(self.engine.submit_decode(call)())
        return self.said

    def _new_blocks(self) -> list[BlockGrowth]:
        """A block for whoever might need one in the next step; all ranks count alike, whoever answers."""
        new_blocks = []
        for request_id, lengths in self._lengths.items():
            if lengths[0] + 1 >= lengths[1]:
                new_blocks.append(BlockGrowth(request_id, np.array([self._next_block], np.int64)))
                self._next_block += 1
                lengths[1] += BLOCK
            lengths[0] += 1
        return new_blocks

    def _take(self, result: StepResult) -> StepResult:
        for generation in result.generations:
            assert generation.tokens is not None, generation.error
            said = self.said.setdefault(generation.request_id, {"ids": [], "texts": [], "prompt": None, "end": None})
            said["ids"] += generation.tokens.ids
            said["texts"] += generation.tokens.texts
            if generation.prefill_tokens is not None:
                said["prompt"] = generation.prefill_tokens.logprobs
            if generation.generated_text is not None:
                said["end"] = (generation.generated_text.text, generation.generated_text.generated_tokens)
                self._lengths.pop(generation.request_id)
        return result


def main(rank: int, world_size: int, port: int, checkpoint: Path, budget: int, num_stages: int) -> None:
    torch.set_num_threads(1)
    group = connect(rank, world_size, CPU, port=port, timeout_s=60)
    group.on_lost(lambda message: None)  # the ranks end one by one
    with torch.inference_mode():
        said = Router(make_engine(checkpoint, group, budget, num_stages)).chunked(make_requests())
    torch.save(said, checkpoint / f"said{rank}of{world_size}in{num_stages}.pt")
    group.barrier()
    group.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), *map(int, sys.argv[5:]))
