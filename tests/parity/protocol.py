"""The batch protocol that a runner must survive: flattened prefill, chunks mixed with decode
rows, decode. The cache is full of NaN at first and blocks are handed out interleaved, so any wrong read shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from model_server.adapters.rows import AdapterRows, adapter_rows
from model_server.attention.metadata import AttentionMetadata
from model_server.memory.kv_cache import KvCache
from model_server.runner.runner import ModelInputs, RequestState, Runner
from wire.decoder_blocks import most_between

CPU = torch.device("cpu")
LENGTHS = (19, 11, 14)
# Tokens per sequence and forward: prefill of all; a chunk of the first beside a decode row of the second; decode.
STEPS = ((9, 5, 12), (5, 1, 0), *((1, 1, 1),) * 2, *((1, 1, 0),) * 3)
# The same with prompts in chunks, of one token too: first chunks beside later ones beside decode rows.
CHUNKS = ((3, 0, 0), (4, 2, 0), (1, 1, 6), (5, 1, 1), (1, 6, 3), (5, 1, 4))

# Prompts whole, as a runner with a state per request wants them; members come and go.
WHOLE = ((9, 0, 0), (1, 5, 0), (1, 1, 12), *((1, 1, 1),) * 2, *((1, 1, 0),) * 3, *((1, 0, 0),) * 3)


def prompts(vocab_size: int, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[Tensor]:
    """Random token ids, one int64 tensor per sequence."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab_size, (n,), generator=generator) for n in lengths]


