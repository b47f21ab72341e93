"""LoRA adapters over every kind of quantized base model, with PEFT over the decoded weights as the reference."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from parity.protocol import assert_equal_logits, prompts, run_protocol
from safetensors.torch import load_file, save_file
from support.gguf_files import write_gguf
from support.loading import load
from support.marlin_and_exl2 import store_as
from support.mxfp4 import mxfp4_checkpoint
from support.peft_adapters import fill_slots, peft_adapter, peft_logits
from support.quantized import quantize_folder as quantize_words
from support.quantized_folder import Stored, quantize_folder
from support.quantized_ways import WAYS
from support.thread_ranks import on_ranks
from support.tiny_models import tiny_checkpoint
from torch import Tensor

from model_server.adapters.rows import BASE
from model_server.attention.cpp import CppBackend
from model_server.cpp import library as cpp
from model_server.distributed.group import ProcessGroup
from model_server.errors import StartupError
from model_server.quantization.onload import QUANTIZERS
from model_server.weights.gguf.prepare import prepare

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
SIZES = {"num_hidden_layers": 2, "intermediate_size": 128}
ALWAYS = ("awq", "fp8 blocks", "gguf Q4_K_M", "gpt_oss mxfp4", "eetq on load")
CASES = [
    "gptq", "awq", *WAYS, "marlin", "exl2", "gguf Q8_0", "gguf Q4_K_M", "gpt_oss mxfp4",
    *(f"{way} on load" for way in QUANTIZERS),
]  # fmt: skip

UP, DOWN = "experts.gate_up_proj", "experts.down_proj"
PARITY = ("awq", "fp8 blocks", "int8", "torchao fp8", "eetq on load")
OF_EXPERTS = ["gpt_oss mxfp4", "nf4", "torchao int4", *(pytest.param(way, marks=pytest.mark.parity) for way in PARITY)]


def checkpoints(way: str, folder: Path, model_type: str = "llama") -> tuple[Path, Path, str | None]:
    """(what is served, the decoded weights as a plain checkpoint, `--quantize`)."""
    if way == "gpt_oss mxfp4":
        return *mxfp4_checkpoint(folder), None
    if way.startswith("gguf"):
        wide = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "head_dim": 64}
        source = tiny_checkpoint("llama", folder / "source", **wide)
        file = write_gguf(source, folder / "model.gguf", way.removeprefix("gguf "), folder / "decoded")
        return prepare(file, folder / "cache"), folder / "decoded", None
    source = tiny_checkpoint(model_type, folder / "source", with_tokenizer=False, **SIZES)
    if way in ("gptq", "awq"):
        return quantize_words(source, folder, way), folder / "plain", None
    if way.endswith(" on load"):
        flag = way.removesuffix(" on load")
        return source, quantize_folder(source, folder, _on_load(flag), {})[1], flag
    made = (store_as(way), {"quant_method": way}) if way in ("marlin", "exl2") else WAYS[way]()
    return *quantize_folder(source, folder, *made), None


def _on_load(flag: str) -> Any:
    def store(module: str, weight: Tensor) -> tuple[Stored, Tensor]:
        form = QUANTIZERS[flag](weight.float(), (0, weight.shape[1]), module)
        return {"weight": weight}, form.dequantize(torch.float32)

    return store


@pytest.mark.parametrize("way", [pytest.param(way, marks=() if way in ALWAYS else pytest.mark.parity) for way in CASES])
def test_lora_and_dora_over_quantized_weights(way: str, tmp_path: Path) -> None:
    """One adapter adds to the products, the other one's lengths (DoRA) are those of the decoded weights; and no
    adapter. On one rank and on two, where adapters were loaded and in slots, and in the operator of all layers."""
    pytest.importorskip("peft")
    served, decoded, flag = checkpoints(way, tmp_path)
    target = {"target_modules": ATTENTION} if way == "gpt_oss mxfp4" else {}
    first = peft_adapter(decoded, tmp_path / "first", 1, **target)
    second = peft_adapter(decoded, tmp_path / "second", 2, use_dora=True, **target)
    sequences = prompts(512 if way != "gpt_oss mxfp4" and not way.startswith("gguf") else 300)
    logits = cache(lambda adapter, i: peft_logits(decoded, adapter, [sequences[i]])[0])
    wanted = [logits(adapter, i) for i, adapter in enumerate((first, second, None))]
    adapters = {"a": first, "b": second}

    def run(**options: Any) -> list[Tensor]:
        runner = load(served, quantize=flag, adapters=adapters, **options)
        fill_slots(runner, len(adapters))
        return run_protocol(runner, sequences, 4, adapters=(0, 1, BASE))

    for slots in (None, 2):
        assert_equal_logits(run(adapter_slots=slots), wanted)
        for of_rank in on_ranks(2, lambda group, slots=slots: run(group=group, adapter_slots=slots)):
            assert_equal_logits(of_rank, wanted)
    if cpp.usable(torch.device("cpu"), torch.float32):
        assert_equal_logits(run(backend=CppBackend()), wanted)
    if flag is None:
        with pytest.raises(StartupError, match="into which no adapter can be merged: give the base model as --model-"):
            load(served, merged=first)
    assert float((wanted[0] - logits(None, 0)).abs().max()) > 0.1
    assert float((wanted[1] - logits(None, 1)).abs().max()) > 0.1


def test_copies_of_tables_that_a_file_has_quantized(tmp_path: Path) -> None:
    """PEFT saves embedding and head beside their matrices, as they were when the adapter was trained."""
    pytest.importorskip("peft")
    served, decoded, _ = checkpoints("gguf Q4_K_M", tmp_path)
    folder = peft_adapter(decoded, tmp_path / "tables", 1, target_modules=["embed_tokens", "lm_head"])
    sequences = prompts(300)
    wanted = peft_logits(decoded, folder, sequences)
    file = folder / "adapter_model.safetensors"
    tensors, original = load_file(file), load_file(tmp_path / "source" / "model.safetensors")
    copies = {name: name[len("base_model.model.") :].replace(".base_layer", "") for name in tensors if "base_l" in name}
    assert len(copies) == 2
    for factor, is_served in ((1.0, True), (1.3, False)):
        save_file({**tensors, **{name: factor * original[own] for name, own in copies.items()}}, file)
        if is_served:
            runner = load(served, adapters={"a": folder})
            assert_equal_logits(run_protocol(runner, sequences, 4, adapters=(0, 0, 0)), wanted)
        else:
            with pytest.raises(StartupError, match="replaces the base model's; only a copy of it is served"):
                load(served, adapters={"a": folder})


@pytest.mark.parametrize("way", OF_EXPERTS)
def test_adapters_of_experts_over_quantized_experts(way: str, tmp_path: Path) -> None:
    """Both parameters of all experts, one of them, and no adapter; where they were loaded and in slots, on one rank and
    on two."""
    pytest.importorskip("peft")
    served, decoded, flag = checkpoints(way, tmp_path, "mixtral")
    first = peft_adapter(decoded, tmp_path / "a", 1, target_modules=["q_proj"], target_parameters=[UP, DOWN])
    second = peft_adapter(decoded, tmp_path / "b", 2, target_modules=[], target_parameters=[DOWN], r=3)
    sequences = prompts(300)
    folders = (first, None, second)
    wanted = [peft_logits(decoded, folder, [s])[0] for folder, s in zip(folders, sequences, strict=True)]
    base = peft_logits(decoded, None, sequences)
    assert all(float((wanted[i] - base[i]).abs().max()) > 0.05 for i in (0, 2))
    plain = run_protocol(load(served, quantize=flag), sequences, 4)

    def run(group: ProcessGroup | None = None, slots: int | None = None) -> list[Tensor]:
        adapters = {"a": first, "b": second}
        runner = load(served, quantize=flag, group=group, adapters=adapters, adapter_slots=slots)
        fill_slots(runner, 2)
        return run_protocol(runner, sequences, 4, adapters=(0, BASE, 1))

    for slots in (None, 2):
        got = run(slots=slots)
        assert_equal_logits(got, wanted)
        assert torch.equal(got[1], plain[1]), "rows of the base model keep their bits"
        for of_rank in on_ranks(2, lambda group, slots=slots: run(group, slots)):
            assert_equal_logits(of_rank, wanted)
