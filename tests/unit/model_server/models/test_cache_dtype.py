"""Which type the KV cache of a model gets, and models whose cache has no other than their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import tiny_checkpoint

from model_server.attention.choice import AttentionChoice
from model_server.distributed.placement import Placement
from model_server.errors import StartupError
from model_server.models.load import load_runner
from model_server.models.model import Model, cache_dtype, describe
from model_server.weights.checkpoint import examine

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def model(folder: Path, model_type: str = "llama", *, scheme: bool = False) -> Model:
    """scheme: as one that was made for a cache in float8."""
    path = tiny_checkpoint(model_type, folder, with_tokenizer=False)
    found = describe(examine(path))
    if scheme:
        (path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"kv_cache_quant_algo": "FP8"}}))
    return found


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, int]]:
    state = {"of": (9, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: state["of"])
    return state


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
@pytest.mark.parametrize("scheme", [False, True])
def test_what_the_user_asks_for(device: torch.device, scheme: bool, tmp_path: Path, capability: dict[str, Any]) -> None:
    found = model(tmp_path, scheme=scheme)
    assert cache_dtype(found, "fp8_e4m3fn", device) is E4M3
    assert cache_dtype(found, "fp8_e5m2", device) is E5M2


def test_what_the_checkpoint_asks_for(tmp_path: Path, capability: dict[str, Any]) -> None:
    """On a GPU that computes with it, and with backends that read it."""
    plain, made_for_it = model(tmp_path / "a"), model(tmp_path / "b", scheme=True)
    assert cache_dtype(plain, None, CUDA) is None
    assert cache_dtype(made_for_it, None, CUDA) is E4M3
    assert cache_dtype(made_for_it, None, CUDA, "triton") is E4M3
    assert cache_dtype(made_for_it, None, CUDA, "flash_attn") is None
    assert cache_dtype(made_for_it, None, CPU) is None
    capability["of"] = (8, 6)
    assert cache_dtype(made_for_it, None, CUDA) is None


def test_latent_attention_keeps_the_models_type(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert cache_dtype(model(tmp_path, "deepseek_v3"), "fp8_e4m3fn", CPU) is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith("The KV cache keeps the model's type: deepseek_v3 has latent attention")


def test_a_model_that_keeps_states_is_refused(tmp_path: Path) -> None:
    found = model(tmp_path, "rwkv")
    placement = Placement(CPU, torch.float32, cache_dtype=cache_dtype(found, "fp8_e5m2", CPU))
    with pytest.raises(StartupError, match=r"--kv-cache-dtype: rwkv keeps a state .* leave it out"):
        load_runner(found, placement, AttentionChoice(None, CPU))
