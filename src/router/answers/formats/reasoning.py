"""Marks of reasoning, a row per style."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ReasoningStyle:
    name: str
    opens: str
    closes: str
    tokens: tuple[str, ...] = ()  # what of these may be a token of its own; empty: both
    around_answer: tuple[str, str] = ("", "")  # marks at the beginning and the end of the answer, which are left out
    inline: tuple[str, ...] = ()  # marks within the answer, up to the next `>`, which are left out
    may_come_again: bool = False  # behind text, too
    sign: str = ""  # what a template of this style has instead of its closing mark
    also: tuple[str, ...] = ()  # what a template of this style has besides its closing mark
    aliases: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(filter(None, (*(self.tokens or (self.opens, self.closes)), *self.around_answer, *self.inline)))

    def is_open_in(self, prompt: str, begun: str = "") -> bool:
        """Whether a prompt ends within the coming answer's reasoning; `begun`: the client's beginning of it."""
        # An opening mark in an earlier message is text; the one of the answer is followed by white space alone.
        return prompt.rfind(self.opens) > prompt.rfind(self.closes) and (
            self.ends_with_mark(prompt) or self.opens in begun
        )

    def is_answering_in(self, prompt: str) -> bool:
        """Whether a prompt ends with the mark that begins an answer."""
        begins = self.around_answer[0]
        return bool(begins) and prompt.rstrip().endswith(begins)

    def ends_with_mark(self, prompt: str) -> bool:
        """Whether only space follows the last opening mark."""
        return not prompt[prompt.rfind(self.opens) + len(self.opens) :].strip()

    def is_in(self, template: str) -> bool:
        # Some templates name only the closing mark, which they cut off earlier answers with.
        return all(mark in template for mark in (self.sign or self.closes, *self.also))


STYLES = (
    ReasoningStyle(name="seed", opens="<seed:think>", closes="</seed:think>", aliases=("seed_oss",)),
    ReasoningStyle(name="magistral", opens="[THINK]", closes="[/THINK]", aliases=("mistral",)),
    ReasoningStyle(
        name="cohere",
        opens="<|START_THINKING|>",
        closes="<|END_THINKING|>",
        around_answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        inline=("<co>", "</co:"),
        aliases=("cohere_command3", "cohere_command4"),
    ),
    ReasoningStyle(
        name="gemma4",
        opens="<|channel>thought\n",
        closes="<channel|>",
        tokens=("<|channel>", "<channel|>"),
        may_come_again=True,
    ),
    ReasoningStyle(name="apertus", opens="<|inner_prefix|>", closes="<|inner_suffix|>"),
    ReasoningStyle(name="solar_open2", opens="<|think:start|>", closes="<|think:end|>"),
    ReasoningStyle(
        name="plamo3",
        opens="<|plamo:begin_think:plamo|>",
        closes="<|plamo:end_think:plamo|>",
        tokens=("<|plamo:begin_", "<|plamo:end_", ":plamo|>"),
    ),
    ReasoningStyle(
        name="kimi_k3",
        opens="<|open|>think<|sep|>",
        closes="<|close|>think<|sep|>",
        tokens=("<|open|>", "<|close|>", "<|sep|>"),
        around_answer=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
        inline=("<|close|>message<|sep|>",),
        sign="<|close|>",  # templates put the name of a mark into it
        also=("<|sep|>", "think"),
    ),
    ReasoningStyle(name="minimax_m3", opens="<mm:think>", closes="</mm:think>"),
    ReasoningStyle(name="hy_v3", opens="<think:opensource>", closes="</think:opensource>"),
    ReasoningStyle(
        name="apriel",
        opens="Here are my reasoning steps:",
        closes="[BEGIN FINAL RESPONSE]",
        around_answer=("", "[END FINAL RESPONSE]"),
    ),
    ReasoningStyle(
        name="think_response",
        opens="<think>",
        closes="</think>",
        around_answer=("<response>", "</response>"),
        also=("<response>",),
        aliases=("ernie45", "granite33"),
    ),
    ReasoningStyle(
        name="think_answer",
        opens="<think>",
        closes="</think>",
        around_answer=("<answer>", "</answer>"),
        also=("<answer>",),
        aliases=("hunyuan_a13b",),
    ),
    ReasoningStyle(
        name="think",
        opens="<think>",
        closes="</think>",
        aliases=("deepseek_r1", "deepseek-r1", "deepseek_v3", "qwen3", "glm45", "kimi_k2", "step3"),
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
    """Return a style by its name, ours or another server's."""
    return next((style for style in STYLES if name in (style.name, *style.aliases)), None)


def style_in(template: str) -> ReasoningStyle | None:
    return next((style for style in STYLES if style.is_in(template)), None)
