"""A grammar that allows anything until a token opens a call: it masks nothing before, and then holds the call."""

from __future__ import annotations

import json

import pytest
import torch
from support.tiny_models import write_tokenizer
from tokenizers import Tokenizer as Backend

from model_server.errors import RequestError
from model_server.sampling.grammars.cost import GivenUpError, GuardedThread
from model_server.sampling.grammars.masks import GrammarMasks, Grammars, GrammarState
from model_server.sampling.parameters import Grammar, SamplingParameters
from model_server.sampling.penalties import MinTokens
from model_server.sampling.row import SamplingRow
from model_server.text.tokenizer import Tokenizer
from wire.grammar import trigger_of

CPU = torch.device("cpu")
OPEN = "<tool_call>"


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Backend:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    tokenizer = Backend.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens([OPEN])
    return tokenizer


@pytest.fixture(scope="module")
def grammars(backend: Backend) -> Grammars:
    tokenizer = Tokenizer(Backend.from_str(backend.to_str()), eos_token_ids=frozenset({1}))
    return Grammars(tokenizer, backend.get_vocab_size())


@pytest.fixture
def state(grammars: Grammars, backend: Backend) -> GrammarState:
    opened = backend.token_to_id(OPEN)
    frame = f"start: any* call?\nany: <[^{opened}]>\ncall: <[{opened}]> @tool_0\n"
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    listed = [{"name": "frame", "lark_grammar": frame}, {"name": "tool_0", "json_schema": schema}]
    return grammars.start(Grammar("lark", json.dumps({"trigger": opened, "grammars": listed})))


def test_the_text_begins_with_the_trigger() -> None:
    assert (
        trigger_of("lark", '{"trigger": 7, "grammars": []}') == trigger_of("lark", '{"trigger":7,"grammars":[]}') == 7
    )
    assert trigger_of("lark", '{"grammars": [{"trigger": 7}]}') is None
    assert trigger_of("json", '{"trigger": 7, "type": "object"}') is None


def test_only_the_call_is_masked(state: GrammarState, backend: Backend) -> None:
    width = backend.get_vocab_size()
    masks = GrammarMasks(slice(1, 2), [state], CPU)

    def allowed() -> list[int]:
        logits = torch.zeros(2, width)
        masks.apply(logits)
        assert logits[0].isfinite().all()
        ids: list[int] = logits[1].isfinite().nonzero().flatten().tolist()
        return ids

    for token_id in (*backend.encode(' {"a": 2}', add_special_tokens=False).ids, 1):
        assert state.is_asleep and len(allowed()) == width
        state.advance(token_id)
    state.advance(backend.token_to_id(OPEN))
    assert not state.is_asleep
    assert {backend.id_to_token(one)[0] for one in allowed()} == {"{"}
    with pytest.raises(RequestError):
        state.advance(backend.token_to_id("x"))


def test_rows_beside_it_keep_their_masks(state: GrammarState, grammars: Grammars, backend: Backend) -> None:
    width = backend.get_vocab_size()
    digits = [grammars.start(Grammar("regex", "[0-9]{3}")) for _ in range(2)]
    for rows in (slice(0, 3), torch.tensor([0, 2, 3])):
        logits = torch.zeros(4, width)
        GrammarMasks(rows, [digits[0], state, digits[1]], CPU).apply(logits)
        places = list(range(3)) if isinstance(rows, slice) else rows.tolist()
        few = [int(logits[place].isfinite().sum()) for place in places]
        assert few[0] == few[2] < 200 and few[1] == width
        assert logits[3 if isinstance(rows, slice) else 1].isfinite().all()


def test_drafts_do_not_wake_it(state: GrammarState, backend: Backend) -> None:
    opened = backend.token_to_id(OPEN)
    assert state.forced() == [] and state.possible([5, 6]) == [5, 6] and state.possible([5, opened, 6]) == [5]
    assert state.try_next(5)
    state.rewind(1)
    assert state.is_asleep
    state.advance(opened)
    assert state.possible([5, 6]) == []


def test_an_answer_does_not_end_too_soon_while_it_sleeps(state: GrammarState, backend: Backend) -> None:
    row = SamplingRow(SamplingParameters(min_tokens=3), 4, 10, grammar=state, end_ids=frozenset({1}))
    floor = MinTokens([row], CPU)
    for is_asleep in (True, False):
        assert state.is_asleep is is_asleep
        logits = torch.zeros(1, backend.get_vocab_size())
        floor.apply(logits)
        assert logits[0, 1].isfinite().item() is not is_asleep
        if is_asleep:
            state.advance(backend.token_to_id(OPEN))


@pytest.mark.parametrize("is_own", [False, True])
def test_a_grammar_that_takes_too_much_fails_at_its_trigger(
    grammars: Grammars, backend: Backend, monkeypatch: pytest.MonkeyPatch, is_own: bool
) -> None:
    """Given up by another request with the grammar, or where the request itself asks whether the trigger fits."""
    trigger, *others = backend.encode('{"a": 2}', add_special_tokens=False).ids
    listed = [{"name": "frame", "lark_grammar": "start: @x"}, {"name": "x", "lark_grammar": f"start: /[^{is_own}]+/"}]
    text = json.dumps({"trigger": {"texts": [backend.decode([trigger])]}, "grammars": listed})
    first, sleeper = [grammars.start(Grammar("lark", text)) for _ in range(2)]

    def give_up(*_: object) -> None:
        raise GivenUpError

    with monkeypatch.context() as patch:
        patch.setattr(GuardedThread, "run", give_up)
        if not is_own:
            first.advance(trigger)
        sleeper.advance(others[0])
        assert sleeper.is_asleep and sleeper.error is None
        sleeper.advance(trigger)
    logits = torch.zeros(1, backend.get_vocab_size())
    GrammarMasks(slice(0, 1), [sleeper], CPU).apply(logits)
    assert not logits.isfinite().any()
    assert sleeper.error is not None and sleeper.error.startswith("the grammar takes too much time")
