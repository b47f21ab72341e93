"""A whole decoder with our attention kernels: captured steps say what the steps themselves say.

In the interpreter "captured" means done again over the same places in memory, with the host's lengths as mere bounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from parity.protocol import attention_metadata
from support.graph_doubles import PlainGraphCapture
from support.triton_interpreter import mend
from torch import Tensor

from model_server.attention.metadata import AttentionMetadata
from model_server.attention.reference import ReferenceBackend
from model_server.attention.triton_paged import TritonBackend
from model_server.distributed.group import ProcessGroup
from model_server.distributed.placement import Placement
from model_server.memory.kv_cache import KvCache
from model_server.models.config import ModelConfig
from model_server.models.decoder.build import build
from model_server.models.decoder.decoder import Decoder
from model_server.models.decoder.spec import Spec
from model_server.models.families import spec_of
from model_server.runner.cuda_graphs import GraphedRunner
from model_server.runner.graph_capture import CudaGraphCapture
from model_server.runner.runner import ModelInputs
from model_server.weights.reader import Range

mend()

BLOCK = 16
MAX_LENGTH = 100
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def inference(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("model_server.runner.cuda_graphs.TOKEN_SIZES", (40, 16))
    with torch.inference_mode():
        yield


class RandomReader:
    """Llama's tensors out of each one's name."""

    dtype = torch.float32

    def __init__(self, spec: Spec, device: torch.device) -> None:
        heads, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        hidden, wide = spec.hidden_size, spec.intermediate_size
        self._shapes = {
            "q_proj": (heads, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden), "o_proj": (hidden, heads),
            "gate_proj": (wide, hidden), "up_proj": (wide, hidden), "down_proj": (hidden, wide),
            "embed_tokens": (spec.vocab_size, hidden), "lm_head": (spec.vocab_size, hidden),
        }  # fmt: skip
        self._spec, self.device = spec, device

    def has(self, name: str) -> bool:
        return name.endswith(".weight") and not any(word in name for word in ("bias", "q_norm", "k_norm"))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes.get(name.split(".")[-2], (self._spec.hidden_size,))

    def stored(self, name: str) -> str:
        return "F32"

    def skip(self, *names: str) -> None: ...

    def rows(self, name: str, ranges: Sequence[Range], dtype: torch.dtype | None = None) -> Tensor:
        shape = self.shape(name)
        seed = torch.Generator().manual_seed(sum(name.encode()))
        whole = torch.randn(shape, generator=seed) * 0.1 if len(shape) == 2 else torch.ones(shape)
        return torch.cat([whole[a:b] for a, b in ranges]).to(self.device, dtype)

    def fill(
        self, out: Tensor, name: str, rows: Sequence[Range], columns: Range | None = None, *,
        index: int | None = None, place: Any = Tensor.copy_, unit: int = 1,
    ) -> None:  # fmt: skip
        chosen = self.rows(name, rows)
        place(out, chosen if columns is None else chosen[:, slice(*columns)])


def decoder(backend: Any, device: torch.device) -> Decoder:
    spec = spec_of(ModelConfig(CONFIG))
    return build(spec, RandomReader(spec, device), Placement(device, torch.float32), backend)


def filled_cache(runner: Decoder, device: torch.device) -> KvCache:
    cache = KvCache(runner.kv_shapes, 64, BLOCK, torch.float32, device)
    for number, rows in enumerate(cache.rows):
        rows.copy_(torch.randn(rows.shape, generator=torch.Generator().manual_seed(number)))
    return cache


def step(lengths: list[int], seed: int, device: torch.device) -> ModelInputs:
    dice = torch.Generator().manual_seed(seed)
    blocks = (torch.randperm(63, generator=dice) + 1).tolist()
    tables = torch.zeros(len(lengths), 7, dtype=torch.int32)
    slots = []
    for row, length in enumerate(lengths):
        for place in range(-(-length // BLOCK)):
            tables[row, place] = blocks.pop()
        slots.append(int(tables[row, (length - 1) // BLOCK]) * BLOCK + (length - 1) % BLOCK)
    kv_lengths = torch.tensor(lengths, dtype=torch.int32)
    metadata = AttentionMetadata(
        slots=torch.tensor(slots, device=device),
        block_tables=tables.to(device),
        cu_seqlens_q=torch.arange(len(lengths) + 1, dtype=torch.int32, device=device),
        kv_lengths=kv_lengths.to(device),
        query_lengths_host=(1,) * len(lengths),
        kv_lengths_host=tuple(lengths),
    )
    ids = torch.randint(0, 97, (len(lengths),), generator=dice)
    return ModelInputs(ids.to(device), (kv_lengths.long() - 1).to(device), metadata, None)


def test_replays_of_a_decoder(device: torch.device) -> None:
    backend = TritonBackend()
    assert backend.capturable
    inner, plain = decoder(backend, device), decoder(ReferenceBackend(), device)
    runner = GraphedRunner(inner, (4, 1), CudaGraphCapture(device) if device.type == "cuda" else PlainGraphCapture())
    cache, same = filled_cache(inner, device), filled_cache(inner, device)
    runner.capture(cache, MAX_LENGTH, ProcessGroup())
    assert runner.captured_sizes == (1, 4)
    for rows in same.rows:
        rows[:BLOCK] = float("nan")  # nobody reads the padding's block
    for seed, lengths in enumerate([[40, 3, 100, 17], [16], [33, 100], [2, 48, 7, 5, 1]]):
        inputs = step(lengths, seed, device)
        logits = runner.forward(inputs, cache)
        expected = plain.forward(inputs, same)
        assert logits.shape == expected.shape
        assert torch.linalg.norm(logits - expected) < 1e-4 * torch.linalg.norm(expected)
        for ours, theirs in zip(cache.rows, same.rows, strict=True):
            assert torch.allclose(ours[BLOCK:], theirs[BLOCK:], atol=1e-4), "padding writes the reserved block alone"


def windows(lengths: list[int], valid: list[int], places: int, seed: int, device: torch.device) -> ModelInputs:
    """Of each sequence the queries behind `length` - 1 tokens: `valid`, then padding, `places` in all."""
    one = step([length + places for length in lengths], seed, device)
    first = torch.tensor(lengths, device=device)[:, None]
    number = torch.arange(places, device=device)
    inside = number < torch.tensor(valid, device=device)[:, None]
    stored = (first - 1 + number).masked_fill(~inside, 0)
    tables = one.attention.block_tables
    slots = (tables.gather(1, stored // BLOCK) * BLOCK + stored % BLOCK).long().masked_fill(~inside, 0)
    flat = inside.view(-1, 1)
    count = len(flat)
    metadata = AttentionMetadata(
        slots=slots.view(-1),
        block_tables=tables.repeat_interleave(places, 0).masked_fill(~flat, 0),
        cu_seqlens_q=torch.arange(count + 1, dtype=torch.int32, device=device),
        kv_lengths=(stored + 1).view(-1).int(),
        query_lengths_host=(1,) * count,
        kv_lengths_host=tuple(length + place for length in lengths for place in range(places)),
        places=places,
    )
    ids = torch.randint(0, 97, (count,), generator=torch.Generator().manual_seed(seed)).to(device)
    return ModelInputs(ids.masked_fill(~flat.view(-1), 0), stored.view(-1), metadata, None)


def test_replays_of_windows(device: torch.device) -> None:
    """What single queries say, whose padding and whose sequences without a draft do no harm."""
    inner, plain = decoder(TritonBackend(), device), decoder(ReferenceBackend(), device)
    capture = CudaGraphCapture(device) if device.type == "cuda" else PlainGraphCapture()
    runner = GraphedRunner(inner, (4, 1), capture, {4: (2, 1), 2: (3,)})
    cache, same = filled_cache(inner, device), filled_cache(inner, device)
    runner.capture(cache, MAX_LENGTH, ProcessGroup())
    assert {places: runner._captured(places) for places in (4, 2)} == {4: (1, 2), 2: (3,)}
    cases = [
        ([40, 3], [4, 2], 4),
        ([2, 17, 33], [2, 1, 2], 2),
        ([20, 9], [3, 0], 3),
        ([50, 5], [0, 2], 2),
    ]
    for seed, (lengths, valid, places) in enumerate(cases):
        inputs = windows(lengths, valid, places, seed, device)
        logits, expected = runner.forward(inputs, cache), plain.forward(inputs, same)
        kept = torch.cat([torch.arange(n) + places * row for row, n in enumerate(valid)]).to(device)
        assert torch.linalg.norm((logits - expected)[kept]) < 1e-4 * torch.linalg.norm(expected[kept])
        assert logits.isfinite().all()
        for ours, theirs in zip(cache.rows, same.rows, strict=True):
            assert torch.allclose(ours[BLOCK:], theirs[BLOCK:], atol=1e-4), "padding writes the reserved block alone"


def test_replays_of_steps_with_prompts(device: torch.device) -> None:
    inner, plain = decoder(TritonBackend(), device), decoder(ReferenceBackend(), device)
    runner = GraphedRunner(inner, (4, 1), CudaGraphCapture(device) if device.type == "cuda" else PlainGraphCapture())
    cache, same = filled_cache(inner, device), filled_cache(inner, device)
    runner.capture(cache, MAX_LENGTH, ProcessGroup())
    assert runner.captured_tokens == (16, 40)
    for rows in same.rows:
        rows[:BLOCK] = float("nan")
    for seed, spans in enumerate([[(0, 30), (47, 48)], [(60, 68), (0, 3), (11, 12)], [(3, 17)]]):
        tables = [range(1 + 7 * row, 8 + 7 * row) for row in range(len(spans))]
        metadata = attention_metadata(tables, spans, BLOCK, device)
        positions = torch.cat([torch.arange(first, last) for first, last in spans])
        ids = torch.randint(0, 97, positions.shape, generator=torch.Generator().manual_seed(seed))
        rows = metadata.cu_seqlens_q[1:].long() - 1
        inputs = ModelInputs(ids.to(device), positions.to(device), metadata, rows)
        logits, expected = runner.forward(inputs, cache), plain.forward(inputs, same)
        assert logits.data_ptr() == runner.forward(inputs, cache).data_ptr(), "replayed: into the same memory"
        assert torch.linalg.norm(logits - expected) < 1e-4 * torch.linalg.norm(expected)
        for ours, theirs in zip(cache.rows, same.rows, strict=True):
            assert torch.allclose(ours[BLOCK:], theirs[BLOCK:], atol=1e-4), "padding writes the reserved block alone"
