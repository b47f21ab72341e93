"""Models that give vectors and scores: their numbers on the stand-in card are those of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from engines import CARD, CPU
from serving import ANSWER_LIMIT_S, on_card, on_cpu
from support.encoder_models import write_model, write_sentence_files
from support.pooling import items_of, load_pooled, run

from model_server.pooling.items import Kind

MOST = 1e-4
TEXTS = ["what is rain", "the rain in detail falls from the clouds and it was not bad to eat it", "a"]
PAIRS = [("what is rain", "water falls from clouds"), ("a", "b c d e f g h i j k l m")]


@pytest.fixture
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def _compare(folder: Path, kinds: tuple[Kind, ...], **asked: object) -> None:
    on_host, there = (load_pooled(folder, device=device, **asked) for device in (CPU, CARD))  # type: ignore[arg-type]
    for texts in (TEXTS, PAIRS):
        for kind in kinds:
            items = items_of(folder, texts, kind, there.max_length)
            for expected, found in zip(run(on_host, items), run(there, items), strict=True):
                np.testing.assert_allclose(found, expected, rtol=0, atol=MOST * float(np.abs(expected).max()))


# Token types; windows, both ways; a decoder; what transformers computes.
@pytest.mark.usefixtures("inference", "order")
@pytest.mark.parametrize("case", ["bert", "modernbert", "gemma3_text", "qwen3", "deberta-v2"])
def test_vectors_of_texts_and_tokens(case: str, tmp_path: Path) -> None:
    write_model(tmp_path, case)
    pooling = "last-token" if case == "qwen3" else "mean"
    _compare(tmp_path, (Kind.POOLED, Kind.TOKENS), task="embed", pooling=pooling)


@pytest.mark.usefixtures("inference", "order")
def test_scores_of_pairs(tmp_path: Path) -> None:
    write_model(tmp_path, "roberta", kind="AutoModelForSequenceClassification", num_labels=1)
    _compare(tmp_path, (Kind.SCORES,))


@pytest.mark.usefixtures("inference", "order")
def test_sparse_vectors(tmp_path: Path) -> None:
    write_model(tmp_path, "distilbert", kind="AutoModelForMaskedLM")
    _compare(tmp_path, (Kind.SPARSE,), task="embed", pooling="splade")


@pytest.mark.e2e
def test_an_embedder_that_is_served(order: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    write_model(model, "bert")
    write_sentence_files(model)
    options = ["--dtype", "float32", "--max-batch-tokens", "64"]
    asked = {"inputs": TEXTS}
    with on_cpu(model, *options) as server:
        expected = httpx.post(f"{server.url}/embed", json=asked, timeout=ANSWER_LIMIT_S).json()
    with on_card(model, tmp_path / "reports", *options, order=order) as server:
        found = httpx.post(f"{server.url}/embed", json=asked, timeout=ANSWER_LIMIT_S).json()
    np.testing.assert_allclose(found, expected, rtol=0, atol=MOST)
