"""A model's formats of calls and reasoning, by option or template."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from router.answers.formats import reasoning, table
from router.answers.formats.format import SPACE, Format, IdKind
from router.answers.formats.grammar import (
    Thinking,
    answer_behind,
    calls_or_answer,
    forced_calls,
    free_calls,
    has_rules,
    limited_thinking,
)
from router.answers.formats.markers import Markers
from router.answers.formats.probe import calls_in_an_answer
from router.answers.formats.reader import AnswerReader
from router.answers.formats.reasoning import ReasoningStyle
from router.answers.formats.schema_types import ArgumentTypes
from router.errors import GrammarError, StartupError, ValidationError
from router.grammar.checker import AskedGrammar, read_grammar
from router.template.template import ChatTemplate
from wire.text.chat_options import AUTO, NONE, REASONING_PARSERS, TGI, TOOL_CALL_PARSERS, unknown_name

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ModelFormat:
    """What is read in answers; `format` None: TGI's form."""

    format: Format | None = None
    style: ReasoningStyle | None = None
    markers: Markers = field(default_factory=lambda: Markers((), {}))

    @property
    def tool_call_parser(self) -> str:
        return self.format.name if self.format else TGI

    @property
    def reasoning_parser(self) -> str:
        if self.format is not None and self.format.turn is not None:
            return self.format.name
        return self.style.name if self.style else NONE

    @property
    def has_one_call(self) -> bool:
        """Whether the template takes one call at most."""
        return self.format is not None and self.format.is_one

    @property
    def ids(self) -> IdKind:
        return self.format.ids if self.format else IdKind.RANDOM

    @property
    def describes(self) -> bool:
        """Whether the template needs descriptions."""
        return self.format is not None and self.format.describes

    def can_force(self, schemas: Mapping[str, Any]) -> bool:
        """Whether a grammar can force calls in the model's format."""
        return self.format is not None and has_rules(self.format, self.markers, schemas)

    @property
    def has_json_arguments(self) -> bool:
        """Whether arguments are one JSON object."""
        return self.format is not None and self.format.form is not None and self.format.form.arguments is None

    @property
    def takes_forms(self) -> bool:
        """Whether grammars tell calls from JSON answers."""
        if self.format is None or (form := self.format.form) is None:
            return False
        return (form.begin + form.before_name).lstrip(SPACE)[:1] not in ("", "{", "[")

    def calls_or_answer(
        self, schemas: Mapping[str, Any], asked: AskedGrammar, prompt: str, *, is_one: bool, budget: int | None
    ) -> AskedGrammar:
        """Return a grammar of calls, or a formed answer, behind thinking."""
        assert self.format is not None
        read = read_grammar(asked)
        assert read is not None
        try:
            schema = orjson.loads(read[1])
        except orjson.JSONDecodeError:
            raise GrammarError("grammar is not valid: the schema is not JSON", param=asked.field) from None
        thinking = self._thinking(prompt, budget)
        text = calls_or_answer(
            self.format, self.markers, schemas, thinking, schema, is_one=is_one, answers=self._answers(thinking)
        )
        return AskedGrammar("lark", text, field=asked.field)

    def forced(self, schemas: Mapping[str, Any], prompt: str, *, is_one: bool, budget: int | None) -> AskedGrammar:
        """One call at least, behind the thinking."""
        assert self.format is not None
        text = forced_calls(self.format, self.markers, schemas, self._thinking(prompt, budget), is_one=is_one)
        return AskedGrammar("lark", text, field="tools")

    def free(self, schemas: Mapping[str, Any], *, is_one: bool, is_strict: bool) -> AskedGrammar | None:
        """Return a grammar of text and calls, if a token opens them; `is_strict` refuses uncompilable schemas."""
        assert self.format is not None
        text = free_calls(self.format, self.markers, schemas, is_one=is_one)
        return None if text is None else AskedGrammar("lark", text, is_optional=not is_strict, field="tools")

    def behind_thinking(self, asked: AskedGrammar, prompt: str, budget: int | None) -> AskedGrammar:
        """Return a grammar of the answer behind thinking."""
        thinking, read = self._thinking(prompt, budget), read_grammar(asked)
        answers = self._answers(thinking)
        if read is None or not thinking.opens or (thinking.is_over and not answers):
            return asked
        form: dict[str, Any] = {"text_grammar": asked.value}
        if read[0] == "regex":
            form = {"regex": read[1]}
        elif read[0] == "json":
            try:
                form = {"json_schema": orjson.loads(read[1])}
            except orjson.JSONDecodeError:
                return asked  # which says what is wrong with it
        return AskedGrammar("lark", answer_behind(thinking, self.markers, form, answers), field=asked.field)

    def _answers(self, thinking: Thinking) -> str:
        """What begins an answer in words, and is not shown."""
        if self.format is None or self.format.form is None or thinking.closes_answer or not thinking.opens:
            return ""
        return self.format.form.answers

    def may_think(self, prompt: str) -> bool:
        """Whether the answer may begin with reasoning."""
        thinking = self._thinking(prompt, None)
        return bool(thinking.opens) and not thinking.is_over

    def limited(
        self, schemas: Mapping[str, Any], prompt: str, *, is_one: bool, budget: int, field: str
    ) -> AskedGrammar:
        """Bound thinking to `budget` tokens, the client's `field`, if a token ends it."""
        thinking = replace(self._thinking(prompt, budget), space=False)  # anything may follow
        if not isinstance(self.markers.pieces(thinking.closes)[0], int):
            text = "a budget of reasoning tokens needs a model whose reasoning ends with a token of its own"
            raise ValidationError(text, param=field, reason="unsupported")
        text = limited_thinking(thinking, self.format, self.markers, schemas, is_one=is_one)
        return AskedGrammar("lark", text, field="tools")

    def _thinking(self, prompt: str, budget: int | None) -> Thinking:
        if self.format is not None and self.format.form is not None and self.format.turn is not None:
            opens, closes = self.format.form.thinks
            return Thinking(opens=opens, closes=closes, budget=budget)
        if self.style is None:
            return Thinking()
        is_answering = self.style.is_answering_in(prompt)
        is_over = is_answering or prompt.rstrip().endswith(self.style.closes)
        is_open = self.style.is_open_in(prompt)
        return Thinking(
            opens=self.style.opens,
            closes=self.style.closes,
            space=True,
            is_open=is_open,
            is_over=is_over,
            budget=budget,
            closes_answer=self.style.around_answer[1] if is_answering else "",
        )

    def reader(self, schemas: Mapping[str, Any] | None, prompt: str, *, begun: str = "") -> AnswerReader | None:
        """Return an answer's reader, unless only content.

        Args:
            schemas: Of callable functions; None: no calls.
            begun: See `ReasoningStyle.is_open_in`.
        """
        format = self.format
        if format is not None and format.turn is None and schemas is None:
            format = None
        if format is None and self.style is None:
            return None
        style = self.style
        is_open = style is not None and style.is_open_in(prompt, begun)
        return AnswerReader(
            format,
            style,
            self.markers,
            types=ArgumentTypes(schemas or {}),
            is_open=is_open,
            is_begun=style is not None and is_open and not style.ends_with_mark(prompt),
            is_answering=style is not None and style.is_answering_in(prompt),
        )


