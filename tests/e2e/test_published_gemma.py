"""A published model, Gemma 3 270M in Q4_K_M, answers as transformers does with the same weights in float32."""

from __future__ import annotations

import httpx
import pytest
import torch
from support.published_models import GEMMA3, fetched
from support.running_server import running_server

pytestmark = [pytest.mark.e2e, pytest.mark.weekly, pytest.mark.timeout(1800)]

# The last has more tokens than the window of most layers.
PROMPTS = ("The capital of France is", "  naïve café, 北京\n\n", "The quick brown fox jumps over the lazy dog. " * 55)
NEW = 6
# Logits that are nearer to each other than this share of the largest one may change places.
NEAR = 1e-4


@torch.inference_mode()
@pytest.mark.filterwarnings("default")  # what the reading library warns of is no fault of the test
def test_tokens_and_logprobs() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = fetched(GEMMA3)
    asked = {"max_new_tokens": NEW, "details": True}
    with (
        running_server(
            folder / GEMMA3.file, "--dtype", "float32", "--kv-cache-memory", str(256 * 2**20), wait=False
        ) as server,
        httpx.Client(base_url=server.url, timeout=300) as client,
    ):
        server.wait_healthy(300)  # the tokenizer alone has 262,144 tokens
        found = [[token["id"] for token in client.post("/tokenize", json={"inputs": text}).json()] for text in PROMPTS]
        answers = [client.post("/generate", json={"inputs": text, "parameters": asked}) for text in PROMPTS]
    # The server has ended before the weights are read a second time.
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GEMMA3.file)
    prompts = tokenizer(list(PROMPTS)).input_ids
    assert found == prompts and len(prompts[-1]) > 512
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GEMMA3.file, dtype=torch.float32)
    for prompt, answer in zip(prompts, answers, strict=True):
        details = answer.raise_for_status().json()["details"]
        chosen = [token["id"] for token in details["tokens"]]
        assert len(chosen) == NEW or details["finish_reason"] == "eos_token"
        logits = model(torch.tensor([[*prompt, *chosen[:-1]]]), logits_to_keep=len(chosen)).logits[0]
        for row, token in zip(logits, chosen, strict=True):
            assert row.max() - row[token] <= NEAR * row.abs().max()
        right = logits.log_softmax(-1).gather(1, torch.tensor(chosen)[:, None])[:, 0]
        logprobs = torch.tensor([token["logprob"] for token in details["tokens"]])
        torch.testing.assert_close(logprobs, right, rtol=1e-3, atol=1e-3)
