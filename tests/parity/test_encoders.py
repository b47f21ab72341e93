"""Encoders and decoders without a head against transformers, text by text: hidden states, scores, masked tokens."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.encoder_models import ENCODERS, write_model, write_sentence_files
from support.pooling import items_of, load_pooled, run

from model_server.models.families import ENCODERS as NATIVE
from model_server.pooling.items import Kind
from model_server.pooling.native import NativeModel
from model_server.pooling.runner import PoolingRunner

TEXTS = [
    "what is rain",
    "the rain in detail falls from the clouds and the water is good for fish and cats and it was not bad to eat it",
    "a",
    "machine learning, deep learning! what do cats like",
]
PAIRS = [("what is rain", "water falls from clouds"), ("who eat fish", "cats"), ("a", "b c d e f g h i j k l m")]
FEW = ("bert", "roberta", "modernbert", "deberta-v2", "qwen2_both_ways")
"""Of every way one; the others with `make parity`."""
BY_TRANSFORMERS = ("albert", "deberta-v2", "electra_narrow", "mpnet")


def _marked(cases: Any) -> list[Any]:
    return [case if case in FEW else pytest.param(case, marks=pytest.mark.parity) for case in cases]


def _expected(model: Any, runner: PoolingRunner, folder: Path, texts: Any) -> list[torch.Tensor]:
    """What transformers computes of each text alone: hidden states, or what the head gives."""
    found = []
    typed = (
        "token_type_ids" in inspect.signature(model.forward).parameters
        and getattr(model.config, "type_vocab_size", 0) > 1
    )
    for item in items_of(folder, texts, Kind.TOKENS, runner.max_length):
        ids = torch.from_numpy(item.input_ids.astype(np.int64)).unsqueeze(0)
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if item.second_from and typed:
            types = torch.zeros_like(ids)
            types[0, item.second_from :] = 1
            given["token_type_ids"] = types
        with torch.inference_mode():
            found.append(model(**given)[0][0])
    return found


def test_every_native_encoder_has_a_case() -> None:
    assert set(NATIVE) - {"new"} <= {model_type for model_type, _ in ENCODERS.values()}


@pytest.mark.parametrize("case", _marked(ENCODERS))
def test_hidden_states_equal_transformers(tmp_path: Path, case: str) -> None:
    model = write_model(tmp_path, case)
    runner = load_pooled(tmp_path, task="embed", pooling="mean")
    assert isinstance(runner.model, NativeModel) == (case not in BY_TRANSFORMERS)
    for texts in (TEXTS, PAIRS):
        items = items_of(tmp_path, texts, Kind.TOKENS, runner.max_length)
        for ours, theirs in zip(run(runner, items), _expected(model, runner, tmp_path, texts), strict=True):
            assert np.abs(ours - theirs.numpy()).max() <= 2e-5 * float(theirs.abs().max())


@pytest.mark.parametrize("case", _marked(("bert", "modernbert", "qwen2_both_ways", "gemma3_text")))
def test_the_reference_attention_gives_the_same(tmp_path: Path, case: str) -> None:
    write_model(tmp_path, case)
    items = items_of(tmp_path, TEXTS, Kind.TOKENS, 48)
    ways = [
        run(load_pooled(tmp_path, task="embed", pooling="mean", attention=name), items) for name in (None, "reference")
    ]
    for ours, theirs in zip(*ways, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5 * np.abs(theirs).max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", _marked(("bert", "modernbert", "nomic_bert", "qwen3", "mpnet")))
def test_a_text_has_the_same_bits_alone_and_in_any_batch(tmp_path: Path, case: str, dtype: torch.dtype) -> None:
    write_model(tmp_path, case)
    write_sentence_files(tmp_path, dense=[(40, "Tanh"), (24, "Identity")])
    runner = load_pooled(tmp_path, dtype=dtype)
    items = items_of(tmp_path, [*TEXTS, *TEXTS[::-1], *(f"{TEXTS[1]} {word}" for word in "abcdefgh")], Kind.POOLED, 48)
    alone = [run(runner, [item])[0].tobytes() for item in items]
    assert [one.tobytes() for one in run(runner, items)] == alone
    assert [one.tobytes() for one in run(runner, items[::-1])][::-1] == alone
    assert [one.tobytes() for one in run(runner, items[3:9])] == alone[3:9]


_SCORED = [
    case for case in ENCODERS if case not in ("electra_narrow", "gemma3_text", "qwen2_both_ways", "gte", "nomic_bert")
]


@pytest.mark.parametrize("case", _marked(_SCORED))
def test_scores_equal_transformers(tmp_path: Path, case: str) -> None:
    for count, task in ((1, "rerank"), (3, "classify")):
        folder = tmp_path / task
        model = write_model(folder, case, kind="AutoModelForSequenceClassification", num_labels=count)
        runner = load_pooled(folder)
        assert runner.plan.task.task == task and runner.dimensions == count
        for texts in (PAIRS, TEXTS):
            items = items_of(folder, texts, Kind.SCORES, runner.max_length)
            for ours, theirs in zip(run(runner, items), _expected(model, runner, folder, texts), strict=True):
                np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-5 * max(1.0, float(theirs.abs().max())))


@pytest.mark.parametrize("case", _marked(("bert", "distilbert", "roberta", "modernbert")))
def test_sparse_vectors_are_the_largest_logits_of_masked_tokens(tmp_path: Path, case: str) -> None:
    model = write_model(tmp_path, case, kind="AutoModelForMaskedLM")
    runner = load_pooled(tmp_path, task="embed", pooling="splade")
    items = items_of(tmp_path, TEXTS, Kind.SPARSE, runner.max_length)
    with torch.inference_mode():
        results = runner.run(items).results
    for ours, logits in zip(results, _expected(model, runner, tmp_path, TEXTS), strict=True):
        wanted = torch.log1p(torch.relu(logits)).amax(dim=0)
        values = torch.zeros_like(wanted)
        values[list(ours.indices)] = torch.from_numpy(np.frombuffer(ours.values, dtype="<f4").copy())
        torch.testing.assert_close(values, wanted, atol=2e-5, rtol=1e-5)


def test_a_decoder_that_answers_yes_or_no_scores_by_their_logits(tmp_path: Path) -> None:
    model = write_model(tmp_path, "qwen3", kind="AutoModelForCausalLM")
    runner = load_pooled(tmp_path, task="rerank")
    assert runner.plan.answers is not None
    yes, no = runner.plan.answers
    items = items_of(tmp_path, TEXTS, Kind.SCORES, runner.max_length)
    for ours, logits in zip(run(runner, items), _expected(model, runner, tmp_path, TEXTS), strict=True):
        assert no is not None
        np.testing.assert_allclose(ours[0], float(logits[-1, yes] - logits[-1, no]), atol=1e-4)
