"""Engines of the project on tiny checkpoints: one on the stand-in for a GPU, one on the CPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import parity.engine_run as engine_run
import pytest
import torch
from support.loading import FixedAttention

from model_server.attention.choice import AttentionChoice
from model_server.attention.reference import ReferenceBackend
from model_server.config import ServeConfig
from model_server.distributed.group import ProcessGroup
from model_server.distributed.layout import Layout, Ranks
from model_server.distributed.placement import Placement
from model_server.distributed.stage_links import StageLinks
from model_server.engine.calls import Session
from model_server.engine.engine import Engine, EngineOptions
from model_server.engine.steps.maker import StepMaker
from model_server.features.drafts.drafters.drafter import DraftedRunner
from model_server.features.drafts.load import find_speculator, load_drafts
from model_server.memory.kv_cache import KvCache
from model_server.models.load import load_runner
from model_server.models.model import describe
from model_server.runner import cuda_graphs
from model_server.runner.graph_capture import CudaGraphCapture
from model_server.runner.graph_choice import with_graphs
from model_server.sampling.sampler import Sampler
from model_server.text.tokenizer import Tokenizer
from model_server.weights.checkpoint import examine

CARD, CPU = torch.device("cuda", 0), torch.device("cpu")
BLOCK_SIZE = 16
NUM_BLOCKS = 128
MAX_CONTEXT = 256
BATCH_SIZES = (4, 1)  # of decode graphs
TOKEN_SIZES = (32,)  # of graphs of steps with prompts
PREFILL_BUDGET = 24
NEW_TOKENS = 4

Answers = dict[int, dict[str, Any]]


@contextmanager
def small_sizes() -> Iterator[None]:
    """Few graphs and tokens: the interpreter takes a second for a step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_run, "BLOCK", BLOCK_SIZE)
        patch.setattr(engine_run, "NEW_TOKENS", NEW_TOKENS)
        patch.setattr(cuda_graphs, "TOKEN_SIZES", TOKEN_SIZES)
        yield


def make_engine(
    checkpoint: Path,
    device: torch.device,
    dtype: torch.dtype,
    *,
    quantize: str | None = None,
    group: ProcessGroup | None = None,
    layout: Layout | None = None,
    drafted: int = 0,
    speculator: str | None = None,
) -> tuple[Engine, Any]:
    """An engine and its runner; on the card with graphs. group, layout: of one rank of several. drafted, speculator:
    drafts on the card, as `--speculate` and `--speculator` have them."""
    model = describe(examine(checkpoint), quantize=quantize)
    on_card = device.type == "cuda"
    layout = layout or Layout()
    attention = AttentionChoice(None, device, dtype) if on_card else FixedAttention(ReferenceBackend())
    ranks = Ranks.of(group, layout, device) if group else Ranks.of(ProcessGroup())
    place = Placement(device, dtype, ranks, num_drafted=drafted)
    runner, tokenizer = load_runner(model, place, attention, captures=on_card), Tokenizer.load(checkpoint)
    maker: StepMaker | None = None
    if drafted:
        config = ServeConfig(model_id=str(checkpoint), speculate=drafted)
        found = None if speculator is None else find_speculator(speculator, tokenizer, checkpoint)
        runner, maker = load_drafts(config, found, model, runner, tokenizer.vocab_size, place)
    if on_card:
        keeps = runner.retains if isinstance(runner, DraftedRunner) else None
        windows = {1 + drafted: BATCH_SIZES} if drafted else None
        runner = with_graphs(runner, BATCH_SIZES, CudaGraphCapture(device), windows, keeps=keeps)
    states = runner.traits.recurrent
    if states is not None:
        states.reserve(len(engine_run.KINDS))
    options = EngineOptions(
        device=device, layout=layout, block_size=BLOCK_SIZE, prompt_logprobs_allowed=True, chunking=True, grows=True
    )
    links = StageLinks(ranks, device) if layout.stage.size > 1 else None
    engine = Engine(runner, tokenizer, Sampler(runner.vocab_size, device), options, links, maker)
    engine.start(Session(max_prefill_tokens=PREFILL_BUDGET))
    cache = KvCache(runner.kv_shapes, NUM_BLOCKS, BLOCK_SIZE, dtype, device)
    for rows in cache.rows:
        rows.fill_(math.nan)
    if on_card and hasattr(runner, "capture"):
        for rows in cache.rows:
            rows[:BLOCK_SIZE].zero_()  # the block that padding reads
        runner.capture(cache, MAX_CONTEXT, group or ProcessGroup())
    engine.set_cache(cache)
    return engine, runner


def answers_of(engine: Engine) -> Answers:
    """Five kinds of requests, joining one after another with prompts in chunks: ids, and the first one's logprobs."""
    return engine_run.Router(engine).chunked(engine_run.make_requests())


def ids_of(answers: Answers) -> dict[int, list[int]]:
    """By request."""
    return {key: answer["ids"] for key, answer in answers.items()}


def worst_logprob_difference(expected: Answers, actual: Answers) -> float:
    """Of the prompt's tokens; NaN, the first token's, apart."""
    pairs = [
        (x, y)
        for key in expected
        if expected[key]["prompt"]
        for x, y in zip(expected[key]["prompt"], actual[key]["prompt"], strict=True)
    ]
    assert pairs, "no request asked for them"
    return max(abs(x - y) for x, y in pairs if not math.isnan(x))
