"""A launcher that is given a quantized folder and no other word of it serves the tokens of the decoded weights."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import torch
from support.quantized_folder import quantize_folder
from support.quantized_ways import WAYS
from support.running_server import running_server
from support.tiny_models import tiny_checkpoint

pytestmark = pytest.mark.e2e

# What the log calls the method, and the way of `quantized_ways` by which it is stored.
STORED = [
    ("compressed-tensors", "int4"),
    *(
        pytest.param(method, way, marks=pytest.mark.weekly)
        for method, way in (
            ("fp8", "fp8 blocks"), ("bitsandbytes", "nf4"), ("bitsandbytes", "fp4"),
            ("bitsandbytes", "bitsandbytes int8"), ("torchao", "torchao int8"), ("torchao", "torchao int4"),
            ("torchao", "torchao fp8"), ("modelopt NVFP4", "modelopt nvfp4"),
        )
    ),
]  # fmt: skip
NEW_TOKENS = 16
# Tokens that score nearly alike may change places; relative to the largest logit.
NEAR_TIE = 1e-4


@pytest.mark.long
@pytest.mark.parametrize(("method", "way"), STORED)
def test_tokens_are_those_of_the_decoded_weights(method: str, way: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    plain = tiny_checkpoint("llama", tmp_path / "plain")
    quantized, decoded = quantize_folder(plain, tmp_path, *WAYS[way]())
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
