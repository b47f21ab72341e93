"""Models of quantized weights compute what plain models of the decoded weights do, on one rank and on several."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from parity.disguises import disguise
from parity.protocol import prompts, run_protocol
from support.gguf_files import write_gguf
from support.loading import CPU, FixedAttention, load
from support.marlin_and_exl2 import store_as
from support.mxfp4 import mxfp4_checkpoint
from support.quantized_folder import quantize_folder, row_fp8
from support.quantized_ways import WAYS
from support.tiny_models import VOCAB_SIZE, tiny_checkpoint

from model_server.attention.reference import ReferenceBackend
from model_server.distributed.group import ProcessGroup
from model_server.distributed.layout import Ranks
from model_server.distributed.placement import Placement
from model_server.models.load import load_runner
from model_server.models.model import describe
from model_server.weights.checkpoint import examine
from model_server.weights.gguf.prepare import prepare

# Every way with a llama; every family with one way of each form.
CASES: list[Any] = [("llama", "biases_tied", way) for way in WAYS] + [
    (model_type, "plain", way)
    for model_type in ("mixtral", "deepseek_v3", "deepseek_v32")
    for way in ("fp8 blocks", "int4")
]
CASES += [
    ("minimax_m2", "plain", "fp8 blocks"),
    ("qwen3_moe", "plain", "nvfp4"),
    ("phi3", "plain", "nf4"),
    ("mixtral", "plain", "nf4"),
]
CASES += [
    pytest.param(model_type, "plain", way, marks=pytest.mark.parity)
    for model_type in (
        "qwen2",
        "gpt_neox",
        "phi3",
        "qwen3_moe",
        "bamba",
        "falcon_h1",
        "granitemoehybrid",
        "lfm2",
        "lfm2_moe",
        "qwen3_next",
        "qwen3_5_moe_text",
        "nemotron_h",
        "kimi_linear",
        "olmo_hybrid",
        "minimax",
        "jamba",
        "mamba",
    )
    for way in ("fp8 blocks", "int4")
]
# Strengths and decays of delta nets are plain beside quantized queries, keys and values.
CASES += [
    ("qwen3_5_text", "plain", "int4"),
    pytest.param("qwen3_next", "plain", "nvfp4", marks=pytest.mark.parity),
]
SEQUENCES = prompts(VOCAB_SIZE)


@pytest.mark.parametrize(("model_type", "variant", "way"), CASES)
def test_logits_equal_those_of_the_decoded_weights(model_type: str, variant: str, way: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    if model_type.startswith("deepseek"):
        sizes |= {"kv_lora_rank": 32, "q_lora_rank": 32, "v_head_dim": 16}
    if model_type == "deepseek_v32":
        sizes |= {"index_n_heads": 16}  # compressed-tensors does not read back a single word of zero points
    if model_type.startswith(("qwen3_next", "qwen3_5")):
        sizes |= {"shared_expert_intermediate_size": 64}
    if model_type == "kimi_linear":
        sizes |= {"kv_lora_rank": 32, "v_head_dim": 16, "linear_head_dim": 32}
    if model_type == "mamba":
        sizes |= {"time_step_rank": 32, "state_size": 16}
    if model_type == "jamba":
        sizes |= {"mamba_dt_rank": 32, "mamba_d_state": 16}
    if model_type == "nemotron_h":
        sizes |= {"moe_shared_expert_intermediate_size": 64}
    plain = tiny_checkpoint(model_type, tmp_path / "plain", variant=variant, with_tokenizer=False, **sizes)
    quantized, decoded = quantize_folder(plain, tmp_path, *WAYS[way]())
    computed, wanted = (run_protocol(load(path), SEQUENCES, 4) for path in (quantized, decoded))
    for one, other in zip(computed, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))
        assert torch.equal(one.argmax(-1), other.argmax(-1))
    unquantized = run_protocol(load(plain), SEQUENCES, 4)
    assert float((unquantized[0] - wanted[0]).abs().max()) > 1e-3, "nothing was quantized"


@pytest.mark.parametrize(
    ("way", "ignored"), [("fp8 blocks", "lm_head"), ("int4", "lm_head"), ("int4", "language_model.lm_head")]
)
def test_text_model_of_a_vision_model(way: str, ignored: str, tmp_path: Path) -> None:
    """Files name what is not quantized by the names of tensors, or by the names that modules have had since."""
    plain = tiny_checkpoint("llama", tmp_path / "plain", with_tokenizer=False, hidden_size=64, intermediate_size=96)
    quantized, _ = quantize_folder(plain, tmp_path, *WAYS[way]())
    wanted = run_protocol(load(quantized), SEQUENCES, 4)
    disguise(quantized, lambda config, tensors: _as_llava(config, tensors, ignored))
    for one, other in zip(run_protocol(load(quantized), SEQUENCES, 4), wanted, strict=True):
        assert torch.equal(one, other)


def _as_llava(config: dict[str, Any], tensors: dict[str, torch.Tensor], ignored: str) -> None:
    quantization = config.pop("quantization_config")
    if "ignore" in quantization:
        quantization["ignore"] = [ignored]
    text = dict(config)
    config.clear()
    config |= {"model_type": "llava", "text_config": text, "quantization_config": quantization}
    for name in list(tensors):
        tensors["language_model." + name] = tensors.pop(name)
    tensors["vision_tower.layers.0.weight"] = torch.ones(4, 4)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mixtral"])
def test_plain_weights_quantized_on_load(model_type: str, tmp_path: Path) -> None:
    plain = tiny_checkpoint(model_type, tmp_path / "plain", with_tokenizer=False)
    sent = loaded(plain, quantize="fp8")
    assert sent.traits.weight_bytes < 0.7 * load(plain).traits.weight_bytes
    computed = run_protocol(sent, SEQUENCES, 4)
    if model_type != "gpt2":  # which stores its matrices the other way round
        _, decoded = quantize_folder(plain, tmp_path, *row_fp8())
        for one, other in zip(computed, run_protocol(load(decoded), SEQUENCES, 4), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


def loaded(path: Path, *, quantize: str) -> Any:
    return load_runner(
        describe(examine(path), quantize=quantize),
        Placement(CPU, torch.float32, Ranks.of(ProcessGroup())),
        FixedAttention(ReferenceBackend()),
    )


# Blocks and groups of 32 are cut: rows of 16 for a head, columns of 48 or 96 of the MLP.
SHARDED = (
    "fp8 blocks",
    "modelopt",
    "int4",
    "mixed",
    "nvfp4",
    "mxfp4",
    "mxfp8",
    "nf4",
    "bitsandbytes int8",
    "torchao int4",
)
LARGE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "head_dim": 64}
TESTS = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "world_size", [pytest.param(2, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.parity)]
)
def test_several_ranks_compute_what_one_does(world_size: int, tmp_path: Path) -> None:
    plain = tiny_checkpoint("llama", tmp_path / "plain", with_tokenizer=False, intermediate_size=192)
    folders = {way: quantize_folder(plain, tmp_path / way, *WAYS[way]())[0] for way in SHARDED}
    folders["gpt_oss mxfp4"] = mxfp4_checkpoint(tmp_path / "gpt_oss", intermediate_size=64)[0]
    # As GGUF and marlin have it: rows of 256, and of 64.
    large = tiny_checkpoint("llama", tmp_path / "large", **LARGE)
    of_marlin = {"quant_method": "marlin", "bits": 4, "group_size": -1}
    folders["marlin"] = quantize_folder(large, tmp_path / "marlin", store_as("marlin"), of_marlin)[0]
    file = write_gguf(large, tmp_path / "model.gguf", "Q4_K_M")
    folders["gguf Q4_K_M"] = prepare(file, tmp_path / "cache")
    jobs_file = tmp_path / "jobs.pt"
    torch.save({way: (str(folder), SEQUENCES) for way, folder in folders.items()}, jobs_file)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "parity.tp_worker"]
    processes = [
        subprocess.Popen([*command, str(rank), str(world_size), port, str(jobs_file)], cwd=TESTS)
        for rank in range(world_size)
    ]
    assert [process.wait(280) for process in processes] == [0] * world_size
    for rank in range(world_size):
        results = torch.load(tmp_path / f"rank{rank}of{world_size}.pt")["jobs"]
        for way, folder in folders.items():
            for one, other in zip(results[way]["logits"], run_protocol(load(folder), SEQUENCES, 4), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))
                assert torch.equal(one.argmax(-1), other.argmax(-1))
