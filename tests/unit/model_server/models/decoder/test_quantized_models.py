"""Whole models of quantized matrices compute what plain models of the same numbers compute."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from parity.protocol import assert_equal_logits, prompts, run_protocol
from support.loading import load
from support.quantized import quantize_folder
from support.quantized_folder import block_fp8
from support.quantized_folder import quantize_folder as store_folder
from support.tiny_models import tiny_checkpoint

SEQUENCES = prompts(512)
TESTS = Path(__file__).parents[4]


@pytest.mark.parametrize(
    ("model_type", "method", "act_order"),
    [
        ("llama", "gptq", True),
        ("qwen2", "awq", False),
        ("mixtral", "gptq", False),
        ("qwen3_moe", "awq", False),
        ("deepseek_v3", "gptq", False),
    ],
)
def test_logits_of_dequantized_weights(model_type: str, method: str, act_order: bool, tmp_path: Path) -> None:
    wider = {"kv_lora_rank": 32} if model_type == "deepseek_v3" else {}  # whole words
    source = tiny_checkpoint(model_type, tmp_path / "source", with_tokenizer=False, **wider)
    made = quantize_folder(source, tmp_path, method, act_order=act_order, also=("lm_head",))
    quantized, plain = load(made), load(tmp_path / "plain")
    assert (quantized.traits.weight_bytes or 0) < 0.5 * (plain.traits.weight_bytes or 0)
    assert_equal_logits(run_protocol(quantized, SEQUENCES, 4), run_protocol(plain, SEQUENCES, 4))


def test_matrices_that_are_stored_as_inputs_by_outputs(tmp_path: Path) -> None:
    """gpt2's, of which gptq's writers store the transpose, as of all others."""
    source = tiny_checkpoint("gpt2", tmp_path / "source", with_tokenizer=False)
    made = quantize_folder(source, tmp_path, "gptq", act_order=True, transposed=True)
    quantized, plain = load(made), load(tmp_path / "plain")
    assert (quantized.traits.weight_bytes or 0) < 0.9 * (plain.traits.weight_bytes or 0)
    assert_equal_logits(run_protocol(quantized, SEQUENCES, 4), run_protocol(plain, SEQUENCES, 4))


def test_an_embedding_that_is_the_head_too(tmp_path: Path) -> None:
    source = tiny_checkpoint("llama", tmp_path / "source", variant="biases_tied", with_tokenizer=False)
    made = quantize_folder(source, tmp_path, "gptq", also=("embed_tokens",))
    quantized, plain = load(made), load(tmp_path / "plain")
    assert_equal_logits(run_protocol(quantized, SEQUENCES, 4), run_protocol(plain, SEQUENCES, 4))


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.parity)])
def test_ranks_use_the_numbers_of_one(num_ranks: int, tmp_path: Path) -> None:
    """Groups of 32 are cut into 16s where the 64 inputs of the last product of attention are divided by four; blocks of
    64 where the 192 of the MLP's are. `mqa`: every rank has the one KV head."""
    jobs, wanted = {}, {}
    for method, act_order, variant in (
        ("gptq", False, "plain"), ("gptq", True, "plain"), ("awq", False, "plain"), ("gptq", True, "mqa"),
    ):  # fmt: skip
        name = f"{method}-{act_order}-{variant}"
        source = tiny_checkpoint(
            "llama", tmp_path / name / "source", variant=variant, with_tokenizer=False, intermediate_size=128
        )
        folder = tmp_path / name / "made"
        made = quantize_folder(source, folder, method, act_order=act_order, also=("lm_head",))
        jobs[name] = (str(made), SEQUENCES)
        wanted[name] = run_protocol(load(folder / "plain"), SEQUENCES, 4)
    source = tiny_checkpoint("llama", tmp_path / "fp8", with_tokenizer=False, intermediate_size=192)
    made, decoded = store_folder(source, tmp_path / "blocks", *block_fp8(64))
    jobs["fp8"], wanted["fp8"] = (str(made), SEQUENCES), run_protocol(load(decoded), SEQUENCES, 4)
    jobs_file = tmp_path / "jobs.pt"
    torch.save(jobs, jobs_file)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "parity.tp_worker", str(rank), str(num_ranks), str(port), str(jobs_file)],
            cwd=TESTS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(num_ranks)
    ]  # fmt: skip
    for process in processes:
        output = process.communicate(timeout=280)[0]
        assert process.returncode == 0, output
    found = torch.load(tmp_path / f"rank0of{num_ranks}.pt")["jobs"]
    for name, logits in wanted.items():
        assert_equal_logits(found[name]["logits"], logits)