async def choose(
    template: ChatTemplate,
    added_tokens: Mapping[str, int],
    special_tokens: Collection[str] = (),
    *,
    tool_call_parser: str,
    reasoning_parser: str,
) -> ModelFormat:
    """Choose formats by option or template, with never shown `special_tokens`."""
    source = "\n".join(template.sources.values())
    format = _format(source, tool_call_parser)
    style = _style(source, reasoning_parser)
    marks = [*(format.marks if format else ()), *(style.marks if style else ())]
    markers = Markers(marks, added_tokens, special_tokens)
    if format is not None and source:
        format = await _proved(template, format, style, markers, is_given=tool_call_parser != AUTO)
    if format is not None and format.turn is not None and reasoning_parser != NONE:
        style = None  # the format reads reasoning itself
    chosen = ModelFormat(format=format, style=style, markers=markers)
    if source:
        logger.info("tool calls are read as %s, reasoning as %s", chosen.tool_call_parser, chosen.reasoning_parser)
    return chosen


def _format(source: str, asked: str) -> Format | None:
    if asked == AUTO:
        return table.format_in(source)
    if asked == TGI:
        return None
    format = table.named(asked, source)
    if format is None:
        raise unknown_name("--tool-call-parser", asked, TOOL_CALL_PARSERS, StartupError)
    return format


def _style(source: str, asked: str) -> ReasoningStyle | None:
    if asked == AUTO:
        return reasoning.style_in(source)
    if asked == NONE or any(
        asked in (row.name, *row.aliases) for row in table.FORMATS.values() if row.turn is not None
    ):
        return None
    style = reasoning.named(asked)
    if style is None:
        raise unknown_name("--reasoning-parser", asked, REASONING_PARSERS, StartupError)
    return style


async def _proved(
    template: ChatTemplate, format: Format, style: ReasoningStyle | None, markers: Markers, *, is_given: bool
) -> Format | None:
    count = await calls_in_an_answer(template, format, style, markers)
    if count == 0 and not any("tool_calls" in source for source in template.sources.values()):
        return format  # it tells the model how to call, and shows no earlier calls
    if count == 0:
        instead = "--tool-call-parser asks for it" if is_given else "calls are forced into TGI's form instead"
        logger.warning("the chat template does not write tool calls that are read as %s; %s", format.name, instead)
        return format if is_given else None
    return format if format.is_one or count > 1 else replace(format, is_one=True)
