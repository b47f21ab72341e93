"""The arithmetic of the GPU stages against a table worked out by hand: 4.3 TB/s, 788 TFLOP/s, 143,771 MiB."""

from __future__ import annotations

import pytest

from benchmarks.gpu.measuring import roofline
from benchmarks.gpu.measuring.roofline import Cost, Machine, cost_of
from benchmarks.gpu.subjects.shapes import LLAMA_1B, LLAMA_8B, QWEN_MOE, TOY, TOY_MOE, TOY_UNTIED, Shape
from model_server.models.config import ModelConfig
from model_server.models.families import spec_of

MACHINE = Machine(bandwidth=4.3e12, flops=788e12, gap_s=1.3e-6, memory=143_771 * 2**20)
COSTS = {shape.name: cost_of(shape.spec) for shape in (LLAMA_1B, LLAMA_8B, QWEN_MOE)}

# batch, context: ms per step and output tokens/s of 1B, 8B and MoE.
STEPS = [
    (1, 1024, (0.58, 1_716), (3.52, 284), (1.44, 695)),
    (8, 1024, (0.64, 12_554), (3.74, 2_139), (6.20, 1_291)),
    (32, 1024, (0.83, 38_811), (4.49, 7_128), (13.10, 2_444)),
    (64, 1024, (1.07, 59_579), (5.49, 11_661), (15.34, 4_173)),
    (128, 1024, (1.57, 81_341), (7.49, 17_099), (17.05, 7_508)),
    (256, 1024, (2.80, 91_408), (12.87, 19_896), (20.05, 12_769)),
    (32, 4096, (1.57, 20_335), (7.49, 4_275), (15.34, 2_086)),
    (128, 4096, (4.57, 28_008), (19.47, 6_574), (26.04, 4_916)),
]


@pytest.mark.parametrize(
    ("shape", "params", "kv_bytes"),
    [(LLAMA_1B, 1.236e9, 32_768), (LLAMA_8B, 8.030e9, 131_072), (QWEN_MOE, 30.53e9, 98_304)],
    ids=["1B", "8B", "MoE"],
)
def test_sizes(shape: Shape, params: float, kv_bytes: int) -> None:
    cost = COSTS[shape.name]
    assert cost.total_bytes / 2 == pytest.approx(params, rel=5e-4)
    assert cost.kv_bytes == kv_bytes


@pytest.mark.parametrize("row", STEPS, ids=[f"b{row[0]}-c{row[1]}" for row in STEPS])
def test_decode_steps(row: tuple[int, int, tuple[float, int], tuple[float, int], tuple[float, int]]) -> None:
    batch, context, *figures = row
    for name, (milliseconds, tokens) in zip(("1B", "8B", "MoE"), figures, strict=True):
        seconds = roofline.step_seconds(COSTS[name], MACHINE, batch, context)
        assert seconds * 1e3 == pytest.approx(milliseconds, abs=0.006), name
        assert batch / seconds == pytest.approx(tokens, rel=1e-3), name


@pytest.mark.parametrize(
    ("name", "short", "long"), [("1B", 379e3, 222e3), ("8B", 54.4e3, 34.2e3), ("MoE", 126e3, 63.5e3)]
)
def test_prefill(name: str, short: float, long: float) -> None:
    cost = COSTS[name]
    assert 2048 / roofline.prefill_seconds(cost, MACHINE, [2048]) == pytest.approx(short, rel=5e-3)
    assert 0.7 * 8192 / roofline.prefill_seconds(cost, MACHINE, [8192]) == pytest.approx(long, rel=5e-3)


@pytest.mark.parametrize(("name", "tokens"), [("1B", 4.23e6), ("8B", 955e3), ("MoE", 815e3)])
def test_kv_capacity(name: str, tokens: float) -> None:
    assert roofline.kv_tokens(COSTS[name], MACHINE, 0.95) == pytest.approx(tokens, rel=2e-3)


@pytest.mark.parametrize(
    ("prompt", "output", "figures"),
    [
        (128, 2048, (82.8e3, 18.1e3, 18.4e3)),
        (1000, 1000, (58.4e3, 12.1e3, 14.5e3)),
        (2048, 2048, (34.3e3, 7.6e3, 7.5e3)),
        (2048, 128, (16.3e3, 2.65e3, 4.7e3)),
    ],
    ids=["128-2048", "1000-1000", "2048-2048", "2048-128"],
)
def test_offline_throughput(prompt: int, output: int, figures: tuple[float, float, float]) -> None:
    for name, expected in zip(("1B", "8B", "MoE"), figures, strict=True):
        capacity = roofline.kv_tokens(COSTS[name], MACHINE, 0.95)
        found = roofline.offline_tokens_per_second(COSTS[name], MACHINE, prompt, output, capacity)
        assert found == pytest.approx(expected, rel=2e-2), name


@pytest.mark.parametrize("shape", [TOY, TOY_UNTIED, TOY_MOE, LLAMA_8B], ids=lambda s: s.name.replace(" ", "-"))
def test_cost_counts_the_tensors_of_the_shape(shape: Shape) -> None:
    """All matrices of the checkpoint; only norms, vectors, are left out."""
    matrices = [s for s in shape.tensors().values() if len(s) == 2]
    assert cost_of(shape.spec).total_bytes == 2 * sum(a * b for a, b in matrices)


def test_what_has_no_roofline_is_refused() -> None:
    fields = {
        "model_type": "deepseek_v3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 96, "vocab_size": 320, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 16, "q_lora_rank": None, "n_routed_experts": 8, "first_k_dense_replace": 2,
        "n_group": 1, "topk_group": 1,
    }  # fmt: skip
    with pytest.raises(ValueError, match="latent attention"):
        cost_of(spec_of(ModelConfig(fields)))


def test_a_large_batch_is_bound_by_products() -> None:
    cost = Cost(shared=10**9, head=0, embedding=0, query_width=1, layers=1, kv_bytes=1)
    assert roofline.matrix_seconds(cost, MACHINE, 1) == pytest.approx(2e9 / 4.3e12)
    assert roofline.matrix_seconds(cost, MACHINE, 10_000) == pytest.approx(2e13 / 788e12)
