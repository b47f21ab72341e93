"""Vision models whose text model is quantized or adapted, against transformers and PEFT: greedy tokens in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from parity.vision_ranks import VisionRanks
from parity.vision_scene import Prompt, VisionScene, request
from safetensors.torch import load_file, save_file
from support.adapters import write_adapter
from support.drafted_shard import MOST, shard_of
from support.engine_shard import tokens_of
from support.loading import CPU, load
from support.peft_adapters import peft_adapter, peft_model
from support.quantized import gptq_tensors, rounded
from support.quantized_folder import Store, Stored, block_fp8, quantize_folder
from support.tiny_drafters import eagle3, medusa, mlp_speculator, with_mtp
from torch import Tensor

from model_server.errors import StartupError
from model_server.features.images.families import FAMILIES
from model_server.features.images.tower import load_tower
from model_server.text.tokenizer import Tokenizer

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


def quantized_scene(name: str, method: str, tmp_path: Path) -> tuple[VisionScene, dict[str, Any]]:
    """A model whose text part is quantized, with transformers' of the weights that are read from it; options for
    `load`."""
    from transformers import AutoModelForImageTextToText

    scene = VisionScene(tmp_path / "model", name)
    makers = {"gptq": gptq, "eetq": eetq, "fp8": lambda: block_fp8(16), "fp8 of 8": lambda: block_fp8(8)}
    store, config = makers[method]()
    quantized, decoded = quantize_folder(scene.folder, tmp_path, of_text(store), config)
    before = load_file(scene.folder / "model.safetensors")
    changed = {
        name for name, tensor in load_file(decoded / "model.safetensors").items() if tensor.ne(before[name]).any()
    }
    assert len(changed) >= 3 * 7 and all("language_model." in name for name in changed)
    reference: Any = AutoModelForImageTextToText
    scene.model = reference.from_pretrained(decoded, dtype=torch.float32, attn_implementation="eager").eval()
    if method == "eetq":
        return scene, {"quantize": "eetq"}
    scene.folder = quantized
    return scene, {}


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("llava", "gptq"),
        pytest.param("llava", "eetq", marks=pytest.mark.parity),
        pytest.param("qwen3_vl", "fp8", marks=pytest.mark.parity),
        pytest.param("qwen3_5", "fp8 of 8", marks=pytest.mark.parity),
        pytest.param("qwen3_5_moe", "fp8 of 8", marks=pytest.mark.parity),
        pytest.param("gemma3", "gptq", marks=pytest.mark.parity),
    ],
)
def test_a_quantized_text_model_beside_a_plain_tower(name: str, method: str, tmp_path: Path) -> None:
    scene, options = quantized_scene(name, method, tmp_path)
    prompt = scene.prompt((0, 1))
    shard = scene.shard(**options)
    new = request(shard, prompt)
    assert tokens_of(*shard.run_out(shard.prefill(0, new), 0))[new.id] == scene.generate(prompt)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "method", "num_stages"),
    [
        ("llava", "gptq", 1),
        ("llava", "eetq", 1),
        ("qwen3_vl", "fp8", 1),
        ("qwen3_vl", "fp8", 2),
        ("qwen3_5", "fp8 of 8", 1),
        ("qwen3_5_moe", "fp8 of 8", 1),
    ],
)
def test_two_ranks_of_a_quantized_text_model(
    name: str, method: str, num_stages: int, tmp_path: Path, two_ranks: VisionRanks
) -> None:
    scene, options = quantized_scene(name, method, tmp_path)
    prompts = [scene.prompt((0, 1)), scene.prompt(()), scene.prompt((1, 0))]
    assert two_ranks.said(scene, num_stages, prompts, **options) == [scene.generate(one) for one in prompts]


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


def adapted_scene(name: str, tmp_path: Path) -> tuple[VisionScene, Prompt, dict[str, Path], list[list[int]]]:
    """A model, a prompt with pictures, folders of two adapters, and what PEFT answers without one and with each."""
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
    return scene, prompt, folders, expected


@pytest.mark.parametrize("name", ["llava", pytest.param("qwen2_5_vl", marks=pytest.mark.parity)])
def test_adapters_of_the_text_model(name: str, tmp_path: Path) -> None:
    """Two adapters and none in one batch, with pictures in all."""
    scene, prompt, folders, expected = adapted_scene(name, tmp_path)
    shard = scene.shard(adapters=folders)
    requests = [request(shard, prompt, adapter_id=one) for one in (None, *folders)]
    found = tokens_of(*shard.run_out(shard.prefill(0, *requests), 0))
    assert [found[one.id] for one in requests] == expected


@pytest.mark.long
@pytest.mark.parametrize(("name", "num_stages"), [("llava", 1), ("qwen2_5_vl", 1), ("llava", 2)])
def test_two_ranks_of_an_adapted_text_model(name: str, num_stages: int, tmp_path: Path, two_ranks: VisionRanks) -> None:
    scene, prompt, folders, expected = adapted_scene(name, tmp_path)
    found = two_ranks.said(scene, num_stages, [prompt] * 3, [None, *folders], adapters=folders)
    assert found == expected


def test_an_adapter_that_changes_the_tower_is_refused(tmp_path: Path) -> None:
    folder = VisionScene(tmp_path / "model", "llava").folder
    tower = "model.vision_tower.vision_model.encoder.layers.0.self_attn.q_proj"
    adapter = write_adapter(tmp_path / "adapter", {tower: (32, 32)})
    with pytest.raises(StartupError, match=f"LoRA adapter `seen`: tensor .*{tower}.* belongs to no layer"):
        load(folder, adapters={"seen": adapter})


def written_drafter(kind: str, model: Path, folder: Path) -> Path | str:
    """What `--speculator` names; of "mtp" the last layer of the text model itself."""
    if kind == "mtp":
        with_mtp(model)
        return "mtp"
    if kind == "eagle3":
        return eagle3(folder, hidden=64, vocab=512, draft_vocab=None)
    return {"medusa": medusa, "mlp_speculator": mlp_speculator}[kind](folder, number=MOST, hidden=64, vocab=512)


@pytest.mark.parametrize("kind", ["medusa", "mlp_speculator", "eagle3", "mtp"])
@pytest.mark.parametrize(
    "name", ["llava", *(pytest.param(n, marks=pytest.mark.parity) for n in ("qwen2_vl", "gemma3"))]
)
def test_drafts_from_the_models_states(kind: str, name: str, tmp_path: Path) -> None:
    """Of rows behind images, which the layers that keep keys (EAGLE-3, MTP) read as the ids of their tokens."""
    from transformers import AutoModelForImageTextToText

    scene = VisionScene(tmp_path / "model", name)
    speculator = written_drafter(kind, scene.folder, tmp_path / "drafter")
    if kind == "mtp":
        reference: Any = AutoModelForImageTextToText
        scene.model = reference.from_pretrained(scene.folder, dtype=torch.float32, attn_implementation="eager").eval()
    prompts = [scene.prompt((1, 0)), scene.prompt(()), scene.prompt((2,))]
    shard, asked = shard_of(
        Tokenizer.load(scene.folder), scene.folder, speculator, encoder=scene.encoder(), num_blocks=256
    )
    requests = [request(shard, one) for one in prompts]
    results = [shard.prefill(0, *requests[:2]), shard.prefill(1, requests[2], cached=0)]
    results += shard.run_out(results.pop(), 0)
    found = tokens_of(*results)
    assert [found[one.id] for one in requests] == [scene.generate(one) for one in prompts]
    assert all(any(one.ids[: len(prompt.ids)] == prompt.ids for one in asked) for prompt in prompts)
