"""Adapters that are copied into slots of a device give what they give where they were loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parity.protocol import assert_equal_logits, prompts, run_protocol
from support.adapters import write_adapter
from support.loading import load
from support.peft_adapters import peft_adapter
from support.thread_ranks import on_ranks
from support.tiny_models import tiny_checkpoint
from torch import Tensor

from model_server.adapters.rows import BASE
from model_server.distributed.group import ProcessGroup
from model_server.errors import StartupError
from model_server.features.adapters.load import in_slots, with_adapters
from model_server.models.model import describe
from model_server.weights.checkpoint import examine
from model_server.weights.reader import SafetensorsReader

SEQUENCES = prompts(512)
LAST = ["q_proj", "k_proj", "v_proj", "o_proj"]


def unused() -> tuple[int, ...]:
    return ()


MODELS: list[Any] = [
    ("llama", "plain", {}, {"r": 6, "use_rslora": True, "target_modules": ["v_proj", "down_proj"]}),
    (
        "llama",
        "biases_tied",
        {"use_dora": True, "target_modules": ["embed_tokens", "k_proj", "down_proj", "lm_head"]},
        {"lora_bias": True, "target_modules": ["q_proj", "o_proj"], "trainable_token_indices": [44, 9, 130]},
    ),
    ("phi3", "plain", {}, {"target_modules": ["qkv_proj"], "use_dora": True}),
    pytest.param(
        "llama",
        "plain",
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
        {"target_modules": ["gate_proj", "lm_head"]},
        marks=pytest.mark.parity,
    ),
    pytest.param("gpt_neox", "plain", {"use_dora": True}, {}, marks=pytest.mark.parity),
    pytest.param("mixtral", "plain", {"target_modules": LAST}, {"target_modules": LAST[:2]}, marks=pytest.mark.parity),
]


@pytest.mark.parametrize(("model_type", "variant", "first", "second"), MODELS)
def test_three_adapters_in_two_slots(
    model_type: str, variant: str, first: dict[str, Any], second: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    model = tiny_checkpoint(model_type, tmp_path / "model", variant=variant, with_tokenizer=False)
    adapters = {
        name: peft_adapter(model, tmp_path / name, seed, **config)
        for name, seed, config in (("a", 1, first), ("b", 2, second), ("c", 3, first))
    }
    loaded: Any = load(model, adapters=adapters)
    slotted: Any = load(model, adapters=adapters, adapter_slots=2)
    slots = slotted.adapters.slots
    for numbers in ((0, BASE, 1), (2, BASE, 0), (1, 1, 0), (BASE, 2, BASE)):
        taken: set[int] = set()
        places = []
        for number in numbers:
            if number != BASE:
                taken.add(slots.acquire(number, taken.copy))
            places.append(BASE if number == BASE else slots.acquire(number, unused))
        wanted = run_protocol(loaded, SEQUENCES, 4, adapters=numbers)
        assert_equal_logits(run_protocol(slotted, SEQUENCES, 4, adapters=places), wanted)
    assert slots.num_loads == 6 and slots.num_held == 2
    if model_type == "mixtral":
        return  # a product of an expert depends on how many rows it has
    plain = run_protocol(load(model), SEQUENCES, 4)
    base = run_protocol(slotted, SEQUENCES, 4, adapters=(0, BASE, BASE))
    assert torch.equal(base[1], plain[1]) and torch.equal(base[2], plain[2])


def test_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model = tiny_checkpoint("llama", tmp_path / "model", variant="biases_tied", with_tokenizer=False)
    adapter = peft_adapter(
        model, tmp_path / "adapter", 1, use_dora=True, target_modules=["embed_tokens", "q_proj", "o_proj", "lm_head"]
    )

    def logits(group: ProcessGroup | None, number: int | None = None) -> list[Tensor]:
        runner: Any = load(model, group=group, adapters={"a": adapter}, adapter_slots=number)
        if number is not None:
            assert runner.adapters.slots.acquire(0, unused) is not None
        return run_protocol(runner, SEQUENCES, 4, adapters=(0, BASE, 0))

    wanted = logits(None)
    for of_rank in on_ranks(2, lambda group: logits(group, 1)):
        assert_equal_logits(of_rank, wanted)


def test_ranks_agree_whether_a_step_needs_the_host(tmp_path: Path) -> None:
    """Also where only one of them has the new rows of a head: else one would replay a graph, whose sums over the ranks
    have padding, and the other not."""
    model = tiny_checkpoint("llama", tmp_path / "model", with_tokenizer=False)
    rows = {"base_model.model.lm_head.token_adapter.trainable_tokens_delta": torch.randn(1, 64)}
    indices = {"lm_head": [5]}
    folder = write_adapter(tmp_path / "adapter", {}, tensors=rows, trainable_token_indices=indices)

    def found(group: ProcessGroup | None) -> tuple[bool, list[Tensor]]:
        runner: Any = load(model, group=group, adapters={"a": folder}, adapter_slots=1)
        assert runner.adapters.slots.acquire(0, unused) == 0
        logits = run_protocol(runner, SEQUENCES, 4, adapters=(0, BASE, 0))
        return runner.adapters.slots.is_capturable(torch.tensor([0])), logits

    _, wanted = found(None)
    for needs_no_host, logits in on_ranks(2, found):
        assert not needs_no_host
        assert_equal_logits(logits, wanted)


def test_an_adapter_that_leaves_and_another_of_its_number(tmp_path: Path) -> None:
    """A slot never has what an adapter before had, whatever the two change."""
    model = tiny_checkpoint("llama", tmp_path / "model", with_tokenizer=False)
    folders = {
        "a": write_adapter(tmp_path / "a", {"lm_head": (64, 512), "model.layers.0.mlp.up_proj": (64, 96)}, seed=1),
        "b": write_adapter(tmp_path / "b", {"model.layers.1.mlp.down_proj": (96, 64)}, seed=2, rank=8),
    }
    runner: Any = load(model, adapter_room=2, adapter_slots=1)
    wanted = run_protocol(load(model, adapters=folders), SEQUENCES, 4, adapters=(1, 1, BASE))
    described = with_adapters(describe(examine(model)), folders)
    sites = runner.adapters
    for adapter in described.adapters:
        loaded = sites.read(adapter)
        assert loaded.nbytes > 0
        sites.put(0, loaded)
        assert sites.slots.acquire(0, unused) == 0
        got = run_protocol(runner, SEQUENCES, 4, adapters=(0, 0, BASE))
        if adapter.name == "a":
            sites.remove(0)
            assert sites.slots.num_held == 0
    assert_equal_logits(got, wanted)


def test_adapters_that_come_later_read_the_weights_to_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lengths of DoRA need whole matrices in float32, beside a KV cache that fills the device."""
    model = tiny_checkpoint("llama", tmp_path / "model", with_tokenizer=False)
    readers: list[SafetensorsReader] = []
    monkeypatch.setattr(SafetensorsReader, "read_to_host", lambda reader: readers.append(reader))
    load(model, adapter_room=1)
    assert not readers
    load(model, adapter_room=1, adapter_slots=1)
    assert len(readers) == 1


