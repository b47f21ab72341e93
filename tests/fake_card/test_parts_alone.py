"""Parts of the shard alone on the stand-in, on few numbers: what they compute is what the CPU computes. They are the
lines that ask the driver something and that no model of the other tests comes to.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engines import CARD, CPU
from stand_in import queued
from support.attention_scene import Scene
from support.latent_scene import LatentScene
from torch import Tensor

from model_server import device_probe, stopwatch
from model_server.attention import flash_attn, flash_prefill, torch_varlen
from model_server.attention.availability import UnavailableError
from model_server.attention.triton_paged import TritonBackend
from model_server.config import ServeConfig
from model_server.device import resolve_dtype
from model_server.distributed.group import ProcessGroup
from model_server.layers.activation import gated
from model_server.layers.experts.experts import ExpertWeights
from model_server.layers.experts.grouped import GroupedExperts
from model_server.layers.experts.triton import TritonExperts
from model_server.layers.linear import factory
from model_server.layers.linear.decode_gemm import BUCKETS, DecodeGemmLinear
from model_server.layers.linear.factory import LinearFactory
from model_server.layers.linear.triton import TritonQuantizedLinear
from model_server.quantization.forms import Plain
from model_server.quantization.forms.float8 import quantize_rows
from model_server.recurrence.states import StatePool, StateShape, reserve_states
from model_server.runner.graph_capture import CudaGraphCapture
from model_server.runner.runner import RequestState

pytestmark = pytest.mark.short


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 4


# ---- What the machine has


def test_the_card_is_found_and_its_kernels_run() -> None:
    found = device_probe.probe()
    assert (found["gpus"], found["reason"], found["triton"]) == (torch.cuda.device_count(), None, None)


@pytest.mark.parametrize(
    ("stored", "dtype"), [("BF16", torch.bfloat16), ("F16", torch.float16), ("F32", torch.bfloat16)]
)
def test_the_type_of_numbers_that_a_card_takes(stored: str, dtype: torch.dtype) -> None:
    assert resolve_dtype(None, CARD, stored) == dtype


# ---- Attention


@pytest.mark.usefixtures("order")
def test_latent_attention_of_prompts_that_are_cut_into_pieces() -> None:
    """Short runs of queries between long ones, so that those of a piece do not lie side by side."""
    scene = LatentScene([(1, 9), (40, 60), (3, 20), (30, 30)], device=CARD)
    queued.waits.clear()
    found = scene.attend(TritonBackend())
    assert not [site for site in queued.waits if "latent.py" in site], "what is uploaded is pinned"
    torch.testing.assert_close(found.cpu().double(), scene.expected().cpu(), rtol=1e-4, atol=1e-4)


_LIBRARY_4 = """
from support.flash_doubles import varlen_func_4

CALLS = []


def flash_attn_varlen_func(q, k, v, **options):
    CALLS.append(len(q))
    there = {name: x.cpu() if hasattr(x, "cpu") else x for name, x in options.items()}
    result, rest = varlen_func_4(q.cpu(), k.cpu(), v.cpu(), **there)
    return result.to(q.device), rest
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of packages that are found first."""
    monkeypatch.syspath_prepend(tmp_path)
    known = set(sys.modules)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0].startswith("flash_attn") and name not in known]:
        del sys.modules[name]


@pytest.mark.usefixtures("order")
def test_a_library_for_prompts_is_found_tried_and_used(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A double of flash-attn 4, installed as the real one is."""
    monkeypatch.setattr(flash_prefill, "_TRIALS", ((3, 5), (20,)))
    assert flash_prefill.installed(CARD) is None
    package = site / flash_prefill.MODULE.replace(".", "/")
    package.parent.mkdir(parents=True)
    package.with_suffix(".py").write_text(_LIBRARY_4)
    (site / "flash_attn_4-4.0.0.dist-info").mkdir()
    (site / "flash_attn_4-4.0.0.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: flash-attn-4\nVersion: 4.0.0\n"
    )
    library = flash_prefill.installed(CARD)
    assert library is not None
    scene = Scene([(1, 9), (20, 40), (5, 5)], 4, 2, 16, torch.bfloat16, device=CARD)
    layer = scene.layer()
    found = scene.attend(layer, TritonBackend(prefill=library)).cpu().double()
    torch.testing.assert_close(found, scene.expected(layer), rtol=1e-2, atol=1e-2)
    assert sys.modules[flash_prefill.MODULE].CALLS[-1] == 25, "both prompts, and not the single query"


def test_libraries_of_attention_that_are_not_there(site: Path) -> None:
    with pytest.raises(UnavailableError, match="flash-attn is not installed"):
        flash_attn.available(CARD, torch.bfloat16)
    with pytest.raises(UnavailableError, match="float16 and bfloat16, not in float32"):
        flash_attn.available(CARD, torch.float32)
    (site / "flash_attn_interface.py").write_text("def flash_attn_with_kvcache(): ...\n")
    assert flash_attn.available(CARD, torch.bfloat16).block_size == 16, "version 3, on a card of capability 9.0"
    # This torch has pages (2.12 and later) or says that it has none.
    try:
        assert torch_varlen.available(CARD, torch.bfloat16).block_size == 256
    except UnavailableError as error:
        assert "varlen" in str(error)


# ---- Products


