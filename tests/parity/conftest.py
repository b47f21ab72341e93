"""Tiny checkpoints with the logits that transformers computes for them, made once per session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from parity.cases import CASES, Case
from parity.protocol import prompts
from support.tiny_models import random_model, tiny_checkpoint


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small gain nothing by threads, and on a busy machine each of their meetings costs milliseconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Case]:
    """All CASES; the reference runs each sequence alone, in full, without a cache, with eager attention."""
    root = tmp_path_factory.mktemp("checkpoints")
    made = {}
    for model_type, variant in CASES:
        path = root / f"{model_type}-{variant}"
        tiny_checkpoint(model_type, path, variant=variant, with_tokenizer=False, sharded=variant == "mha")
        model = random_model(model_type, variant=variant)
        sequences = prompts(model.config.vocab_size)
        with torch.inference_mode():
            logits = [model(s.unsqueeze(0), use_cache=False).logits[0].float() for s in sequences]
        made[model_type, variant] = Case(path, sequences, logits)
    return made
