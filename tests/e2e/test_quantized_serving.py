"""A launcher that is given a quantized folder and no other word of it serves the tokens of the decoded weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from support.quantized_folder import block_fp8, compressed, quantize_folder
from support.running_server import running_server
from support.tiny_models import tiny_checkpoint

pytestmark = pytest.mark.e2e

INT4 = {
    "targets": ["Linear"], "format": "pack-quantized",
    "weights": {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
}  # fmt: skip
WAYS: dict[str, Any] = {
    "fp8": lambda: block_fp8(32),
    "compressed-tensors": lambda: compressed("pack-quantized", INT4),
}
NEW_TOKENS = 16
# Tokens that score nearly alike may change places; relative to the largest logit.
NEAR_TIE = 1e-4


@pytest.mark.parametrize("method", ["compressed-tensors", pytest.param("fp8", marks=pytest.mark.long)])
def test_tokens_are_those_of_the_decoded_weights(method: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    plain = tiny_checkpoint("llama", tmp_path / "plain")
    quantized, decoded = quantize_folder(plain, tmp_path, *WAYS[method]())
    model = AutoModelForCausalLM.from_pretrained(decoded, dtype=torch.float32).eval()
    with (
        running_server(quantized, "--dtype", "float32") as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        prompt = [token["id"] for token in client.post("/tokenize", json={"inputs": "The quick brown fox"}).json()]
        parameters = {"max_new_tokens": NEW_TOKENS, "details": True, "ignore_eos": True}
        answer = client.post("/generate", json={"inputs": "The quick brown fox", "parameters": parameters})
        assert answer.status_code == 200, answer.text
        generated = [token["id"] for token in answer.json()["details"]["tokens"]]
        assert f"Weights: {method}, " in server.log()
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + generated]), use_cache=False).logits[0].float()
    assert len(generated) == NEW_TOKENS
    for at, token in enumerate(generated):
        scores = logits[len(prompt) + at - 1]
        assert float(scores.max() - scores[token]) <= NEAR_TIE * float(scores.abs().max()), f"token {at}"
