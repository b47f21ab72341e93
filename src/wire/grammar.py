"""How a grammar becomes an automaton. The router's check and the shard must compile alike, so both ask here."""

from __future__ import annotations

from typing import Literal

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

GrammarKind = Literal["json", "regex"]

# At most one blank between the tokens of a JSON text, as in TGI: a model that likes white space cannot run away with
# it. Keywords that cannot be enforced are errors, never ignored. A schema's own `x-guidance` does not change this.
_WHITESPACE = " ?"


def _limits() -> LLParserLimits:
    """Bounds of one grammar: about 50 ms for its start, about 10 ms for a step, 100 MB of automaton."""
    return LLParserLimits(
        initial_lexer_fuel=100_000,
        step_lexer_fuel=100_000,
        max_lexer_states=50_000,
        verbose_errors=False,
    )


def compile_grammar(kind: GrammarKind, text: str, tokenizer: LLTokenizer) -> LLMatcher:
    """The automaton at its start; whatever is wrong with the grammar is found in `get_error()`."""
    if kind == "regex":
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
            },
        )
    return LLMatcher(tokenizer, grammar, log_level=0, limits=_limits())
