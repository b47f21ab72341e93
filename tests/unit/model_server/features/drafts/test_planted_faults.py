"""Faults of a window that the comparison with a plain run must find: were it blind to one, it would prove nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.drafts import use_drafts
from support.engine_shard import EngineShard, generations_of, mixed_requests

from model_server.batch.sequence import Sequence
from model_server.features.drafts.pace import Pace
from model_server.features.drafts.speculator import Draft, Speculator
from model_server.features.drafts.window import Window
from model_server.sampling.grammars.masks import GrammarState
from model_server.sampling.groups import RowGroups
from model_server.sampling.penalties import Penalties
from model_server.text.tokenizer import Tokenizer

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


class KnowingSpeculator(Speculator):
    """Drafts what the plain run said, every fifth token of it wrong."""

    def __init__(self, said: dict[int, list[int]]) -> None:
        super().__init__(4)
        self._said = said
        self.pace = Pace([(1, 1.0)])

    def _draft(self, sequence: Sequence, drafting: Any) -> Draft:
        done = sequence.num_sampled
        ids = self._said[sequence.id][done : done + self.longest(sequence)]
        ids = [(one + 1) % 60 if (done + place) % 5 == 4 else one for place, one in enumerate(ids)]
        return Draft(ids if sequence.row.grammar is None else sequence.row.grammar.possible(ids))


def said_by(shard: EngineShard, tokenizer: Tokenizer) -> dict[int, list[int]]:
    """The tokens of requests of all kinds. Each kind of request is an id, the same in every shard."""
    found = generations_of(*shard.run_out(shard.prefill(0, *mixed_requests(shard, tokenizer)), 0))
    return {key: [i for g in rows if g.tokens is not None for i in g.tokens.ids] for key, rows in found.items()}


@pytest.fixture(scope="module")
def plain(tiny_tokenizer: Tokenizer) -> dict[int, list[int]]:
    with torch.inference_mode():
        return said_by(EngineShard(tiny_tokenizer, budget=1000), tiny_tokenizer)


def drafted(tokenizer: Tokenizer, plain: dict[int, list[int]]) -> dict[int, list[int]]:
    shard = EngineShard(tokenizer, budget=1000)
    use_drafts(shard.engine, KnowingSpeculator(plain))
    return said_by(shard, tokenizer)


def shared_history(patch: Patch) -> None:
    """Tokens of a window do not reach the penalties of its later places."""
    patch.setattr(Penalties, "append", lambda self, ids: None)


def repeated_random_number(patch: Patch) -> None:
    """Every place of a window draws with the number of its first one."""
    following = RowGroups.next_uniforms
    checked = Window.check
    first: dict[int, Any] = {}

    def next_uniforms(self: RowGroups) -> Any:
        found = following(self)
        return first.setdefault(id(self), found)

    def check(self: Window, *args: Any) -> Any:
        first.clear()
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(RowGroups, "next_uniforms", next_uniforms)
            return checked(self, *args)

    patch.setattr(Window, "check", check)


def one_too_many(patch: Patch) -> None:
    """A wrong guess does not end the draft."""

    def goes_on(self: Window, row: int, place: int, chosen: Any, consumed: list[int]) -> bool:
        grammar = self.rows[row].row.grammar
        return place < len(self.drafts[row]) and grammar is None

    patch.setattr(Window, "_goes_on", goes_on)


def not_cut(patch: Patch) -> None:
    """A draft is as long as it pays, however many tokens the request may still have."""
    patch.setattr(Speculator, "longest", lambda self, sequence: self.most)


def grammar_not_given_back(patch: Patch) -> None:
    """What a window tried stays taken."""
    patch.setattr(GrammarState, "rewind", lambda self, num_tokens: None)


def same_slot(patch: Patch) -> None:
    """Every place of a window is written to the slot of the first."""
    laid_out = Window.inputs

    def inputs(self: Window, *args: Any) -> Any:
        found = laid_out(self, *args)
        found.attention.slots.copy_(found.attention.slots[:1].expand_as(found.attention.slots).clone())
        return found

    patch.setattr(Window, "inputs", inputs)


WRONG_TOKENS = (shared_history, repeated_random_number, one_too_many, grammar_not_given_back)
# The engine finds no slot, or reads keys that nobody wrote.
NOTICED = {not_cut: "Number of indices", same_slot: "NaN"}


def test_without_a_fault_the_tokens_are_those_of_the_plain_run(
    tiny_tokenizer: Tokenizer, plain: dict[int, list[int]]
) -> None:
    assert drafted(tiny_tokenizer, plain) == plain


@pytest.mark.parametrize("fault", WRONG_TOKENS)
def test_a_planted_fault_changes_the_tokens(
    fault: Callable[[Patch], None], tiny_tokenizer: Tokenizer, plain: dict[int, list[int]], monkeypatch: Patch
) -> None:
    fault(monkeypatch)
    assert drafted(tiny_tokenizer, plain) != plain


@pytest.mark.parametrize("fault", NOTICED)
def test_a_planted_fault_ends_the_step(
    fault: Callable[[Patch], None], tiny_tokenizer: Tokenizer, plain: dict[int, list[int]], monkeypatch: Patch
) -> None:
    fault(monkeypatch)
    with pytest.raises((IndexError, ValueError), match=NOTICED[fault]):
        drafted(tiny_tokenizer, plain)
