"""One family of models for each mechanism: an engine on the stand-in card says what one on the CPU says, in float32.

Graphs of decode steps and of steps with prompts, chunks that join running rows, and five kinds of sampling.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engines import CARD, CPU, answers_of, ids_of, make_engine, small_sizes, worst_logprob_difference
from stand_in.counters import Counter, counted
from support.tiny_models import tiny_checkpoint

from model_server.runner.cuda_graphs import GraphedRunner

MOST = 1e-4
SHORT = [("llama", "plain")]
# One of each kind of attention, position, norm, expert and product.
WEEKLY = [
    ("qwen3", "windows"),
    ("phi3", "partial_window"),
    ("gemma2", "plain"),
    ("gpt2", "plain"),
    ("opt", "post_norm"),
    ("bloom", "six_heads"),
    ("falcon", "plain"),
    ("mixtral", "plain"),
    ("qwen2_moe", "plain"),
    ("gpt_oss", "plain"),
    ("deepseek_v2", "plain"),
    ("deepseek_v3", "plain"),
    ("llama4_text", "plain"),
    ("deepseek_v32", "plain"),
    ("glm_moe_dsa", "shared"),
    ("gemma4_text", "plain"),
]
# Layers with something else than attention, alone, in turn with it, and beside it.
RECURRENT = [
    ("qwen3_next", "plain"),
    ("olmo_hybrid", "plain"),
    ("kimi_linear", "plain"),
    ("mamba", "plain"),
    ("falcon_mamba", "plain"),
    ("jamba", "plain"),
    ("minimax", "plain"),
    ("mamba2", "plain"),
    ("falcon_h1", "plain"),
    ("nemotron_h", "latent"),
    ("lfm2", "plain"),
]
# Their steps need the host; what LFM2 remembers is in blocks.
EAGER = {"deepseek_v32", "glm_moe_dsa"} | {family for family, _ in RECURRENT} - {"lfm2"}
CASES = [pytest.param(*case, id="-".join(case), marks=pytest.mark.short) for case in SHORT]
CASES += [pytest.param(*case, id="-".join(case)) for case in WEEKLY + RECURRENT]


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    with small_sizes(), torch.inference_mode():
        yield


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_answers_are_those_of_the_cpu(family: str, variant: str, order: str, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(family, tmp_path / "model", variant=variant)
    expected = answers_of(make_engine(checkpoint, CPU, torch.float32)[0])
    with counted() as grown:
        engine, runner = make_engine(checkpoint, CARD, torch.float32)
        actual = answers_of(engine)
    assert ids_of(actual) == ids_of(expected)
    assert worst_logprob_difference(expected, actual) <= MOST
    is_captured = isinstance(runner, GraphedRunner)
    assert is_captured == (family not in EAGER)
    assert (grown[Counter.GRAPH_LAUNCHES] > 0) == is_captured
