"""Vectors and scores against sentence-transformers: pooling modes, Dense, prompts, truncation, cross encoders."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.encoder_models import write_model, write_sentence_files
from support.pooling import load_pooled, run

from model_server.pooling.items import Item, Kind
from router.pooling.texts import Cut, Text, TextTokenizer

TEXTS = ["what is rain", "a", "deep learning, machine learning! do cats like fish", "the water falls from clouds " * 20]
MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
PROMPTS = {"query": "query ", "document": "search document "}


def _tokens(folder: Path, longest: int, texts: list[Text]) -> list[Any]:
    """As the router cuts them."""
    tokenizer = TextTokenizer.from_file(folder / "tokenizer.json", max_length=longest, num_workers=1)
    try:
        return asyncio.run(tokenizer.encode(texts, Cut(True)))
    finally:
        tokenizer.close()


def _vectors(folder: Path, prompt: str = "", dimensions: int = 0, dtype: torch.dtype = torch.float32) -> np.ndarray:
    runner = load_pooled(folder, dtype=dtype)
    tokens = _tokens(folder, runner.max_length, [Text(text, prompt=prompt) for text in TEXTS])
    items = [
        Item(
            id=place,
            input_ids=np.array(one.ids, dtype=np.uint32),
            prompt_tokens=one.prompt_tokens,
            dimensions=dimensions,
        )
        for place, one in enumerate(tokens)
    ]
    return np.stack(run(runner, items))


def _expected(folder: Path, **options: Any) -> np.ndarray:
    from sentence_transformers import SentenceTransformer  # seconds, in each process that collects tests

    model = SentenceTransformer(str(folder), device="cpu", **options.pop("settings", {}))
    found: np.ndarray = model.encode(TEXTS, normalize_embeddings=True, batch_size=2, **options)
    return found


def _cosines(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    cosines: np.ndarray = (ours * theirs).sum(axis=1) / np.linalg.norm(theirs, axis=1)
    return cosines


@pytest.mark.parametrize("mode", [*MODES, ["cls", "mean"]])
def test_pooling_modes(tmp_path: Path, mode: str | list[str]) -> None:
    write_model(tmp_path, "bert")
    write_sentence_files(tmp_path, pooling={"word_embedding_dimension": 64, "pooling_mode": mode})
    np.testing.assert_allclose(_vectors(tmp_path), _expected(tmp_path), atol=1e-6)


@pytest.mark.parametrize("case", ["roberta", "modernbert", "qwen3", "mpnet"])
def test_kinds_of_models(tmp_path: Path, case: str) -> None:
    write_model(tmp_path, case)
    write_sentence_files(tmp_path)
    assert _cosines(_vectors(tmp_path), _expected(tmp_path)).min() > 0.999999


def test_bfloat16_is_as_near_as_theirs(tmp_path: Path) -> None:
    write_model(tmp_path, "bert")
    write_sentence_files(tmp_path)
    assert _cosines(_vectors(tmp_path, dtype=torch.bfloat16), _expected(tmp_path)).min() > 0.999


def test_dense_modules_and_fewer_dimensions(tmp_path: Path) -> None:
    write_model(tmp_path, "bert")
    write_sentence_files(tmp_path, dense=[(40, "Tanh"), (24, "Identity")])
    np.testing.assert_allclose(_vectors(tmp_path), _expected(tmp_path), atol=1e-6)
    cut = _expected(tmp_path, settings={"truncate_dim": 8})
    cut = cut / np.linalg.norm(cut, axis=1, keepdims=True)
    np.testing.assert_allclose(_vectors(tmp_path, dimensions=8), cut, atol=1e-6)


@pytest.mark.parametrize("counts", [True, False])
def test_prompts(tmp_path: Path, counts: bool) -> None:
    write_model(tmp_path, "bert")
    for mode in ("mean", "cls", "weightedmean"):
        pooling = {"word_embedding_dimension": 64, "pooling_mode": mode, "include_prompt": counts}
        folder = tmp_path / mode
        write_model(folder, "bert")
        write_sentence_files(folder, pooling=pooling, prompts=PROMPTS)
        theirs = _expected(folder, prompt_name="query")
        np.testing.assert_allclose(_vectors(folder, prompt=PROMPTS["query"]), theirs, atol=1e-6)


@pytest.mark.parametrize("case", ["bert", "roberta", "deberta-v2"])
def test_cross_encoders(tmp_path: Path, case: str) -> None:
    write_model(tmp_path, case, kind="AutoModelForSequenceClassification", num_labels=1)
    pairs = [("what is rain", text) for text in TEXTS]
    from sentence_transformers import CrossEncoder

    theirs = CrossEncoder(str(tmp_path), device="cpu").predict(pairs)
    runner = load_pooled(tmp_path, longest=64)
    tokens = _tokens(tmp_path, 64, [Text(*pair) for pair in pairs])
    items = [
        Item(id=i, input_ids=np.array(t.ids, dtype=np.uint32), second_from=t.second_from, kind=Kind.SCORES)
        for i, t in enumerate(tokens)
    ]
    ours = np.concatenate(run(runner, items))
    np.testing.assert_allclose(1 / (1 + np.exp(-ours)), theirs, atol=1e-5)


def test_a_prompt_of_the_files_is_read(tmp_path: Path) -> None:
    """What `Prompts` gets is what sentence-transformers finds."""
    write_model(tmp_path, "bert")
    write_sentence_files(tmp_path, prompts=PROMPTS, default_prompt="query")
    from wire.pooling.files import read

    files = read(tmp_path, json.loads((tmp_path / "config.json").read_text()), ValueError)
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(tmp_path), device="cpu")
    assert {name: text for name, text in model.prompts.items() if text} == files.prompts
    assert model.default_prompt_name == files.default_prompt_name == "query"
