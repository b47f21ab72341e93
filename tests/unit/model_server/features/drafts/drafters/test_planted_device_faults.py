"""Faults of windows on a device that the comparison with a plain run must find, and one that only costs drafts."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.device_drafters import DiceDrafts, drafting_on_a_gpu, found_in
from support.drafts import drafts_in
from support.engine_shard import EngineShard, generations_of
from support.loading import load
from support.tiny_drafters import eagle3
from support.tiny_models import tiny_checkpoint
from torch import Tensor
from unit.model_server.engine.test_device_windows import answers
from unit.model_server.features.drafts.drafters import test_eagle

from model_server.attention.metadata import AttentionMetadata
from model_server.batch.results import GeneratedText, Generation, StepResult
from model_server.batch.sequence import NewRequest, Sequence
from model_server.engine.answers import Answers
from model_server.engine.engine import Engine
from model_server.features.drafts.device import state
from model_server.features.drafts.device.speculator import BatchWindows
from model_server.features.drafts.device.state import WindowState
from model_server.features.drafts.drafters import draft_model
from model_server.features.drafts.drafters.drafts import Brought
from model_server.features.drafts.drafters.layer_drafter import LayerDrafts
from model_server.features.drafts.drafters.queries import RowsAt, single_queries
from model_server.sampling.parameters import SamplingParameters, StoppingParameters
from model_server.sampling.places import Places
from model_server.text.tokenizer import Tokenizer

# What checks the comparison itself: it changes with that alone.
pytestmark = pytest.mark.weekly

Patch = pytest.MonkeyPatch
# Its tokens, its end, and errors.
Said = tuple[list[int], GeneratedText | None, list[str]]
MOST, NEW = 3, 18
# The model itself: its drafts are right wherever a request is greedy and nothing changes its scores.
RIGHT = "base"


class Longest(DiceDrafts):
    """Windows of one length."""

    def length(self, windows: BatchWindows, rows: list[Sequence]) -> int:
        return self.most


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("planted-device-faults")
    tiny_checkpoint("llama", root / "base", num_hidden_layers=4, vocab_size=320)
    eagle3(root / "eagle", **test_eagle.KINDS["midlayer"])
    return root


@pytest.fixture(scope="module")
def tokenizer(root: Path) -> Tokenizer:
    return Tokenizer.load(root / "base")


def requests_of(shard: EngineShard, stop: str) -> list[NewRequest]:
    """stop: the text of a token that the first request says in the middle of a window of right drafts."""
    stopping = StoppingParameters(max_new_tokens=NEW, ignore_eos_token=True, stop_sequences=(stop,))
    kinds: list[dict[str, Any]] = [
        {"sampling": SamplingParameters(min_tokens=5), "stopping": stopping},
        {},
        {"sampling": SamplingParameters(do_sample=True, temperature=0.3, seed=3), "top_n_tokens": 2},
        {"sampling": SamplingParameters(frequency_penalty=2.0, logit_bias=tuple((one, 30.0) for one in range(40, 44)))},
    ]
    return [shard.request([5 + 9 * n, 8, 21, 13], NEW, **kind) for n, kind in enumerate(kinds)]


@pytest.fixture(scope="module")
def stop(root: Path, tokenizer: Tokenizer) -> str:
    """The first token of the second window: one comes of the prompt, and four of the first window."""
    with torch.inference_mode():
        shard = EngineShard(tokenizer, runner=load(root / "base"))  # type: ignore[arg-type]
        said = said_in(answers(shard, requests_of(shard, "")[:1], ahead=False))
    return tokenizer.decode_one(said[0][0][5])


def said_in(results: list[StepResult]) -> dict[int, Said]:
    """By request. Logprobs are not compared: a fault must not pass for found because one was rounded otherwise."""
    return {
        request_id: (
            [i for g in generations if g.tokens is not None for i in g.tokens.ids],
            generations[-1].generated_text,
            [g.error for g in generations if g.error is not None],
        )
        for request_id, generations in generations_of(*results).items()
    }


@pytest.fixture(scope="module")
def plain(root: Path, tokenizer: Tokenizer, stop: str) -> dict[int, Said]:
    with torch.inference_mode():
        shard = EngineShard(tokenizer, budget=1000, runner=load(root / "base"))  # type: ignore[arg-type]
        return said_in(answers(shard, requests_of(shard, stop), ahead=False))


@dataclasses.dataclass
class Run:
    """right: how many drafted tokens were; drafts: those that were made, by what they follow."""

    said: dict[int, Said]
    right: int
    drafts: dict[tuple[int, ...], list[int]]


@pytest.fixture
def drafted(root: Path, tokenizer: Tokenizer, stop: str, monkeypatch: Patch) -> Callable[[str], Run]:
    """With a drafter of that name; a step is launched before the tokens of the last one are known."""
    monkeypatch.setattr(Engine, "_runs_ahead", True)

    def run(kind: str) -> Run:
        base = root / "base"
        shard, asked = drafting_on_a_gpu(
            tokenizer, base, found_in(root / kind, tokenizer, base), MOST,
            speculator=lambda drafter: Longest(MOST, random.Random(0), drafter),
        )  # fmt: skip
        results = answers(shard, requests_of(shard, stop), ahead=True)
        right = sum(one.num_right for one in drafts_in(results))
        return Run(said_in(results), right, {tuple(ids): draft for ids, _, draft in asked})

    return run


def wrong_draft_accepted(patch: Patch) -> None:
    """Every draft counts as what was drawn."""
    settle = WindowState.accept

    def settled(self: WindowState, length: int, ids: Tensor, *others: Any) -> Any:
        assert self._tensors is not None
        self._tensors.draft = ids.view(len(self.rows), length + 1)
        return settle(self, length, ids, *others)

    patch.setattr(WindowState, "accept", settled)


def rejected_keys_kept(patch: Patch) -> None:
    """The keys of a wrong draft stand for those of the token that was drawn instead."""
    settle, queries = WindowState.accept, single_queries
    wrong: list[Tensor] = []

    def settled(self: WindowState, *args: Any) -> Any:
        assert self._tensors is not None
        before, checked = self._tensors.start, self._checked
        found = settle(self, *args)
        wrong[:] = [self._tensors.start - before <= checked]
        return found

    def laid_out(rows: RowsAt, *args: Any, **options: Any) -> tuple[Tensor, AttentionMetadata]:
        stored, metadata = queries(rows, *args, **options)
        if wrong and len(wrong[0]) == rows.count:
            metadata.slots.view(rows.count, -1)[:, 0].masked_fill_(wrong[0], 0)
        return stored, metadata

    patch.setattr(WindowState, "accept", settled)
    patch.setattr(state, "single_queries", laid_out)


def newest_token_penalised_twice(patch: Patch) -> None:
    """The token that a row got last is in the history of its penalties a second time."""
    places = WindowState.places

    def twice(self: WindowState, length: int) -> Places:
        found = places(self, length)
        number = torch.arange(found.history.shape[1]).expand_as(found.history)
        again = (number - (number >= found.lengths[:, :1]).long()).clamp(min=0)
        return dataclasses.replace(
            found, history=found.history.gather(1, again), lengths=found.lengths + 1, longest=found.longest + 1
        )

    patch.setattr(WindowState, "places", twice)


def repeated_random_number(patch: Patch) -> None:
    """Every place of a window draws with the number of its first one."""
    places = WindowState.places

    def repeated(self: WindowState, length: int) -> Places:
        found = places(self, length)
        return dataclasses.replace(found, generated=found.generated[:, :1].expand_as(found.generated))

    patch.setattr(WindowState, "places", repeated)


def stop_found_at_the_end(patch: Patch) -> None:
    """Whether a request has ended is looked at behind a window."""

    def tokens(self: Answers, sequence: Sequence, host: Any, first: int, count: int) -> Generation:
        generation = self._token(sequence, host, first)
        for index in range(first + 1, first + count):
            generation.append(self._token(sequence, host, index))
        return generation

    patch.setattr(Answers, "_tokens", tokens)


def keys_of_the_draft_model_off(patch: Patch) -> None:
    """A draft model's keys are written one position behind theirs."""
    queries = single_queries

    def off(rows: RowsAt, at: Tensor, inside: Tensor, first: int) -> tuple[Tensor, AttentionMetadata]:
        stored, metadata = queries(rows, at, inside, first)
        _, following = queries(rows, at + 1, inside & (at + 1 < rows.limit[:, None]), first + 1)
        return stored, dataclasses.replace(metadata, slots=following.slots)

    patch.setattr(draft_model, "single_queries", off)


