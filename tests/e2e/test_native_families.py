"""Every family of the native decoder through the real server: greedy tokens are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from parity.cases import CASES, Key
from parity.disguises import DISGUISES, disguise
from support.running_server import running_server
from support.tiny_models import random_model, write_tokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.weekly]

PROMPTS = ("Hello", "The quick brown fox jumps over the lazy dog, again and again", "naïve café, 日本語 🙂")
NEW_TOKENS = 16
# Tokens that score nearly alike may change places; relative to the largest logit.
NEAR_TIE = 1e-4

# One checkpoint of each model type: the plain one, or else the first of its variants.
ONE_EACH: list[Key] = list({key[0]: key for key in sorted(CASES, key=lambda key: key[1] == "plain")}.values())


def _checkpoint(key: Key, path: Path) -> Any:
    """Writes it and returns the model that knows the truth."""
    mask = DISGUISES.get(key)
    model_type, variant = key if mask is None else mask.source
    model = random_model(model_type, variant=variant)
    path.mkdir()
    model.save_pretrained(path)
    if mask is not None:
        disguise(path, mask.change)
        if mask.prepare is not None:
            mask.prepare(model)
    write_tokenizer(path, vocab_size=model.config.vocab_size)
    return model


def _assert_greedy(model: Any, prompt: list[int], generated: list[int]) -> None:
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + generated]), use_cache=False).logits[0].float()
    for at, token in enumerate(generated):
        scores = logits[len(prompt) + at - 1]
        gap = float(scores.max() - scores[token])
        assert gap <= NEAR_TIE * float(scores.abs().max()), f"token {at}"


@pytest.mark.parametrize("key", ONE_EACH, ids="-".join)
def test_greedy_tokens_equal_transformers(key: Key, tmp_path: Path) -> None:
    model = _checkpoint(key, tmp_path / "model")
    # These checkpoints allow few positions, and some have an end token of their own.
    limits = ("--max-total-tokens", "96", "--max-input-tokens", "64", "--max-batch-prefill-tokens", "64")
    with (
        running_server(tmp_path / "model", "--dtype", "float32", *limits) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        for prompt in PROMPTS:
            ids = [token["id"] for token in client.post("/tokenize", json={"inputs": prompt}).json()]
            parameters = {"max_new_tokens": NEW_TOKENS, "details": True, "ignore_eos": True}
            answer = client.post("/generate", json={"inputs": prompt, "parameters": parameters})
            assert answer.status_code == 200, answer.text
            generated = [token["id"] for token in answer.json()["details"]["tokens"]]
            assert len(generated) == NEW_TOKENS
            _assert_greedy(model, ids, generated)
