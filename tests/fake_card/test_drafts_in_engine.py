"""Drafts that the stand-in card finds, checks and accepts in an engine of this process, whose steps are submitted
before the last one's tokens are seen: the tokens are those of an engine on the CPU without drafts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import BLOCK_SIZE, CARD, CPU, make_engine, small_sizes
from support.drafts import drafts_in
from support.engine_shard import tokens_of
from support.tiny_drafters import eagle3, medusa, with_mtp
from support.tiny_models import tiny_checkpoint

from model_server.batch.results import StepResult
from model_server.batch.sequence import NewRequest
from model_server.distributed.group import ProcessGroup
from model_server.engine.calls import DecodeCall, PrefillCall
from model_server.engine.engine import Engine
from model_server.features.drafts import costs
from model_server.features.drafts.pace import Pace
from model_server.sampling.parameters import SamplingParameters, StoppingParameters

DRAFTED = 2
NEW_TOKENS = 9
KINDS = (
    SamplingParameters(),
    SamplingParameters(do_sample=True, temperature=0.8, seed=4),
    SamplingParameters(repetition_penalty=1.3),
)
REPEATED = (7, 9, 11, 7, 9, 11, 7, 9)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in (("_MOST_ROWS", 4), ("_REPEATS", 1), ("_KEYS", 32)):
        monkeypatch.setattr(costs, name, value)
    with small_sizes(), torch.inference_mode():
        yield


def _requests() -> list[NewRequest]:
    """Each with the blocks of all its tokens."""
    return [
        NewRequest(
            id=number, input_ids=REPEATED[number:], sampling=sampling,
            stopping=StoppingParameters(max_new_tokens=NEW_TOKENS, ignore_eos_token=True),
            prefill_logprobs=False, top_n_tokens=0, blocks=np.array([1 + number, 11 + number], np.int32),
            cache_len=0, chunk_len=None, state_slot=number,
        )
        for number, sampling in enumerate(KINDS)
    ]  # fmt: skip


def _results(engine: Engine) -> tuple[list[StepResult], int]:
    """Of all steps, each submitted ahead of the last one's tokens where the engine allows it; how often it did."""
    assert len(REPEATED) + NEW_TOKENS <= 2 * BLOCK_SIZE
    num_ahead = 0
    results = [engine.submit_prefill(PrefillCall(batch_id=0, sequence=0), _requests())()]
    waiting: Callable[[], StepResult] | None = None
    while results[-1].batch is not None:
        call = DecodeCall(batch_ids=(0,), sequence=0, unanswered=int(waiting is not None))
        may_follow = waiting is None or engine.may_overlap(call)
        following = engine.submit_decode(call) if may_follow else None
        num_ahead += may_follow and waiting is not None
        if waiting is not None:
            while not engine.is_over():  # as the device's thread looks
                pass
            results.append(waiting())
        waiting = following
    return (results if waiting is None else [*results, waiting()]), num_ahead


def _lookup(folder: Path) -> str | None:
    return None


def _medusa(folder: Path) -> str:
    return str(medusa(folder / "heads", number=DRAFTED))


def _eagle(folder: Path) -> str:
    return str(eagle3(folder / "heads", eagle_aux_hidden_state_layer_ids=[0, 2, 3]))


def _mtp(folder: Path) -> str:
    with_mtp(folder / "model")
    return "mtp"


def _model(folder: Path) -> str:
    return str(tiny_checkpoint("llama", folder / "small", num_hidden_layers=1, vocab_size=320))


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("write", [_lookup, _medusa, _eagle, _mtp, _model])
def test_tokens_are_those_without_drafts(write: Callable[[Path], str | None], tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("llama", tmp_path / "model", num_hidden_layers=4, vocab_size=320)
    speculator = write(tmp_path)
    plain, num_ahead = _results(make_engine(checkpoint, CPU, torch.float32)[0])
    assert num_ahead == 0, "a CPU's steps end before the next one"
    engine, _ = make_engine(checkpoint, CARD, torch.float32, drafted=DRAFTED, speculator=speculator)
    watcher: Any = engine.steps.watcher
    watcher.measure(engine.runner, engine.cache, ProcessGroup(), 256)
    assert [rows for rows, _ in _costs(watcher.pace)] == [1, 2, 4]
    # Steps so cheap that drafts pay, with and without some in turn.
    watcher.pace = Pace([(1, 1e-3), (128, 2e-3)])
    if speculator is not None:
        watcher.drafter.pace = Pace([(1, 1e-6), (128, 2e-6)])
    lengths = itertools.cycle([DRAFTED, DRAFTED, 0])
    watcher.length = lambda windows, rows: next(lengths)
    results, num_ahead = _results(engine)
    assert tokens_of(*results) == tokens_of(*plain)
    assert num_ahead > 0
    assert sum(one.num_tokens for one in drafts_in(results)) > 0


def _costs(pace: Pace) -> list[tuple[float, float]]:
    return list(zip(pace._rows.tolist(), pace._seconds.tolist(), strict=True))
