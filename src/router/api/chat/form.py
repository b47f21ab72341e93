"""In which form a chat is answered: words, reasoning, calls; what forces it, and what reads it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from router.answers.formats.choice import ModelFormat
from router.answers.formats.reader import AnswerReader
from router.api.chat.schema import ChatBody
from router.api.chat.tools import OfferedTools
from router.errors import ValidationError
from router.grammar.checker import AskedGrammar
from router.request import AnswerKind


@dataclass(frozen=True, kw_only=True)
class AnswerForm:
    """What the model's format makes of a body's tools, constraint and budget of reasoning."""

    format: ModelFormat
    body: ChatBody
    # None: it offers none.
    tools: OfferedTools | None
    # The server compiles grammars.
    has_grammars: bool

    @cached_property
    def is_native(self) -> bool:
        """Whether calls have the model's format: free, or forced by grammar."""
        tools, constraint = self.tools, self.body.constraint
        if self.format.format is None or tools is None:
            return False
        can_force = self.has_grammars and self.format.can_force(tools.enforced)
        if not tools.or_none:
            return can_force  # and the constraint is of answers in words
        if constraint is None:
            return True
        # One grammar for both, where it can tell them apart.
        return can_force and constraint.type not in ("regex", "grammar") and self.format.takes_forms

    @property
    def has_two_passes(self) -> bool:
        """Whether the model first decides, in TGI's form, and else answers in words."""
        return self.tools is not None and self.tools.or_none and not self.is_native

    @property
    def has_one_call(self) -> bool:
        return self.format.has_one_call or not self.body.parallel_tool_calls

    def grammar(self, tools: OfferedTools | None, asked: AskedGrammar | None, prompt: str) -> AskedGrammar | None:
        """Return what holds the answer to its form.

        Args:
            tools: Of this pass.
            asked: TGI's grammar of calls, or the client's of its answer.
        """
        format, budget = self.format, self.body.thinking_budget
        if not self.has_grammars:
            if budget is not None and asked is None and format.may_think(prompt):
                text = "a budget of reasoning tokens needs grammars, which `--disable-grammar-support` switches off"
                raise ValidationError(text, param=self.body.budget_field, reason="unsupported")
            return asked
        schemas = tools.enforced if tools is not None and format.can_force(tools.enforced) else {}
        if asked is not None:
            return asked if tools is not None else format.behind_thinking(asked, prompt, budget)
        is_one = self.has_one_call
        if (form := self.body.constraint) is not None and tools is not None and tools.or_none:
            return format.calls_or_answer(schemas, form, prompt, is_one=is_one, budget=budget)
        if tools is not None and not tools.or_none:
            return format.forced(schemas, prompt, is_one=is_one, budget=budget)
        if budget is not None and format.may_think(prompt):
            field = self.body.budget_field
            return format.limited(schemas, prompt, is_one=is_one, budget=budget, field=field)
        if tools is None or not schemas:
            return None
        return format.free(schemas, is_one=is_one, is_strict=tools.is_strict)

    def kind(
        self, tools: OfferedTools | None, grammar: AskedGrammar | None, prompt: str, *, begun: str = ""
    ) -> AnswerKind:
        """Return how the answer to `prompt` is read."""
        if tools is not None and not self.is_native:
            return "call"
        is_all_under_grammar = tools is None and grammar is not None and grammar == self.body.constraint
        return "text" if is_all_under_grammar or self.reader(prompt, begun=begun) is None else "marked"

    def reader(self, prompt: str, *, begun: str = "") -> AnswerReader | None:
        """Return what reads an answer that is not TGI's call, if it may have marks.

        Args:
            begun: What the client has written of the answer.
        """
        schemas = self.tools.schemas if self.tools is not None and self.is_native else None
        return self.format.reader(schemas, prompt, begun=begun)