def _experts(dtype: torch.dtype, device: torch.device, hidden: int, size: int, num: int) -> list[ExpertWeights]:
    return [
        ExpertWeights(
            Plain(noise(2 * size, hidden, seed=2 * e).to(device, dtype)),
            Plain(noise(hidden, size, seed=2 * e + 1).to(device, dtype)),
        )
        for e in range(num)
    ]


@pytest.mark.parametrize("kind", ["grouped", "kernels"])
@pytest.mark.usefixtures("order")
def test_experts_in_a_graph(kind: str) -> None:
    """Sorted and multiplied on the device alone: neither asks for where an expert begins."""
    dtype, hidden, size, num, tokens = torch.bfloat16, 64, 32, 4, 5
    activation = gated("silu")
    weights = _experts(dtype, CARD, hidden, size, num)
    made: Any = (
        GroupedExperts(weights, num, activation, dtype, on_input=False)
        if kind == "grouped"
        else TritonExperts(weights, activation, dtype, on_input=False)
    )
    assert made.capturable
    x, chosen = noise(tokens, hidden, seed=90), torch.tensor([[0, 3], [3, 1], [1, 0], [3, 0], [1, 3]])
    shares = noise(tokens, 2, seed=91).softmax(-1)
    expected = torch.zeros(tokens, hidden)
    for token, place in product(range(tokens), range(2)):
        one = _experts(torch.float32, CPU, hidden, size, num)[int(chosen[token, place])]
        up = one.up.dequantize(torch.float32) @ x[token]
        inner = F.silu(up[:size]) * up[size:]
        expected[token] += shares[token, place] * (one.down.dequantize(torch.float32) @ inner)
    given = torch.zeros(tokens, hidden, dtype=dtype, device=CARD)
    asked = shares.to(CARD), torch.zeros_like(chosen, device=CARD)
    out = torch.empty_like(given)
    capture = CudaGraphCapture(CARD)
    capture.warm_up(lambda: out.copy_(made(given, *asked)))
    graph = capture.capture(lambda: out.copy_(made(given, *asked)))
    given.copy_(x)
    asked[1].copy_(chosen)
    graph.replay()
    torch.testing.assert_close(out.float().cpu(), expected, rtol=2e-2, atol=2e-2)
    graph.release()


@pytest.mark.usefixtures("order")
def test_every_product_that_a_shape_may_get(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timed as while a model is loaded, then each in turn."""
    monkeypatch.setattr(factory, "SMALLEST_MEASURED", 1)
    monkeypatch.setattr(stopwatch, "_REPEATS", 1)
    monkeypatch.setattr(stopwatch, "_CACHE_BYTES", 1 << 10)
    weight, bias = noise(96, 64, seed=1), noise(96, seed=2)
    products = LinearFactory(CARD, torch.bfloat16)
    linear = products.make(Plain(weight.to(CARD, torch.bfloat16)), bias.to(CARD, torch.bfloat16))
    assert isinstance(linear, DecodeGemmLinear)
    products.measure(ProcessGroup())
    gemm: Any = linear.gemm
    for bucket, rows in enumerate(BUCKETS):
        x = noise(rows, 64, seed=rows)
        expected = F.linear(x.bfloat16().float(), weight.bfloat16().float(), bias.bfloat16().float())
        for number in range(len(gemm.candidates[bucket])):
            gemm.choose(bucket, number)
            found = linear.wide(x.to(CARD, torch.bfloat16)).cpu()
            torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.usefixtures("order")
def test_a_matrix_of_8_bit_floats(rows: int) -> None:
    """Few rows by our kernel, many by torch's scaled product."""
    weight = noise(64, 96, seed=1)
    form = replace(quantize_rows(weight, weight.abs().amax(1)), float8_inputs=True)
    on_card = replace(form, weight=form.weight.to(CARD), scales=form.scales.to(CARD))
    x = noise(rows, 96, seed=2)
    found = TritonQuantizedLinear(on_card, None, torch.bfloat16)(x.to(CARD, torch.bfloat16))
    expected = F.linear(x, form.dequantize(torch.float32))
    assert float((found.float().cpu() - expected).norm() / expected.norm()) < 0.04


# ---- States


@pytest.mark.usefixtures("order")
def test_states_take_a_share_of_the_card() -> None:
    def made(device: torch.device) -> StatePool:
        pool = StatePool(
            {0: StateShape((2, 3), torch.float32, (1, 2, 2)), 1: StateShape((1, 4), torch.float32, (2, 1, 1))}, device
        )
        config = ServeConfig(model_id="none", state_slots=5)
        assert reserve_states(pool, config, device, 1).num_slots == 5 and pool.num_slots == 6
        for index, slot in product(range(2), range(6)):
            pool.layer(index).state[slot], pool.layer(index).inputs[slot] = slot + index, slot - index
        pool.start([RequestState(1, 1, restored_from=2), RequestState(1, 2, restored_from=3)], [16, 16])
        return pool

    on_card, on_cpu = made(CARD), made(CPU)
    for index in range(2):
        assert torch.equal(on_card.layer(index).state.cpu(), on_cpu.layer(index).state)
        assert torch.equal(on_card.layer(index).inputs.cpu(), on_cpu.layer(index).inputs)
    large = StatePool({0: StateShape((1, 1), torch.float32, (1, 1, (16 << 20) // 4))}, CARD)
    free = torch.cuda.mem_get_info(CARD)[0]
    found = reserve_states(large, ServeConfig(model_id="none", state_slots=2), CARD, 1)
    assert found.num_bytes == 3 * large.slot_bytes <= math.ceil(free / 2)