def keys_of_the_layer_off(patch: Patch) -> None:
    """A drafting layer's keys of what was drawn are written one position behind theirs."""
    settle = LayerDrafts.apply

    def off(self: LayerDrafts, brought: Brought) -> None:
        slots = brought.attention.slots.view(brought.drawn.shape).roll(-1, 1)
        moved = dataclasses.replace(brought.attention, slots=slots.reshape(-1))
        settle(self, dataclasses.replace(brought, attention=moved))

    patch.setattr(LayerDrafts, "apply", off)


def test_without_a_fault_nothing_else_is_said(plain: dict[int, Said], drafted: Callable[[str], Run]) -> None:
    found = drafted(RIGHT)
    assert found.said == plain
    assert found.right > NEW and len(found.drafts) > 10  # right and wrong ones


@pytest.mark.parametrize(
    "fault",
    [wrong_draft_accepted, rejected_keys_kept, newest_token_penalised_twice, repeated_random_number,
     stop_found_at_the_end],
)  # fmt: skip
def test_a_planted_fault_changes_what_is_said(
    fault: Callable[[Patch], None], plain: dict[int, Said], drafted: Callable[[str], Run], monkeypatch: Patch
) -> None:
    fault(monkeypatch)
    assert drafted(RIGHT).said != plain


def test_keys_of_a_draft_model_at_wrong_positions_cost_drafts_alone(
    plain: dict[int, Said], drafted: Callable[[str], Run], monkeypatch: Patch
) -> None:
    right = drafted(RIGHT).right
    keys_of_the_draft_model_off(monkeypatch)
    found = drafted(RIGHT)
    assert found.said == plain and found.right < right


def test_keys_of_a_drafting_layer_at_wrong_positions_change_drafts_alone(
    plain: dict[int, Said], drafted: Callable[[str], Run], monkeypatch: Patch
) -> None:
    before = drafted("eagle")
    keys_of_the_layer_off(monkeypatch)
    found = drafted("eagle")
    assert found.said == before.said == plain
    both = before.drafts.keys() & found.drafts.keys()
    assert len(both) > 10 and any(before.drafts[ids] != found.drafts[ids] for ids in both)
