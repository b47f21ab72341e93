"""Masks that follow a JSON schema or a regular expression: whatever the scores, the text fits."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.effort import examples
from support.tiny_models import write_tokenizer
from tokenizers import Tokenizer as Backend

import wire.demo_model
from model_server.errors import RequestError
from model_server.sampling.grammars.cache import GrammarCache
from model_server.sampling.grammars.masks import GrammarMasks, Grammars, GrammarState
from model_server.sampling.parameters import Grammar, SamplingParameters
from model_server.sampling.row import SamplingRow
from model_server.sampling.sampler import Sampler
from model_server.text.tokenizer import Tokenizer

CPU = torch.device("cpu")
PADDING = 37  # logits that no token has

SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "kind": {"enum": ["cat", "dog", None, 3.5, True]},
        },
        "required": ["name", "age", "kind"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 99}, "minItems": 2, "maxItems": 5},
    {"type": "string", "minLength": 3, "maxLength": 12},
    {"type": "object", "properties": {"d": {"type": "string", "format": "date"}, "u": {"type": "string"}},
     "required": ["d"], "additionalProperties": False},
    {"anyOf": [{"type": "boolean"}, {"type": "null"}, {"const": {"a": [1, 2]}}]},
    {
        "$defs": {"node": {"type": "object", "properties": {"v": {"enum": [0, 1]}, "next": {"$ref": "#/$defs/node"}},
                           "required": ["v"], "additionalProperties": False}},
        "$ref": "#/$defs/node",
    },
    {"allOf": [{"properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["a"]},
               {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"],
                "additionalProperties": {"enum": [1]}}], "maxProperties": 3},
]  # fmt: skip
PATTERNS = [
    r"[0-9]{3}-[A-F]{2}",
    r"^[0-9]{1,4}$",
    r"(yes|no|maybe)( please)?",
    r"([a-z]{1,5} ){1,4}\.",
    r"[äöü日本🙂]{1,6}",
    r'\{[ ]?"a"[ ]?:[ ]?(0|[1-9][0-9]{0,3})[ ]?\}',
]
DRAWS = [
    SamplingParameters(),
    SamplingParameters(do_sample=True, temperature=3.0),
    SamplingParameters(do_sample=True, top_k=3),
    SamplingParameters(do_sample=True, top_p=0.3),
    SamplingParameters(do_sample=True, typical_p=0.5),
    SamplingParameters(do_sample=True, min_p=0.2, repetition_penalty=1.5, presence_penalty=1.0),
    SamplingParameters(top_k=600, logit_bias=((5, 100.0), (9, -100.0))),
]


# Beyond these a JSON number may be read as a float, which is another integer.
EXACT_INTEGERS = st.integers(-(2**53), 2**53)
FORMATS = jsonschema.FormatChecker(formats=["date", "ipv4", "uuid"])


@FORMATS.checks("date", raises=ValueError)
def _is_date(value: object) -> bool:
    """RFC 3339's, which knows the year 0000 where Python's dates begin a year later."""
    return not isinstance(value, str) or bool(datetime.date.fromisoformat(re.sub("^0000", "2000", value)))


def any_draw() -> st.SearchStrategy[SamplingParameters]:
    """Parameters of every kind, also such as fight the grammar."""
    penalties = st.sampled_from([0.0, -2.0, 2.0])
    return st.builds(
        SamplingParameters,
        do_sample=st.booleans(),
        temperature=st.sampled_from([0.01, 0.7, 1.0, 2.0, 100.0]),
        top_k=st.sampled_from([0, 1, 3, 600]),
        top_p=st.sampled_from([1.0, 0.01, 0.5]),
        typical_p=st.sampled_from([1.0, 0.01, 0.9]),
        min_p=st.sampled_from([0.0, 0.5, 1.0]),
        repetition_penalty=st.sampled_from([1.0, 0.5, 3.0]),
        frequency_penalty=penalties,
        presence_penalty=penalties,
        absolute_frequency_penalty=penalties,
        logit_bias=st.lists(st.tuples(st.integers(0, 500), st.sampled_from([-100.0, 100.0])), max_size=20).map(tuple),
        watermark=st.booleans(),
    )


def any_schema() -> st.SearchStrategy[Any]:
    """Schemas with keywords that can be enforced, and that some value satisfies."""
    sizes = st.tuples(st.integers(0, 3), st.integers(0, 3)).map(lambda pair: (pair[0], sum(pair)))
    keys = st.text(st.sampled_from('ab_ -"\\\n/é日🙂$'), min_size=1, max_size=4)
    leaves = st.one_of(
        st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["integer", "null"]}]),
        st.tuples(st.integers(-50, 50), st.integers(0, 50)).map(
            lambda pair: {"type": "integer", "minimum": pair[0], "maximum": sum(pair)}
        ),
        st.sampled_from([{"type": "number", "exclusiveMinimum": 0, "maximum": 1}, {"type": "string", "maxLength": 0}]),
        sizes.map(lambda pair: {"type": "string", "minLength": pair[0], "maxLength": pair[1]}),
        st.sampled_from([{"type": "string", "format": name} for name in ("date", "ipv4", "uuid")]),
        st.sampled_from([{"type": "string", "pattern": text} for text in ("^[A-Z][0-9]?$", "^(x|yy)$")]),
        st.lists(
            st.one_of(keys, EXACT_INTEGERS, st.none(), st.integers(-99, 99).map(lambda n: n / 8)),
            min_size=1,
            max_size=4,
        ).map(lambda values: {"enum": values}),
        keys.map(lambda value: {"const": {value: [value, 1]}}),
    )

    def of_others(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        objects = st.dictionaries(keys, inner, min_size=1, max_size=3)
        return st.one_of(
            st.tuples(inner, sizes).map(
                lambda pair: {"type": "array", "items": pair[0], "minItems": pair[1][0], "maxItems": pair[1][1]}
            ),
            st.lists(inner, min_size=1, max_size=3).map(lambda schemas: {"anyOf": schemas}),
            st.tuples(objects, st.integers(0, 3), st.booleans()).map(
                lambda made: {
                    "type": "object", "properties": made[0], "required": list(made[0])[: made[1]],
                    **({"additionalProperties": False} if made[2] else {}),
                }
            ),
        )  # fmt: skip

    return st.recursive(leaves, of_others, max_leaves=5)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 3]}')
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer.load(Path(wire.demo_model.__file__).parent)


@pytest.fixture(scope="module", params=["tiny", "demo"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    return found


class Rows:
    """Some requests that are sampled together, on random scores that depend on the request alone."""

    def __init__(self, tokenizer: Tokenizer, asked: Sequence[tuple[int, SamplingParameters]]) -> None:
        self.width = tokenizer.vocab_size + PADDING
        self.tokenizer = tokenizer
        self.sampler = Sampler(self.width, CPU)
        self.grammars = Grammars(tokenizer, self.width)
        self.generators = [torch.Generator().manual_seed(seed) for seed, _ in asked]
        self.rows = [self._row(parameters) for _, parameters in asked]
        self.ids: list[list[int]] = [[] for _ in asked]

    def _row(self, parameters: SamplingParameters) -> SamplingRow:
        state = None if parameters.grammar is None else self.grammars.start(parameters.grammar)
        return self.sampler.new_row(parameters, [0, 5], 200, 3, grammar=state)

    def run(self, most: int = 200) -> list[list[int]]:
        """Until each has drawn an end token or `most` tokens."""
        alive = list(range(len(self.rows)))
        while alive:
            logits = torch.stack([torch.randn(self.width, generator=self.generators[i]) * 4 for i in alive])
            host = self.sampler.sample(logits, [self.rows[i] for i in alive]).to_host()
            assert not any(host.failed)
            going = []
            for i, token_id, logprob, top in zip(alive, host.ids, host.logprobs, host.top, strict=True):
                assert logprob <= 1e-6 and all(math.isfinite(value) for _, value in top), (logprob, top)
                state = self.rows[i].grammar
                if state is not None:
                    assert token_id < self.tokenizer.vocab_size
                if token_id in self.tokenizer.eos_token_ids or len(self.ids[i]) >= most:
                    continue
                if state is not None:
                    state.advance(token_id)
                self.ids[i].append(token_id)
                going.append(i)
            alive = going
        return self.ids

    def texts(self) -> list[str]:
        return [self.tokenizer.decode(ids, skip_special_tokens=False) for ids in self.run()]


def _asked(kind: Any, text: str) -> list[tuple[int, SamplingParameters]]:
    grammar = Grammar(kind, text)
    return [
        (seed, _with(parameters, grammar, seed)) for seed, parameters in enumerate([*DRAWS, *DRAWS])
    ]  # fmt: skip


def _with(parameters: SamplingParameters, grammar: Grammar | None, seed: int = 0) -> SamplingParameters:

    return dataclasses.replace(parameters, grammar=grammar, seed=seed)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_answers_validate(tokenizer: Tokenizer, schema: dict[str, Any]) -> None:
    rows = Rows(tokenizer, _asked("json", json.dumps(schema)))
    complete = 0
    for text, ids in zip(rows.texts(), rows.ids, strict=True):
        if len(ids) < 200:
            complete += 1
            value = json.loads(text)
            jsonschema.validate(value, schema, format_checker=FORMATS)
            assert not re.search(r"[\t\n\r]", text) and text == text.strip()
            if isinstance(value, dict) and "properties" in schema:
                named = [key for key in schema["properties"] if key in value]
                assert list(value) == named, "properties come in the order of the schema, no others"
    assert complete >= 10


@pytest.mark.parametrize("pattern", PATTERNS)
def test_answers_match(tokenizer: Tokenizer, pattern: str) -> None:
    for text in Rows(tokenizer, _asked("regex", pattern)).texts():
        assert re.fullmatch(pattern, text), text


@settings(max_examples=examples(5, 100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(any_schema(), any_draw()), min_size=1, max_size=6), st.integers(0, 2**32))
def test_every_answer_is_valid_whatever_the_sampling_parameters_are(
    demo: Tokenizer, asked: list[tuple[Any, SamplingParameters]], seed: int
) -> None:
    grammars = [Grammar("json", json.dumps(schema)) for schema, _ in asked]
    rows = Rows(demo, [(seed + i, _with(draw, grammars[i], seed + i)) for i, (_, draw) in enumerate(asked)])
    for (schema, _), text, ids in zip(asked, rows.texts(), rows.ids, strict=True):
        if len(ids) < 200:  # not cut by the length limit
            jsonschema.validate(json.loads(text), schema, format_checker=FORMATS)


def test_neighbours_keep_their_tokens(tiny: Tokenizer) -> None:
    grammars = [None, Grammar("regex", PATTERNS[0]), None, Grammar("json", json.dumps(SCHEMAS[0])), None]
    for parameters in DRAWS:
        asked = [(i, _with(parameters, grammar, i)) for i, grammar in enumerate(grammars)]
        together = Rows(tiny, asked).run(40)
        assert together == [Rows(tiny, [one]).run(40)[0] for one in asked]


def test_the_end_is_allowed_when_the_text_is_complete_and_then_alone(tiny: Tokenizer) -> None:
    state = Grammars(tiny, tiny.vocab_size).start(Grammar("regex", "aa?"))
    (a,) = tiny.encode("a", truncate=0, add_special_tokens=False)
    assert not _allowed(state, tiny.vocab_size) & {1, 3}
    state.advance(a)
    assert {a, 1, 3} <= _allowed(state, tiny.vocab_size)
    state.advance(a)
    assert _allowed(state, tiny.vocab_size) == {1, 3}
    assert not state.is_over
    state.advance(3)
    assert state.is_over


def _allowed(state: GrammarState, vocab_size: int) -> set[int]:

    logits = torch.zeros(3, vocab_size)
    GrammarMasks(torch.tensor([2]), [state], CPU).apply(logits)
    GrammarMasks(slice(0, 1), [state], CPU).apply(logits)
    assert torch.equal(logits[0], logits[2]) and not logits[1].any()
    return set((logits[0] == 0).nonzero().flatten().tolist())


def test_a_model_without_an_end_token_stops_with_the_grammar(tiny: Tokenizer) -> None:
    endless = Tokenizer(Backend.from_str(tiny.to_json()))
    state = Grammars(endless, endless.vocab_size + 3).start(Grammar("regex", "aa"))
    (a,) = tiny.encode("a", truncate=0, add_special_tokens=False)
    state.advance(a)
    assert not state.is_over and _allowed(state, endless.vocab_size + 3) == {a}
    state.advance(a)
    assert state.is_over and not _allowed(state, endless.vocab_size + 3)


def test_a_failed_automaton_takes_its_own_row_only(tiny: Tokenizer) -> None:
    grammar = Grammar("regex", "[0-9]+")
    rows = Rows(tiny, [(i, SamplingParameters(grammar=grammar)) for i in range(3)])
    broken = rows.rows[1].grammar
    assert broken is not None
    with pytest.raises(RequestError, match=r"^the grammar failed: a token does not fit it$"):
        broken.advance(tiny.encode("x", truncate=0, add_special_tokens=False)[0])
    host = rows.sampler.sample(torch.randn(3, rows.width), rows.rows).to_host()
    assert host.failed == [False, True, False]
    assert broken.error is not None and rows.rows[0].grammar is not None and rows.rows[0].grammar.error is None


@pytest.mark.parametrize(
    "grammar",
    [Grammar("regex", "("), Grammar("regex", "a(?=b)"), Grammar("json", "no"), Grammar("json", '{"type": "objekt"}')],
)
def test_what_cannot_be_compiled_is_a_request_error(tiny: Tokenizer, grammar: Grammar) -> None:
    with pytest.raises(RequestError, match="grammar is not valid"):
        Grammars(tiny, tiny.vocab_size).start(grammar)


def test_compiled_grammars_are_shared_and_bounded(tiny: Tokenizer) -> None:
    grammars = Grammars(tiny, tiny.vocab_size)
    first = grammars.compiled(Grammar("regex", "a"))
    assert grammars.compiled(Grammar("regex", "a")) is first
    for number in range(40):
        grammars.compiled(Grammar("regex", f"b{number}"))
    assert len(grammars.cache) == 32
    assert grammars.compiled(Grammar("regex", "a")) is not first


def test_what_lexers_take_while_they_are_used_counts(demo: Tokenizer) -> None:
    grammars = Grammars(demo, demo.vocab_size)
    grammars.cache = GrammarCache(1 << 20)
    wide = Grammar("regex", ".*(a.{20}|b.{19}|c.{18}).*")  # each position has states of its own
    states = [grammars.start(wide) for _ in range(2)]
    before = grammars.cache.num_bytes
    source = torch.Generator().manual_seed(0)
    for _ in range(200):
        logits = torch.rand(2, demo.vocab_size, generator=source)
        GrammarMasks(slice(0, 2), states, CPU).apply(logits)
        for state, row in zip(states, logits, strict=True):
            state.advance(int(row.argmax()))
        if not len(grammars.cache):
            break
        assert grammars.cache.num_bytes >= before
    assert not len(grammars.cache), "more than its megabyte"
    grammars.start(wide)
    assert len(grammars.cache) == 1 and grammars.cache.num_bytes < 1 << 20, "compiled anew"


def test_a_lexer_full_of_earlier_requests_states_fails_no_later_one(demo: Tokenizer) -> None:
    grammars = Grammars(demo, demo.vocab_size)
    wide = Grammar("regex", ".*(a.{50}|b.{49}|c.{48}).*")
    source = torch.Generator().manual_seed(0)

    def failed() -> bool:
        state = grammars.start(wide)
        for _ in range(120):
            logits = torch.rand(1, demo.vocab_size, generator=source)
            GrammarMasks(slice(0, 1), [state], CPU).apply(logits)
            if state.error is not None:
                return True
            state.advance(int(logits.argmax()))
        return False

    requests = 0
    while not failed():
        requests += 1
    assert requests > 1, "alone each has room"
    assert not failed() and not failed()


def test_explosive_grammars_end_in_a_bounded_error(tiny: Tokenizer) -> None:
    grammars = Grammars(tiny, tiny.vocab_size)
    (a,) = tiny.encode("a", truncate=0, add_special_tokens=False)
    state = grammars.start(Grammar("regex", "a{4294967295}"))
    with pytest.raises(RequestError, match=r"^the grammar failed: it grows too large; name fewer alternatives, or"):
        for _ in range(5):
            _allowed(state, tiny.vocab_size)
            state.advance(a)


def test_no_model_library_is_loaded_for_it() -> None:

    code = "import sys, model_server.sampling.sampler; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("rows", [slice(1, 3), torch.tensor([0, 3])])
def test_masks_on_the_host_and_on_a_device_are_the_same(tiny: Tokenizer, rows: Any) -> None:
    grammars = Grammars(tiny, tiny.vocab_size)
    states = [grammars.start(Grammar("regex", pattern)) for pattern in ("[0-9]{3}", "(yes|no)")]
    masks = GrammarMasks(rows, states, CPU)
    width = 509  # neither whole words nor whole bytes
    logits = torch.randn(4, width, generator=torch.Generator().manual_seed(0))
    logits[:, 7] = torch.inf
    expected = logits.clone()
    masks.apply(logits)
    blocked = masks._blocked(masks._allowed(), expected)
    expected[rows] = expected[rows].masked_fill(blocked, -torch.inf)
    assert torch.equal(logits, expected)
    others = [row for row in range(4) if row not in torch.arange(4)[rows].tolist()]
    assert logits[others].isfinite().sum() == len(others) * (width - 1)


def test_a_score_that_is_no_number_is_not_masked_away(tiny: Tokenizer) -> None:
    masks = GrammarMasks(slice(0, 1), [Grammars(tiny, tiny.vocab_size).start(Grammar("regex", "[0-9]{3}"))], CPU)
    logits = torch.zeros(1, 512)
    logits[0, 5] = torch.nan
    masks.apply(logits)
    assert logits[0, 5].isnan(), "the sampler fails the row"


def test_forced_tokens_do_not_depend_on_how_the_last_prompt_was_cut(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    found = []
    for limit in (0, 2):
        tokenizer = Tokenizer.load(tmp_path)
        tokenizer.encode("one two three four", truncate=limit, add_special_tokens=True)
        state = Grammars(tokenizer, tokenizer.vocab_size).start(Grammar("regex", "the occupation of a programmer!"))
        found.append(state.forced())
    assert found[0] == found[1]
    assert "the occupation of a programmer!".startswith(tokenizer.decode(found[0], skip_special_tokens=False))
