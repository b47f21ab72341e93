"""The backend that a CPU is given (the C++ one, or the reference where no compiler is) against the definition."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from parity.protocol import CPU
from support.attention_scene import BATCHES, HEADS, Scene

from model_server.attention.backend import Alibi
from model_server.attention.choice import AttentionChoice
from model_server.cpp.library import library

BACKEND = AttentionChoice(None, CPU).for_layers()
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
SLOPES = torch.tensor([0.7, 0.31, 0.011, 0.17])  # that bfloat16 cannot hold
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 8},
    "chunk": {"chunk": 8},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": SINKS},
    "alibi": {"alibi": Alibi(SLOPES)},
    "alibi, rounded": {"alibi": Alibi(SLOPES, 0.25)},
    "everything": {"alibi": Alibi(SLOPES), "window": 8, "softcap": 2.0, "sinks": SINKS},
}
# Longer than a span of keys, than a block of them, and than a run of queries.
LONG = {
    "decode": [(1, 700), (1, 256), (1, 257), (1, 3)],
    "prompt": [(300, 300)],
    "mixed": [(1, 600), (140, 400), (2, 131), (129, 129)],
}
MANY = [(1, 200 + 97 * i) for i in range(9)]
DIMS = {"wide": (128, 128), "odd": (24, 20), "of 80": (80, 80)}


def test_chosen() -> None:
    assert BACKEND.name == ("reference" if library() is None else "cpp")


@pytest.mark.thinned(3)
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("batch", (BATCHES | LONG).values(), ids=BATCHES | LONG)
def test_equals_the_definition(batch: list[tuple[int, int]], heads: tuple[int, int], options: dict[str, Any]) -> None:
    scene = Scene(batch, *heads, 16)
    layer = scene.layer(**options)
    torch.testing.assert_close(scene.attend(layer, BACKEND).double(), scene.expected(layer), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("past_windows", [False, True])
@pytest.mark.parametrize("options", [{}, {"window": 8}, {"window": 100}, KINDS["everything"]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_prompts_whose_tokens_see_ahead(dtype: torch.dtype, options: dict[str, Any], past_windows: bool) -> None:
    """Over borders of runs and of blocks of keys, the first of them on a prefix, beside causal rows."""
    scene = Scene([(1, 300), (600, 700), (7, 7), (300, 300), (1, 9)], 4, 2, 16, dtype)
    scene.see_ahead((1, 90, 110), (1, 120, 420), (1, 500, 700), (2, 2, 5), whole=(3,), past_windows=past_windows)
    layer = scene.layer(**options)
    bound = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(scene.attend(layer, BACKEND).double(), scene.expected(layer), rtol=bound, atol=bound)


@pytest.mark.parametrize("dims", DIMS.values(), ids=DIMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("batch", LONG.values(), ids=LONG)
def test_sizes(batch: list[tuple[int, int]], dtype: torch.dtype, dims: tuple[int, int]) -> None:
    scene = Scene(batch, 10, 1, 4, dtype, dims[1], dim=dims[0])
    layer = scene.layer()
    result = scene.attend(layer, BACKEND)
    assert result.dtype == dtype
    bound = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(result.double(), scene.expected(layer), rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("batch", "heads"), [(LONG["mixed"], (4, 2)), (MANY, (12, 4))], ids=["mixed", "many"])
def test_neighbours_and_threads_change_nothing(
    batch: list[tuple[int, int]], heads: tuple[int, int], dtype: torch.dtype
) -> None:
    """Bit for bit, with the C++ operators; the reference pads rows to a common length. Of many sequences a thread takes
    several KV heads at once."""
    scene = Scene(batch, *heads, 16, dtype)
    layer = scene.layer()
    together = scene.attend(layer, BACKEND)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        shared = scene.attend(layer, BACKEND)
    finally:
        torch.set_num_threads(threads)
    alone = Scene(batch, *heads, 16, dtype)
    parts = []
    for row in range(len(alone.batch)):
        whole = scene.metadata
        start, stop = (int(whole.cu_seqlens_q[row + i]) for i in (0, 1))
        alone.metadata = type(whole)(
            slots=whole.slots[start:stop],
            block_tables=whole.block_tables[row : row + 1].contiguous(),
            cu_seqlens_q=torch.tensor([0, stop - start], dtype=torch.int32),
            kv_lengths=whole.kv_lengths[row : row + 1],
            query_lengths_host=whole.query_lengths_host[row : row + 1],
            kv_lengths_host=whole.kv_lengths_host[row : row + 1],
        )
        alone.query, alone.new_key, alone.new_value = (
            t[start:stop] for t in (scene.query, scene.new_key, scene.new_value)
        )
        parts.append(alone.attend(layer, BACKEND))
    bound = 0.0 if library() is not None else 2e-2
    torch.testing.assert_close(shared, together, rtol=bound, atol=bound)
    torch.testing.assert_close(torch.cat(parts), together, rtol=bound, atol=bound)


@pytest.mark.parametrize("options", [{}, {"softcap": 30.0}], ids=["plain", "softcap"])
def test_a_broken_sequence_stays_alone(options: dict[str, Any]) -> None:
    """And is not mended by a bound on its scores."""
    scene = Scene([(1, 40), (1, 300), (5, 60), (1, 50)], 4, 2, 16)
    layer = scene.layer(**options)
    clean = scene.attend(layer, BACKEND)
    scene.cache.keys[0][scene.metadata.block_tables[1, :10].long()] = math.nan
    poisoned = scene.attend(layer, BACKEND)
    others = [row for row in range(len(clean)) if row != 1]
    assert torch.equal(poisoned[others], clean[others])
    assert poisoned[1].isnan().all()


@pytest.mark.parametrize("options", [{"window": 8}, {"chunk": 8}], ids=["window", "chunk"])
def test_keys_out_of_reach_are_not_read(options: dict[str, Any]) -> None:
    for batch in ([(1, 64)], [(1, 64), (1, 39)], [(4, 64), (1, 39), (3, 48)]):
        scene = Scene(batch, 4, 2, 4)
        layer = scene.layer(**options)
        clean = scene.attend(layer, BACKEND)
        for row, (count, total) in enumerate(batch):
            first = total - count
            reach = first + 1 - 8 if "window" in options else first - first % 8
            scene.cache.rows[0].view(-1, 4, 64)[scene.metadata.block_tables[row, : reach // 4].long()] = math.nan
        assert torch.equal(scene.attend(layer, BACKEND), clean)
