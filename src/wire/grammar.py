"""How a grammar becomes an automaton, alike for router and shard."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

GrammarKind = Literal["json", "regex", "lark"]

END = "$END"
"""Stands for the ids of the end-of-sequence tokens in the first of the grammars of a `lark` grammar, which only the
shard knows."""

_ESCAPES = 'nrbtf\\"'
"""Behind a backslash in a string. Not `u`: a key written so would count as one that the schema does not name, and every
character but those without a picture can be written as itself."""
OF_CALLS = {
    "whitespace_pattern": r"[ \n\t]{0,20}",
    "lenient": False,
    "coerce_one_of": False,
    "json_allowed_escapes": _ESCAPES,
}
"""What `x-guidance` says in the schemas of a `lark` grammar: models write their own calls with the blanks and line ends
that they have learnt."""

# At most one blank between the tokens of a JSON text, as in TGI: a model that likes white space cannot run away with
# it. Keywords that cannot be enforced are errors, never ignored. A schema's own `x-guidance` does not change this.
_WHITESPACE = " ?"


_LARGE_CHARACTERS = 4 * 1024

_TRIGGER = re.compile(r'\{"trigger": ?')


@dataclass(frozen=True)
class TextTrigger:
    """Texts that begin what a `lark` grammar holds: `{"texts": [...], "behind": [...]}`."""

    texts: tuple[str, ...]
    # What may precede, besides white space; None: anything. The grammar gets the tokens from the text's first on.
    behind: tuple[str, ...] | None = None


def trigger_of(kind: GrammarKind, text: str) -> int | TextTrigger | None:
    """The token or the texts before which a `lark` grammar allows anything, if its text begins with them."""
    found = _TRIGGER.match(text) if kind == "lark" else None
    if found is None:
        return None
    trigger, _ = json.JSONDecoder().raw_decode(text, found.end())
    if isinstance(trigger, int):
        return trigger
    behind = trigger.get("behind")
    return TextTrigger(tuple(trigger["texts"]), None if behind is None else tuple(behind))


def _limits() -> LLParserLimits:
    """Return a grammar's bounds: about 50 ms at its start, 10 ms for the lexer in a step, 100 MB."""
    # There is none on the time of a step: a row of the parser costs up to the cube of its items where a grammar is
    # ambiguous, and next to nothing where it is a list of a thousand members.
    return LLParserLimits(
        initial_lexer_fuel=100_000,
        step_lexer_fuel=100_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        max_items_in_row=2_000,
        step_max_items=20_000,
        verbose_errors=False,
    )


def may_be_expensive(kind: GrammarKind, text: str) -> bool:
    """Whether a mask may take long: the text is large, or a client's."""
    return len(text) > _LARGE_CHARACTERS or is_by_client(kind, text)


def is_by_client(kind: GrammarKind, text: str) -> bool:
    """Whether a part may be no JSON schema, and ambiguous."""
    return kind == "lark" and text.count('"lark_grammar"') > 1  # not parsed: it may have megabytes


def compile_grammar(kind: GrammarKind, text: str, tokenizer: LLTokenizer, end_ids: Iterable[int]) -> LLMatcher:
    """Return the automaton, with faults in `get_error()`; `end_ids` are a `lark` grammar's END."""
    if kind == "lark":
        frame, *others = json.loads(text)["grammars"]
        frame["lark_grammar"] = frame["lark_grammar"].replace(END, ",".join(map(str, end_ids)))
        grammar = json.dumps({"grammars": [frame, *others]})
    elif kind == "regex":
        grammar = LLMatcher.grammar_from_regex(text)
    else:
        grammar = LLMatcher.grammar_from_json_schema(
            text,
            overrides={
                "whitespace_pattern": _WHITESPACE,
                "item_separator": ",",
                "key_separator": ":",
                "lenient": False,
                "coerce_one_of": False,
                "json_allowed_escapes": _ESCAPES,
            },
        )
    return LLMatcher(tokenizer, grammar, log_level=0, limits=_limits())
