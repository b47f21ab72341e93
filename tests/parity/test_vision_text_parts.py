"""Vision models whose text model is quantized or adapted, against transformers and PEFT: greedy tokens in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from parity.vision_scene import VisionScene, request
from safetensors.torch import load_file, save_file
from support.adapters import write_adapter
from support.drafted_shard import shard_of
from support.engine_shard import tokens_of
from support.loading import CPU, load
from support.peft_adapters import peft_adapter, peft_model
from support.quantized import gptq_tensors, rounded
from support.quantized_folder import Store, Stored, block_fp8, quantize_folder
from support.tiny_drafters import eagle3
from torch import Tensor

from model_server.errors import StartupError
from model_server.text.tokenizer import Tokenizer
from model_server.vision.families import FAMILIES
from model_server.vision.tower import load_tower

TEXT_ONLY = r".*(language_model|text_model)\.layers.*\.(q_proj|v_proj|o_proj|down_proj)"


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def gptq() -> tuple[Store, dict[str, Any]]:
    def store(module: str, weight: Tensor) -> tuple[Stored, Tensor]:
        numbers = rounded(weight, 4, 32, symmetric=True)
        return gptq_tensors(numbers), numbers.exact()

    return store, {"quant_method": "gptq", "bits": 4, "group_size": 32, "modules_to_not_convert": ["visual"]}


def eetq() -> tuple[Store, dict[str, Any]]:
    """What the flag makes of plain weights."""

    def store(module: str, weight: Tensor) -> tuple[Stored, Tensor]:
        scale = (weight.abs().amax(1, keepdim=True) / 128).half().float()
        return {"weight": weight}, (weight / scale).round().clamp(-128, 127) * scale

    return store, {}


def of_text(store: Store) -> Store:
    return lambda module, weight: store(module, weight) if "language_model." in module else None


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("llava", "gptq"),
        pytest.param("llava", "eetq", marks=pytest.mark.parity),
        pytest.param("qwen3_vl", "fp8", marks=pytest.mark.parity),
        pytest.param("gemma3", "gptq", marks=pytest.mark.parity),
    ],
)
def test_a_quantized_text_model_beside_a_plain_tower(name: str, method: str, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    scene = VisionScene(tmp_path / "model", name)
    store, config = {"gptq": gptq, "eetq": eetq, "fp8": lambda: block_fp8(16)}[method]()
    quantized, decoded = quantize_folder(scene.folder, tmp_path, of_text(store), config)
    if method == "eetq":
        shard = scene.shard(quantize="eetq")
    else:
        shard = scene.shard(folder=quantized)
        scene.folder = quantized  # from which the tower is read
    reference: Any = AutoModelForImageTextToText
    prompt = scene.prompt((0, 1))
    before = load_file(tmp_path / "model" / "model.safetensors")
    changed = {
        name for name, tensor in load_file(decoded / "model.safetensors").items() if tensor.ne(before[name]).any()
    }
    assert len(changed) >= 3 * 7 and all("language_model." in name for name in changed)
    scene.model = reference.from_pretrained(decoded, dtype=torch.float32, attn_implementation="eager").eval()
    expected = scene.generate(prompt)
    new = request(shard, prompt)
    assert tokens_of(*shard.run_out(shard.prefill(0, new), 0))[new.id] == expected


@pytest.mark.parametrize("end", ["weight_scale_inv", "qweight"])
def test_a_quantized_tower_is_refused(end: str, tmp_path: Path) -> None:
    """Its codes would be read as numbers."""
    folder = VisionScene(tmp_path, "llava").folder
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if "vision" in name and name.endswith("q_proj.weight"))
    tensors[name.replace("weight", end)] = torch.ones(1, 1)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(StartupError, match=f"the vision tower of llava is quantized .*q_proj.{end}"):
        load_tower(folder, "llava", FAMILIES["llava"], CPU, torch.float32)


@pytest.mark.parametrize("name", ["llava", pytest.param("qwen2_5_vl", marks=pytest.mark.parity)])
def test_adapters_of_the_text_model(name: str, tmp_path: Path) -> None:
    """Two adapters and none in one batch, with pictures in all."""
    pytest.importorskip("peft")
    scene = VisionScene(tmp_path / "model", name)
    prompt = scene.prompt((0, 1))
    expected = [scene.generate(prompt)]
    folders = {}
    with torch.inference_mode(False):
        for seed, adapter in enumerate(("first", "second"), 1):
            folders[adapter] = peft_adapter(scene.folder, tmp_path / adapter, seed, target_modules=TEXT_ONLY)
    for folder in folders.values():
        scene.model = peft_model(scene.folder, folder)
        expected.append(scene.generate(prompt))
    assert len({tuple(tokens) for tokens in expected}) == 3
    shard = scene.shard(adapters=folders)
    requests = [request(shard, prompt, adapter_id=one) for one in (None, "first", "second")]
    found = tokens_of(*shard.run_out(shard.prefill(0, *requests), 0))
    assert [found[one.id] for one in requests] == expected


def test_an_adapter_that_changes_the_tower_is_refused(tmp_path: Path) -> None:
    folder = VisionScene(tmp_path / "model", "llava").folder
    tower = "model.vision_tower.vision_model.encoder.layers.0.self_attn.q_proj"
    adapter = write_adapter(tmp_path / "adapter", {tower: (32, 32)})
    with pytest.raises(StartupError, match=f"LoRA adapter `seen`: tensor .*{tower}.* belongs to no layer"):
        load(folder, adapters={"seen": adapter})


@pytest.mark.parity
@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "gemma3"])
def test_a_layer_that_drafts_from_the_models_states(name: str, tmp_path: Path) -> None:
    """EAGLE-3: it reads what the model makes of images, and the ids of their tokens."""
    scene = VisionScene(tmp_path / "model", name)
    tokenizer = Tokenizer.load(scene.folder)
    prompt = scene.prompt((1, 0))
    speculator = eagle3(tmp_path / "eagle", hidden=64, vocab=512, draft_vocab=None)
    shard, asked = shard_of(tokenizer, scene.folder, speculator, encoder=scene.encoder(), num_blocks=256)
    new = request(shard, prompt)
    assert tokens_of(*shard.run_out(shard.prefill(0, new), 0))[new.id] == scene.generate(prompt)
    assert len(asked) >= 4
