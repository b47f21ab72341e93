"""LoRA adapters of experts: parameters that hold all of them, as PEFT computes them, and matrices of single ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parity.protocol import CPU, assert_equal_logits, prompts, run_protocol
from safetensors.torch import load_file, save_file
from support.adapters import write_adapter
from support.loading import load
from support.peft_adapters import fill_slots, peft_adapter, peft_logits
from support.thread_ranks import on_ranks
from support.tiny_models import tiny_checkpoint
from torch import Tensor

from model_server.adapters.rows import BASE
from model_server.cpp.library import usable
from model_server.distributed.group import ProcessGroup
from model_server.errors import StartupError
from model_server.features.adapters.load import with_adapters
from model_server.features.adapters.residents import Residents
from model_server.models.model import describe
from model_server.quantization.forms import Plain
from model_server.weights.checkpoint import examine

SEQUENCES = prompts(512)
UP, DOWN = "experts.gate_up_proj", "experts.down_proj"
OUTER = "base_model.model.model.layers.0.mlp.experts"
FAMILIES: list[Any] = [
    ("mixtral", [UP, DOWN]),
    ("gpt_oss", [UP, DOWN]),
    ("llama4_text", [UP, DOWN]),
    *(
        pytest.param(name, targets, marks=pytest.mark.parity)
        for name, targets in (
            ("qwen3_moe", [DOWN]),
            ("qwen2_moe", [UP]),
            ("phimoe", [UP, DOWN]),
            ("deepseek_v3", [UP, DOWN]),
            ("granitemoe", [UP, DOWN]),
        )
    ),
]


@pytest.mark.parametrize(("model_type", "targets"), FAMILIES)
def test_parameters_of_all_experts(model_type: str, targets: list[str], tmp_path: Path) -> None:
    """Beside an adapter of one of them with ranks by pattern, and no adapter; merged, too; on one rank and on two."""
    pytest.importorskip("peft")
    model = tiny_checkpoint(model_type, tmp_path / "model", with_tokenizer=False)
    attention = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"] if "deepseek" in model_type else ["v_proj"]
    first = peft_adapter(model, tmp_path / "first", 1, target_modules=attention, target_parameters=targets)
    patterns: dict[str, Any] = {"rank_pattern": {targets[0]: 3}, "alpha_pattern": {r"layers\.1\..*": 5}}
    second = peft_adapter(
        model, tmp_path / "second", 2, target_modules=[], target_parameters=targets[:1], use_rslora=True, **patterns
    )
    wanted = [peft_logits(model, a, [s])[0] for a, s in zip((first, None, second), SEQUENCES, strict=True)]
    base = peft_logits(model, None, SEQUENCES[:1])[0]
    assert float((wanted[0] - base).abs().max()) > 0.1

    def logits(group: ProcessGroup | None = None, slots: int | None = None) -> list[Tensor]:
        runner = load(model, group=group, adapters={"a": first, "b": second}, adapter_slots=slots)
        fill_slots(runner, 2)
        return run_protocol(runner, SEQUENCES, 4, adapters=(0, BASE, 1))

    assert_equal_logits(logits(), wanted)
    assert_equal_logits(logits(slots=2), wanted)
    for slots in (None, 2):
        for of_rank in on_ranks(2, lambda group, slots=slots: logits(group, slots)):
            assert_equal_logits(of_rank, wanted)
    alone = [wanted[0], *peft_logits(model, first, SEQUENCES[1:])]

    def merged(group: ProcessGroup | None = None) -> list[Tensor]:
        return run_protocol(load(model, group=group, merged=first), SEQUENCES, 4)

    assert_equal_logits(merged(), alone)
    for of_rank in on_ranks(2, merged):
        assert_equal_logits(of_rank, alone)


SINGLE: list[Any] = [
    ("mixtral", "block_sparse_moe.experts.{}", ("w1", "w3", "w2"), 4),
    pytest.param("qwen3_moe", "mlp.experts.{}", ("gate_proj", "up_proj", "down_proj"), 4, marks=pytest.mark.parity),
]


@pytest.mark.parametrize(("model_type", "experts", "names", "count"), SINGLE)
def test_matrices_of_single_experts(
    model_type: str, experts: str, names: tuple[str, ...], count: int, tmp_path: Path
) -> None:
    """As earlier versions of transformers name them. The reference is the model with the sums for weights."""
    model = tiny_checkpoint(model_type, tmp_path / "model", with_tokenizer=False)
    weights = load_file(model / "model.safetensors")
    modules = {
        name.removesuffix(".weight"): (tensor.shape[1], tensor.shape[0])
        for name, tensor in weights.items()
        if any(f".{experts.format(e)}.{part}." in name for e in range(count - 1) for part in names)
    }
    assert len(modules) >= 3 * (count - 1)
    adapter = write_adapter(tmp_path / "adapter", modules)
    factors = load_file(adapter / "adapter_model.safetensors")
    summed = tiny_checkpoint(model_type, tmp_path / "summed", with_tokenizer=False)
    for module in modules:
        a, b = (factors[f"base_model.model.{module}.lora_{letter}.weight"] for letter in "AB")
        weights[f"{module}.weight"] += 2 * b @ a
    save_file(weights, summed / "model.safetensors", {"format": "pt"})
    served = load(model, adapters={"a": adapter})
    plain, changed = (run_protocol(load(path), SEQUENCES, 4) for path in (model, summed))
    assert float((plain[0] - changed[0]).abs().max()) > 0.05
    got = run_protocol(served, SEQUENCES, 4, adapters=(0, BASE, 0))
    assert_equal_logits(got, [changed[0], plain[1], changed[2]])
    assert torch.equal(run_protocol(served, SEQUENCES, 4)[0], plain[0])
    slotted = load(model, adapters={"a": adapter}, adapter_slots=1)
    fill_slots(slotted, 1)
    assert_equal_logits(run_protocol(slotted, SEQUENCES, 4, adapters=(0, BASE, 0)), got)
    for of_rank in on_ranks(2, lambda group: run_protocol(load(model, group=group, merged=adapter), SEQUENCES, 4)):
        assert_equal_logits(of_rank, changed)


def test_lengths_and_biases_of_single_experts(tmp_path: Path) -> None:
    """A bias counts once over the ranks. In slots beside an adapter of the parameter of all experts."""
    model = tiny_checkpoint("mixtral", tmp_path / "model", with_tokenizer=False)
    name = "model.layers.0.block_sparse_moe.experts.{}.{}"
    shapes = {"w1": (64, 96), "w3": (64, 96), "w2": (96, 64)}
    modules = {name.format(e, part): shapes[part] for e in range(4) for part in shapes}
    dice = torch.Generator().manual_seed(3)
    made = {}
    for module, (_, outputs) in modules.items():
        kind = ("lora_magnitude_vector", "lora_B.bias")[module.endswith("w2")]
        made[f"base_model.model.{module}.{kind}"] = 0.5 + torch.rand(outputs, generator=dice)
    first = write_adapter(tmp_path / "first", modules, tensors=made)
    both = {f"{OUTER}.base_layer.lora_A.weight": (16, 64), f"{OUTER}.base_layer.lora_B.weight": (192, 16)}
    both |= {f"{OUTER}.lora_A.weight": (16, 96), f"{OUTER}.lora_B.weight": (64, 16)}
    second = write_adapter(
        tmp_path / "second", {}, tensors={key: torch.randn(shape, generator=dice) / 8 for key, shape in both.items()}
    )

    def logits(group: ProcessGroup | None = None, slots: int | None = None) -> list[Tensor]:
        runner = load(model, group=group, adapters={"a": first, "b": second}, adapter_slots=slots)
        fill_slots(runner, 2)
        return run_protocol(runner, SEQUENCES, 4, adapters=(0, BASE, 1))

    wanted, base = logits(), run_protocol(load(model), SEQUENCES, 4)
    assert all(float((wanted[i] - base[i]).abs().max()) > 0.05 for i in (0, 2))
    assert_equal_logits(wanted[1:2], base[1:2])
    if usable(CPU, torch.float32):  # torch's own products round otherwise beside other rows
        assert torch.equal(wanted[1], base[1])
    assert_equal_logits(logits(slots=2), wanted)
    for slots in (None, 2):
        for of_rank in on_ranks(2, lambda group, slots=slots: logits(group, slots)):
            assert_equal_logits(of_rank, wanted)


def test_experts_have_slots_if_an_adapter_of_the_start_changes_some(tmp_path: Path) -> None:
    """All experts of all layers then; else what comes later is refused, and takes no memory."""
    model = tiny_checkpoint("mixtral", tmp_path / "model", with_tokenizer=False)
    given = write_adapter(tmp_path / "a", {"model.layers.1.block_sparse_moe.experts.2.w2": (96, 64)}, seed=1)
    made = {f"{OUTER}.lora_A.weight": torch.ones(16, 96), f"{OUTER}.lora_B.weight": torch.ones(64, 16)}
    later = {"b": write_adapter(tmp_path / "b", {}, tensors=made)}
    adapter = with_adapters(describe(examine(model)), later).adapters[0]
    runner: Any = load(model, adapter_room=1, adapter_slots=1)
    residents = Residents(runner.adapters, range(1), tmp_path, lambda name, path: adapter, 4)
    for refusing in (lambda: residents.check("b", "b"), lambda: residents.load(1, "b", "b")):
        with pytest.raises(StartupError, match=r"^LoRA adapter `b`: .*down_proj belongs to experts, for which there"):
            refusing()
    runner = load(model, adapters={"a": given}, adapter_room=1, adapter_slots=1)
    runner.adapters.put(1, runner.adapters.read(adapter))
    assert runner.adapters.slots.acquire(1, tuple) == 0
    wanted = run_protocol(load(model, adapters=later), SEQUENCES, 4, adapters=(0, BASE, 0))
    assert_equal_logits(run_protocol(runner, SEQUENCES, 4, adapters=(0, BASE, 0)), wanted)


@pytest.mark.parametrize(
    ("model_type", "router"),
    [
        ("qwen3_moe", "mlp.gate.weight"),
        ("mixtral", "mlp.gate.weight"),
        *(
            pytest.param(name, router, marks=pytest.mark.parity)
            for name, router in (
                ("gpt_oss", "mlp.router.weight"),
                ("phimoe", "mlp.router.weight"),
                ("granitemoe", "block_sparse_moe.router.weight"),
                ("deepseek_v3", "mlp.gate.weight"),
            )
        ),
    ],
)
def test_a_router(model_type: str, router: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model = tiny_checkpoint(model_type, tmp_path / "model", with_tokenizer=False)
    adapter = peft_adapter(model, tmp_path / "adapter", 1, target_modules=[], target_parameters=[router], r=3)
    wanted = [peft_logits(model, a, [s])[0] for a, s in zip((adapter, None, adapter), SEQUENCES, strict=True)]
    assert float((wanted[0] - peft_logits(model, None, SEQUENCES[:1])[0]).abs().max()) > 0.05

    def logits(group: ProcessGroup | None = None, slots: int | None = None) -> list[Tensor]:
        runner = load(model, group=group, adapters={"a": adapter}, adapter_slots=slots)
        fill_slots(runner, 1)
        return run_protocol(runner, SEQUENCES, 4, adapters=(0, BASE, 0))

    assert_equal_logits(logits(), wanted)
    assert_equal_logits(logits(slots=1), wanted)
    for of_rank in on_ranks(2, logits):
        assert_equal_logits(of_rank, wanted)
    assert_equal_logits(run_protocol(load(model, merged=adapter), SEQUENCES, 4)[::2], wanted[::2])


def test_a_shared_expert_and_its_gate(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model = tiny_checkpoint("qwen2_moe", tmp_path / "model", with_tokenizer=False)
    targets = ["gate_proj", "up_proj", "down_proj", "shared_expert_gate"]
    adapter = peft_adapter(model, tmp_path / "adapter", 1, target_modules=targets, use_dora=True)
    wanted = [peft_logits(model, a, [s])[0] for a, s in zip((adapter, None, adapter), SEQUENCES, strict=True)]
    got = run_protocol(load(model, adapters={"a": adapter}), SEQUENCES, 4, adapters=(0, BASE, 0))
    assert_equal_logits(got, wanted)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"lora_A": (16, 64), "lora_B": (192, 12)}, r"lora_A.weight has shape \[16, 64\]; \[16, 96\] is expected"),
        ({"lora_A": (2**16, 64), "lora_B": (192, 2**16)}, r"lora_A.weight has shape \[65536, 64\]; \[16, 96\] is"),
        ({"lora_A": (16, 96)}, r"tensor .*experts\.lora_B\.weight is missing beside .*lora_A"),
        ({"lora_A": (4, 4, 96), "lora_B": (64, 16)}, r"lora_A.weight has shape \[4, 4, 96\]; \[16, 96\] is expected"),
        (
            {"base_layer.base_layer.lora_A": (16, 64)},
            r"base_layer\.base_layer\.lora_A.* belongs to no layer",
        ),
        ({"lora_magnitude_vector": (64,)}, r"lora_magnitude_vector\.weight belongs to no layer that takes adapters"),
        ({"4.gate_proj.lora_A": (4, 64)}, r"experts\.4\.gate_proj\.lora_A\.weight belongs to no layer that takes"),
        (
            {"lora_A": (16, 96), "lora_B": (64, 16), "base_layer.lora_A": (16, 96), "base_layer.lora_B": (64, 16)},
            r"another name of the same parameter has tensors too",
        ),
    ],
)
def test_what_does_not_fit(tensors: dict[str, tuple[int, ...]], message: str, tmp_path: Path) -> None:
    model = tiny_checkpoint("mixtral", tmp_path / "model", with_tokenizer=False)
    made = {f"{OUTER}.{name}.weight": torch.zeros(shape) for name, shape in tensors.items()}
    with pytest.raises(StartupError, match=rf"^LoRA adapter `a`: .*{message}"):
        load(model, adapters={"a": write_adapter(tmp_path / "a", {}, tensors=made)})


def test_parameters_beside_single_matrices_are_refused(tmp_path: Path) -> None:
    model = tiny_checkpoint("mixtral", tmp_path / "model", with_tokenizer=False)
    made = {f"{OUTER}.lora_A.weight": torch.ones(16, 96), f"{OUTER}.lora_B.weight": torch.ones(64, 16)}
    adapter = write_adapter(tmp_path / "a", {"model.layers.0.block_sparse_moe.experts.2.w2": (96, 64)}, tensors=made)
    with pytest.raises(StartupError, match="beside matrices of single experts is not served"):
        load(model, adapters={"a": adapter})


@pytest.mark.parametrize("model_type", ["gpt_oss", "mixtral"])
def test_the_weights_of_experts_are_not_kept_beside_their_packed_form(model_type: str, tmp_path: Path) -> None:
    runner: Any = load(tiny_checkpoint(model_type, tmp_path / "model", with_tokenizer=False), adapter_room=1)
    products = [site.product for site in runner.adapters._sites if site.product.expert is not None]
    assert products
    for product in products:
        kept = [cell.cell_contents for cell in product.weight.__closure__ or ()]
        assert not any(isinstance(one, Plain) for one in kept)
