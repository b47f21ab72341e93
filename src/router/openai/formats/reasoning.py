"""The marks between which models write their reasoning, one row for each style."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ReasoningStyle:
    """`opens` and `closes` are single tokens or texts."""

    name: str
    opens: str
    closes: str
    tokens: tuple[str, ...] = ()  # what of these may be a token of its own; empty: both
    around_answer: tuple[str, str] = ("", "")  # marks at the beginning and the end of the answer, which are left out
    inline: tuple[str, ...] = ()  # marks within the answer, up to the next `>`, which are left out
    may_come_again: bool = False  # behind text, too
    aliases: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(filter(None, (*(self.tokens or (self.opens, self.closes)), *self.around_answer, *self.inline)))

    def is_open_in(self, prompt: str) -> bool:
        """Whether a prompt ends inside of the reasoning of the answer that is to come."""
        return prompt.rfind(self.opens) > prompt.rfind(self.closes) and self._is_at_end(prompt)

    def _is_at_end(self, prompt: str) -> bool:
        # An opening mark in an earlier message is text; the one of the answer is followed by white space alone.
        return not prompt[prompt.rfind(self.opens) + len(self.opens) :].strip()


STYLES = (
    ReasoningStyle(name="seed", opens="<seed:think>", closes="</seed:think>", aliases=("seed_oss",)),
    ReasoningStyle(name="magistral", opens="[THINK]", closes="[/THINK]", aliases=("mistral",)),
    ReasoningStyle(
        name="cohere", opens="<|START_THINKING|>", closes="<|END_THINKING|>", aliases=("cohere_command3",)
    ),
    ReasoningStyle(
        name="gemma4", opens="<|channel>thought\n", closes="<channel|>", tokens=("<|channel>", "<channel|>")
    ),
    ReasoningStyle(
        name="think",
        opens="<think>",
        closes="</think>",
        aliases=("deepseek_r1", "deepseek-r1", "deepseek_v3", "qwen3", "glm45", "kimi_k2", "hunyuan_a13b", "step3"),
    ),
    ReasoningStyle(
        name="granite32",
        opens="Here is my thought process:",
        closes="Here is my response:",
        aliases=("granite",),
    ),
)  # fmt: skip
"""Most particular first: the first whose closing mark a template has is that template's."""


def named(name: str) -> ReasoningStyle | None:
    """The style of that name, or that another server knows under it."""
    return next((style for style in STYLES if name in (style.name, *style.aliases)), None)


def style_in(template: str) -> ReasoningStyle | None:
    """The style that a template is written for."""
    # Some templates name only the closing mark, which they cut off earlier answers with.
    return next((style for style in STYLES if style.closes in template), None)
