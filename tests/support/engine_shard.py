"""An engine on the fake model with a router's bookkeeping of blocks around it."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from support.fake_model import FakeRunner, FakeStateRunner, greedy
from support.logprobs import logprobs_of

from model_server.batch.feature import ModelFeature
from model_server.batch.growth import BlockGrowth
from model_server.batch.results import Generation, StepResult
from model_server.batch.sequence import Asked, NewRequest
from model_server.distributed.layout import Layout
from model_server.distributed.stage_links import StageLinks
from model_server.engine.calls import DecodeCall, PrefillCall, Session
from model_server.engine.engine import Collect, Engine, EngineOptions
from model_server.features.adapters.feature import Adapters, AskedAdapter
from model_server.features.images.encoder import ImageEncoder
from model_server.features.images.feature import Images
from model_server.memory.kv_cache import KvCache
from model_server.sampling.parameters import Grammar, SamplingParameters, StoppingParameters
from model_server.sampling.sampler import Sampler
from model_server.text.tokenizer import Tokenizer

BLOCK = 4
NUM_BLOCKS = 64
CPU = torch.device("cpu")


class EngineShard:
    """One rank. The cache is full of NaN at first: what is read without having been written shows.

    `budget`: max_prefill_tokens of the warm-up; None leaves the shard without chunking. links: to the other stages,
    each with one rank.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        rank: int = 0,
        world_size: int = 1,
        budget: int | None = None,
        grows: bool = False,
        num_blocks: int = NUM_BLOCKS,
        runner: FakeRunner | FakeStateRunner | None = None,
        links: StageLinks | None = None,
        encoder: ImageEncoder | None = None,
    ) -> None:
        self.runner = runner or FakeRunner(vocab_size=tokenizer.vocab_size)
        layout = Layout.of(rank, world_size, num_stages=1 if links is None else links.num_stages)
        options = EngineOptions(
            device=CPU, layout=layout, block_size=BLOCK, prompt_logprobs_allowed=True,
            chunking=budget is not None, grows=grows,
        )  # fmt: skip
        sampler = Sampler(self.runner.vocab_size, CPU)
        self.encoder = encoder
        traits = self.runner.traits
        features: list[ModelFeature] = [Adapters(traits.adapters, traits.slots)] if traits.adapters else []
        features += [] if encoder is None else [Images(encoder, self.runner.vocab_size)]
        self.engine = Engine(self.runner, tokenizer, sampler, options, links, features=tuple(features))
        self.engine.start(Session() if budget is None else Session(max_prefill_tokens=budget))
        cache = KvCache(self.runner.kv_shapes, num_blocks, BLOCK, torch.float32, CPU)
        for rows in cache.rows:
            rows.fill_(float("nan"))
        self.engine.set_cache(cache)
        self._free = list(range(num_blocks - 1, 0, -1))
        self.prompts: dict[int, list[int]] = {}
        self._ids = itertools.count()

    def blocks(self, tokens: int) -> list[int]:
        """Interleaved, non-contiguous blocks for so many tokens."""
        return [self._free.pop(0 if i % 2 else -1) for i in range(-(-tokens // BLOCK))]

    def request(
        self,
        prompt: list[int],
        new_tokens: int,
        *,
        tokens: int | None = None,
        adapter_id: str | int | None = None,
        asked: tuple[Asked, ...] = (),
        **changes: object,
    ) -> NewRequest:
        """A request that will not end on its own.

        tokens: how many it has blocks for; None: as many as it can ever need.
        """
        request_id = next(self._ids)
        states = self.runner.traits.recurrent
        if states is not None:
            states.reserve(request_id + 1)
        blocks = self.blocks(tokens or len(prompt) + new_tokens - 1)
        self.prompts[request_id] = prompt
        request = NewRequest(
            id=request_id,
            input_ids=tuple(prompt),
            sampling=SamplingParameters(),
            stopping=StoppingParameters(max_new_tokens=new_tokens, ignore_eos_token=True),
            prefill_logprobs=False,
            top_n_tokens=0,
            blocks=np.array(blocks, np.int32),
            cache_len=0,
            chunk_len=None,
            state_slot=0 if states is None else request_id,
            asked=asked if adapter_id is None else (*asked, AskedAdapter(adapter_id)),
        )
        return dataclasses.replace(request, **changes)  # type: ignore[arg-type]

    def prefill(
        self,
        batch_id: int,
        *requests: NewRequest,
        cached: int | None = None,
        new_blocks: Sequence[BlockGrowth] = (),
        chunk_tokens: int | None = None,
    ) -> StepResult:
        return self.submit_prefill(
            batch_id, *requests, cached=cached, new_blocks=new_blocks, chunk_tokens=chunk_tokens
        )()

    def submit_prefill(
        self,
        batch_id: int,
        *requests: NewRequest,
        cached: int | None = None,
        new_blocks: Sequence[BlockGrowth] = (),
        chunk_tokens: int | None = None,
    ) -> Collect:
        call = PrefillCall(
            batch_id=batch_id, cached_id=cached, sequence=1, unanswered=1, new_blocks=tuple(new_blocks),
            chunk_tokens=chunk_tokens,
        )  # fmt: skip
        return self.engine.submit_prefill(call, list(requests))

    def decode(
        self,
        *batch_ids: int,
        new_blocks: Sequence[BlockGrowth] = (),
        chunk_tokens: int | None = None,
    ) -> StepResult:
        return self.submit_decode(*batch_ids, new_blocks=new_blocks, chunk_tokens=chunk_tokens)()

    def submit_decode(
        self,
        *batch_ids: int,
        new_blocks: Sequence[BlockGrowth] = (),
        chunk_tokens: int | None = None,
    ) -> Collect:
        return self.engine.submit_decode(decode_call(*batch_ids, new_blocks=new_blocks, chunk_tokens=chunk_tokens))

    def expected(self, request: NewRequest) -> list[int]:
        return greedy(self.prompts[request.id], request.stopping.max_new_tokens, self.runner.vocab_size)

    def query_lengths(self) -> tuple[int, ...]:
        """Tokens of each row in the last forward."""
        assert self.runner.last_inputs is not None
        return self.runner.last_inputs.attention.query_lengths_host

    def run_out(self, first: StepResult, batch_id: int) -> list[StepResult]:
        """Decode until nothing is left; all results, the first included."""
        results = [first]
        while results[-1].batch is not None:
            results.append(self.decode(batch_id))
        return results


def decode_call(
    *batch_ids: int,
    new_blocks: Sequence[BlockGrowth] = (),
    chunk_tokens: int | None = None,
) -> DecodeCall:
    """Sent before the call before it was answered."""
    return DecodeCall(
        batch_ids=batch_ids, sequence=1, unanswered=1, new_blocks=tuple(new_blocks), chunk_tokens=chunk_tokens
    )


def slots_of(blocks: Sequence[int]) -> list[int]:
    return [b * BLOCK + o for b in blocks for o in range(BLOCK)]


def tokens_of(*results: StepResult) -> dict[int, list[int]]:
    """All tokens by request; none of the rows may have failed."""
    collected: dict[int, list[int]] = {}
    for generation in (g for r in results for g in r.generations):
        assert generation.tokens is not None, generation.error
        collected.setdefault(generation.request_id, []).extend(generation.tokens.ids)
    return collected


def errors_of(result: StepResult) -> dict[int, str]:
    return {g.request_id: g.error for g in result.generations if g.error is not None}


def generations_of(*results: StepResult) -> dict[int, list[Generation]]:
    collected: dict[int, list[Generation]] = {}
    for generation in (g for r in results for g in r.generations):
        collected.setdefault(generation.request_id, []).append(generation)
    return collected


def sleeping_grammar(trigger: int | str, rest: str) -> Grammar:
    """Anything until a token, or until a text; then what fits `rest`, a regular expression between slashes."""
    if isinstance(trigger, int):
        frame, opened = f"start: any* call?\nany: <[^{trigger}]>\ncall: <[{trigger}]> {rest}\n", trigger
        return Grammar("lark", json.dumps({"trigger": opened, "grammars": [{"name": "frame", "lark_grammar": frame}]}))
    frame = f"start: head {rest}\nhead[lazy]: /(.|\\n)*{trigger}/\n"
    listed = [{"name": "frame", "lark_grammar": frame}]
    return Grammar("lark", json.dumps({"trigger": {"texts": [trigger]}, "grammars": listed}))


def mixed_kinds(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """What requests of one batch may ask for, all at once."""
    stop = StoppingParameters(max_new_tokens=9, ignore_eos_token=True, stop_sequences=(tokenizer.decode_one(60)[-1:],))
    return [
        {},
        {"sampling": SamplingParameters(do_sample=True, temperature=9.0, seed=3), "top_n_tokens": 3},
        {"sampling": SamplingParameters(repetition_penalty=4.0, frequency_penalty=2.0)},
        {"sampling": SamplingParameters(presence_penalty=20.0, do_sample=True, temperature=5.0, top_k=20, seed=11)},
        {"sampling": SamplingParameters(grammar=Grammar("regex", "[0-9]{6}"))},
        {"sampling": SamplingParameters(do_sample=True, temperature=9.0, top_p=0.9, seed=5), "stopping": stop},
        {"prefill_logprobs": True},
        {"sampling": SamplingParameters(watermark=True)},
        {
            "sampling": SamplingParameters(
                min_tokens=5, logit_bias=tuple((one, 99.0) for one in tokenizer.eos_token_ids)
            )
        },
    ]


def mixed_requests(shard: EngineShard, tokenizer: Tokenizer) -> list[NewRequest]:
    return [
        shard.request([(7 * i + 3 * j) % 60 + 2 for j in range(4 + 2 * i)], 9, **kind)
        for i, kind in enumerate(mixed_kinds(tokenizer))
    ]


def said_by(found: dict[int, list[Generation]]) -> dict[int, Any]:
    """Everything that clients see of these generations, comparable."""
    said = {}
    for request_id, generations in found.items():
        prompts = [g.prefill_tokens for g in generations if g.prefill_tokens is not None]
        said[request_id] = (
            [(g.tokens, g.top_tokens, g.generated_text, g.error) for g in generations],
            [(p.ids, p.texts, logprobs_of(p.logprobs)) for p in prompts],
        )
    return said
