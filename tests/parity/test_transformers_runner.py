"""transformers' modelling over the paged cache equals transformers alone, type by type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parity.library import PAGED, load, make_case
from parity.protocol import CHUNKS, PagedBatch, assert_equal_logits, run_protocol
from support.graph_doubles import PlainGraph, PlainGraphCapture
from support.loading import load as load_native

from model_server.attention.backend import AttentionStep
from model_server.attention.metadata import AttentionMetadata
from model_server.attention.reference import ReferenceBackend
from model_server.distributed.group import ProcessGroup
from model_server.memory.kv_cache import KvCache
from model_server.models.decoder.decoder import Decoder
from model_server.models.hf.paged import TransformersRunner
from model_server.models.hf.self_check import alone, check_captured

# One for each thing that reaches our attention its own way: nothing special, windows with capped scores, sinks,
# chunks, keys wider than values, packed experts, keyword arguments that get lost, layers that share keys.
REPRESENTATIVE = ("olmo", "gemma2", "gpt_oss", "llama4_text", "minicpm3", "granitemoe", "nemotron", "gemma3n_text")

_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0, 1.2, 1.4, 1.7, 2.0, 2.1, 2.5, 3.0],
    "long_factor": [1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


def check(model_type: str, path: Path, **overrides: Any) -> None:
    case = make_case(model_type, path, **overrides)
    runner = load(path)
    assert isinstance(runner, TransformersRunner)
    for block_size, steps in ((4, None), (16, CHUNKS)):
        options = {} if steps is None else {"steps": steps}
        assert_equal_logits(run_protocol(runner, case.sequences, block_size, **options), case.logits)


@pytest.mark.parametrize("model_type", REPRESENTATIVE)
def test_type_equals_transformers(model_type: str, tmp_path: Path) -> None:
    check(model_type, tmp_path)


@pytest.mark.parity
@pytest.mark.parametrize("model_type", [t for t in PAGED if t not in REPRESENTATIVE])
def test_every_type_equals_transformers(model_type: str, tmp_path: Path) -> None:
    check(model_type, tmp_path)


def test_logit_rows_picks_rows_in_order(tmp_path: Path) -> None:
    case = make_case("olmo", tmp_path)
    batch = PagedBatch(load(tmp_path), case.sequences, block_size=4)
    rows = torch.tensor([43, 0, 18, 19])
    with torch.inference_mode():
        logits = batch.runner.forward(batch.inputs([19, 11, 14], rows), batch.cache)
    assert logits.dtype == torch.float32
    assert_equal_logits([logits], [torch.cat(case.logits)[rows]])


@pytest.mark.parametrize("native", [True, False], ids=["native", "library"])
@pytest.mark.parametrize("rope", [_LONGROPE, _DYNAMIC], ids=lambda r: r["rope_type"])
def test_rotations_by_the_longest_sequence(rope: dict[str, Any], native: bool, tmp_path: Path) -> None:
    """Where sequences go beyond the original length all have the rotations of the longest, also in chunks and beside
    others; where none does, those of short ones."""
    case = make_case("llama", tmp_path, rope_parameters=rope, max_position_embeddings=32)
    runner = load_native(tmp_path) if native else load(tmp_path)
    assert isinstance(runner, Decoder if native else TransformersRunner)
    long = torch.randint(0, 256, (48,), generator=torch.Generator().manual_seed(5))
    expected = alone(case.model, long).detach()
    runner.set_longest(48)
    batch = PagedBatch(runner, [case.sequences[0], long], block_size=4)
    parts = [batch.step(counts)[1] for counts in ((6, 20), (13, 21), *((0, 1),) * 7)]
    assert_equal_logits([torch.cat(parts)], [expected])
    runner.set_longest(32)
    assert_equal_logits(run_protocol(runner, case.sequences, 4), case.logits)


class Idle(PlainGraphCapture):
    """Graphs that do nothing when they are replayed, as modelling code may look that decides on the host."""

    def capture(self, work: Callable[[], object]) -> PlainGraph:
        return super().capture(lambda: None)

    def capture_pieces(self, work: Callable[[Callable[[], None]], object]) -> tuple[PlainGraph, ...]:
        pieces = super().capture_pieces(work)
        for piece in pieces:
            piece.replay = lambda: None
        return pieces


@pytest.mark.parametrize(
    ("capture", "passed"),
    [
        (PlainGraphCapture(), True),
        (Idle(), False),
        (PlainGraphCapture(fail=dict.fromkeys(range(9), RuntimeError("not permitted"))), False),
    ],
    ids=["the same", "other results", "not captured"],
)
def test_steps_are_captured_where_replays_are_the_same(
    capture: PlainGraphCapture, passed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = ReferenceBackend.start

    def by_true_lengths(self: ReferenceBackend, metadata: AttentionMetadata, cache: KvCache) -> AttentionStep:
        """As backends that can be captured: those on the device count, not the host's bounds."""
        return begin(self, replace(metadata, kv_lengths_host=tuple(metadata.kv_lengths.tolist())), cache)

    monkeypatch.setattr(ReferenceBackend, "start", by_true_lengths)
    monkeypatch.setattr("model_server.runner.cuda_graphs.TOKEN_SIZES", (64,))
    make_case("olmo", tmp_path)
    runner = load(tmp_path)
    assert isinstance(runner, TransformersRunner) and not runner.traits.capturable
    with torch.inference_mode():
        assert check_captured(runner, capture, torch.float32, torch.device("cpu"), ProcessGroup()) is passed
    assert all(graph.released for graph in capture.graphs)
    runner.allow_capture()
    assert runner.traits.capturable
