"""The launcher serves quantized folders, with no other flag, with the tokens that transformers gives for the same
numbers; and quantizes plain weights where it is asked to."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import torch
from support.quantized import quantize_folder
from support.running_server import running_server
from support.tiny_models import tiny_checkpoint

pytestmark = pytest.mark.e2e

PROMPT, NEW = "The bytes come one by one", 12


def served(model: Path, *options: str) -> tuple[list[int], str]:
    """Token ids of a greedy answer, and the log."""
    parameters = {"max_new_tokens": NEW, "details": True}
    with running_server(model, *options) as server:
        answer = httpx.post(
            f"http://127.0.0.1:{server.port}/generate", json={"inputs": PROMPT, "parameters": parameters}, timeout=60
        ).json()
        return [token["id"] for token in answer["details"]["tokens"]], server.log()


@pytest.mark.parametrize(
    "method", [pytest.param("gptq", marks=pytest.mark.long), pytest.param("awq", marks=pytest.mark.weekly)]
)
def test_a_folder_of_quantized_weights(method: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = tiny_checkpoint("llama", tmp_path / "source")
    found, log = served(quantize_folder(source, tmp_path, method, act_order=method == "gptq"))
    assert f"Weights: {method}, 4 bits, groups of 32; 2 modules plain; activations in " in log
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(tmp_path / "plain")(PROMPT, return_tensors="pt").input_ids
    wanted = model.generate(ids, max_new_tokens=NEW, min_new_tokens=len(found), do_sample=False)[0, ids.shape[1] :]
    assert len(found) > 3
    assert found == wanted.tolist()[: len(found)]


@pytest.mark.long
def test_plain_weights_are_quantized_on_load(tmp_path: Path) -> None:
    found, log = served(tiny_checkpoint("llama", tmp_path / "source"), "--quantize", "eetq")
    assert found
    assert "Weights: eetq on load, 8 bits, one group a row; 2 modules plain; activations in " in log