@dataclass
class PagedBatch:
    """Sequences, the blocks they own and how far each has been computed."""

    runner: Runner
    sequences: list[Tensor]
    block_size: int
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    adapters: Sequence[int] | None = None  # of each sequence; None: the base model
    cache: KvCache = field(init=False)
    tables: list[list[int]] = field(init=False)
    done: list[int] = field(init=False)
    states: list[RequestState] = field(init=False)

    def __post_init__(self) -> None:
        between = most_between(self.runner.traits.prefix_length, self.block_size)
        counts = [-(-(len(s) + between) // self.block_size) for s in self.sequences]
        # Round-robin and backwards: no sequence has two neighbouring blocks in order. Block 0 stays free.
        free = list(range(sum(counts), 0, -1))
        self.tables = [[] for _ in self.sequences]
        while any(len(t) < n for t, n in zip(self.tables, counts, strict=True)):
            for table, count in zip(self.tables, counts, strict=True):
                if len(table) < count:
                    table.append(free.pop(0))
        self.cache = KvCache(self.runner.kv_shapes, sum(counts) + 1, self.block_size, self.dtype, self.device)
        for rows in self.cache.rows:
            rows.fill_(float("nan"))
        self.done = [0] * len(self.sequences)
        self.states = [RequestState(0, i) for i, _ in enumerate(self.sequences)]

    def inputs(
        self, counts: Sequence[int], logit_rows: Tensor | None = None, prompts: Sequence[int] = ()
    ) -> ModelInputs:
        """A forward over the next counts[i] tokens of each sequence; those with 0 take no part. prompts: sequences for
        which a single token is one of the prompt."""
        taking = [i for i, n in enumerate(counts) if n]
        spans = [(self.done[i], self.done[i] + counts[i]) for i in taking]
        for i in taking:
            if self.done[i] == 0:
                self.states[i] = RequestState(counts[i], i)
        tables = [self.tables[i] for i in taking]
        width = max(map(len, tables)) if self.runner.traits.prefix_length else 0
        metadata = attention_metadata(tables, spans, self.block_size, self.device, width)
        of_prompt = np.array([i in prompts and counts[i] == 1 for i in taking], np.uint8)
        if of_prompt.any():
            metadata = replace(metadata, single_prompts=of_prompt)
        if self.adapters is not None:
            metadata = replace(metadata, adapters=tuple(self.adapters[i] for i in taking))
        return ModelInputs(
            input_ids=torch.cat([self.sequences[i][a:b] for i, (a, b) in zip(taking, spans, strict=True)]).to(
                self.device
            ),
            positions=torch.cat([torch.arange(a, b) for a, b in spans]).to(self.device),
            attention=metadata,
            logit_rows=logit_rows,
            states=tuple(self.states[i] for i in taking),
            adapters=self._adapter_rows(taking, counts, logit_rows),
        )

    def _adapter_rows(
        self, taking: Sequence[int], counts: Sequence[int], logit_rows: Tensor | None
    ) -> AdapterRows | None:
        if self.adapters is None:
            return None
        numbers = np.repeat([self.adapters[i] for i in taking], [counts[i] for i in taking])
        return adapter_rows(numbers, None if logit_rows is None else logit_rows.numpy(), self.device)

    def step(self, counts: Sequence[int], prompts: Sequence[int] = ()) -> list[Tensor]:
        """Run one forward; the logits of each sequence's tokens (empty for those that take no part)."""
        with torch.inference_mode():
            logits = self.runner.forward(self.inputs(counts, prompts=prompts), self.cache)
        self.done = [d + n for d, n in zip(self.done, counts, strict=True)]
        return list(logits.split(list(counts)))


def attention_metadata(
    tables: Sequence[Sequence[int]],
    spans: Sequence[tuple[int, int]],
    block_size: int,
    device: torch.device = CPU,
    width: int = 0,
) -> AttentionMetadata:
    """Metadata of a forward over positions [start, stop) of sequences with these block tables. width: of the tables;
    0: what the spans need."""
    width = width or max(-(-stop // block_size) for _, stop in spans)
    padded = [(list(t) + [0] * width)[:width] for t in tables]
    slots = [
        t[p // block_size] * block_size + p % block_size
        for t, (a, b) in zip(tables, spans, strict=True)
        for p in range(a, b)
    ]
    queries = [b - a for a, b in spans]
    ends = [b for _, b in spans]
    cumulative = [sum(queries[:i]) for i in range(len(queries) + 1)]
    return AttentionMetadata(
        slots=torch.tensor(slots, dtype=torch.int64, device=device),
        block_tables=torch.tensor(padded, dtype=torch.int32, device=device),
        cu_seqlens_q=torch.tensor(cumulative, dtype=torch.int32, device=device),
        kv_lengths=torch.tensor(ends, dtype=torch.int32, device=device),
        query_lengths_host=tuple(queries),
        kv_lengths_host=tuple(ends),
    )


def run_protocol(
    runner: Runner,
    sequences: list[Tensor],
    block_size: int,
    dtype: torch.dtype = torch.float32,
    steps: Sequence[Sequence[int]] = STEPS,
    adapters: Sequence[int] | None = None,
) -> list[Tensor]:
    """All logits of each sequence [length, vocab], computed by the protocol's steps."""
    batch = PagedBatch(runner, sequences, block_size, dtype, adapters=adapters)
    parts: list[list[Tensor]] = [[] for _ in sequences]
    for counts in steps:
        for kept, logits in zip(parts, batch.step(counts), strict=True):
            kept.append(logits)
    assert batch.done == [len(s) for s in sequences]
    return [torch.cat(p) for p in parts]


TIE = 1e-5  # of the largest logit


def assert_equal_logits(actual: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float = 1e-4) -> None:
    """max |difference| at most `tolerance` of the largest logit, and the same token would be chosen everywhere, or one
    that ties with it: transformers' own last bits differ from one kind of CPU to the next."""
    for got, want in zip(actual, expected, strict=True):
        assert got.shape == want.shape
        assert not got.isnan().any(), "NaN: something was read from the cache that had not been written"
        error = float((got - want).abs().max() / want.abs().max())
        assert error <= tolerance, f"relative error {error:.2e}"
        behind = want.amax(-1) - want.gather(-1, got.argmax(-1, keepdim=True)).squeeze(-1)
        assert float(behind.max() / want.abs().max()) <= TIE, f"another token, {float(behind.max()):.2e} behind"