def test_slots_that_do_not_fit_the_device_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_checkpoint("llama", tmp_path / "model", with_tokenizer=False)

    def short(*sizes: Any, **options: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr("model_server.adapters.product_slots.torch.zeros", short)
    said = (
        r"^\S+ does not fit the memory of cpu: lower `--lora-slots` \(there are 3 slots for adapters\) or "
        r"`--lora-max-rank` \(64\), or use more devices \(`--num-shard`\) or `--quantize`$"
    )
    with pytest.raises(StartupError, match=said):
        load(model, adapter_room=1, adapter_slots=3)


def test_how_many_slots_of_which_rank(tmp_path: Path) -> None:
    model = tiny_checkpoint("llama", tmp_path / "model", with_tokenizer=False)
    folder = write_adapter(tmp_path / "a", {"lm_head": (64, 512)}, rank=12)
    described = describe(examine(model))

    def sizes(number: int | None, **options: Any) -> tuple[int, int]:
        slots = in_slots(with_adapters(described, {"a": folder, "b": folder}, **options), number).slots
        assert slots is not None
        return slots.number, slots.rank

    assert sizes(None) == (2, 16)
    assert sizes(1, max_rank=32) == (1, 32)
    assert sizes(None, room=100) == (8, 64)
    assert sizes(64) == (2, 16), "no more than there can be adapters"
    assert sizes(64, room=1) == (64, 64)
    with pytest.raises(StartupError, match="LoRA adapter `a`: rank 12 is above --lora-max-rank 8"):
        with_adapters(described, {"a": folder}, max_rank=8)
