"""What OpenAI bodies share, and refuse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field, model_validator

from router.errors import FieldError
from router.schemas.base import Body, Items, UInt32
from router.schemas.other_fields import Family
from router.schemas.parameters import (
    AskedPriority,
    Choices,
    CommonParameters,
    FrequencyPenalty,
    LogitBias,
    Model,
    OpenAISeed,
    OpenAIStop,
    OpenAITemperature,
    OpenAITopK,
    OpenAITopP,
    PresencePenalty,
    Stream,
)

T = TypeVar("T")

_PRIORITY_OF_TIER = {"flex": 1, "priority": -1}


def check_callers(allowed: list[str] | None) -> None:
    """Refuse a tool that only code may call."""
    if allowed is not None and "direct" not in allowed:
        text = "`allowed_callers` must hold `direct`: no code runs here that could call the tool"
        raise FieldError(text, param="allowed_callers", reason="unsupported")


class TextPart(Body, place="chat content"):
    """A text."""

    type: Literal["text"] = Field(description="The kind of part.", examples=["text"])
    text: str = Field(description="Parts are joined as they are.", examples=["Hello"])


class Prediction(Body):
    """What the answer will probably be: where it says that, several of its tokens come in one step."""

    type: Literal["content"] = Field(description="The kind of prediction.", examples=["content"])
    content: str | Items[TextPart] = Field(
        description="A text, or parts that are joined as they are.", examples=["def add(a, b):"]
    )

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class StreamOptions(Body, place="chat stream_options"):
    include_usage: bool = Field(
        default=False, description="End the stream with the numbers of tokens.", examples=[True]
    )
    continuous_usage_stats: bool = Field(
        default=False, description="Each chunk has the numbers of tokens so far.", examples=[True]
    )


class OpenAIParameters(CommonParameters):
    """What OpenAI's and Anthropic's routes have in common."""

    temperature: OpenAITemperature = None
    top_p: OpenAITopP = None
    top_k: OpenAITopK = None
    seed: OpenAISeed = None
    frequency_penalty: FrequencyPenalty = None
    presence_penalty: PresencePenalty = None
    logit_bias: LogitBias = None
    stop_token_ids: Items[UInt32] = Field(
        default_factory=list,
        description="Tokens that end the answer as an end-of-sequence token does, 64 at most; ids must be in the "
        "vocabulary.",
        examples=[[2]],
    )
    include_stop_str_in_output: bool = Field(
        default=False, description="Keep the stop text that ended the answer at its end.", examples=[True]
    )


class TieredParameters(OpenAIParameters):
    """What OpenAI's routes have in common, without Anthropic's."""

    service_tier: Literal["auto", "default", "flex", "priority"] | None = Field(
        default=None,
        description="`flex` is `priority` 1, `priority` is -1, the others are 0. The answer says which it has got.",
        examples=["auto"],
    )

    @property
    def asked_priority(self) -> AskedPriority:
        by_tier = _PRIORITY_OF_TIER.get(self.service_tier or "", 0)
        return AskedPriority(by_tier, "service_tier") if by_tier else super().asked_priority

    @model_validator(mode="after")
    def _has_one_priority(self) -> TieredParameters:
        if self.priority and self.service_tier in _PRIORITY_OF_TIER:
            text = f"`service_tier` {self.service_tier} and `priority` say the same: give one of them"
            raise FieldError(text, param="service_tier", reason="conflict")
        return self


class OpenAIBody(TieredParameters):
    """A body of an OpenAI route. Fields that change nothing (`user`, `store` and the like) are ignored."""

    family: ClassVar[Family | None] = "chat"

    model: Model = None
    stop: OpenAIStop = None
    n: Choices = None
    prediction: Prediction | None = Field(
        default=None,
        description="The probable answer, such as the file that is to be edited. It changes how fast the answer comes, "
        "never the answer. Needs a server with `--speculate`.",
        examples=[{"type": "content", "content": "def add(a, b):"}],
    )
    stream: Stream = False
    stream_options: StreamOptions = Field(
        default=StreamOptions(),
        description="What a stream reports in addition to the text.",
        examples=[{"include_usage": True}],
    )

    @model_validator(mode="after")
    def _has_what_its_options_need(self) -> OpenAIBody:
        options = self.stream_options
        if (options.include_usage or options.continuous_usage_stats) and not self.stream:
            raise FieldError("`stream_options` needs `stream`", param="stream_options", reason="conflict")
        return self


class ReasoningOptions(Body):
    """OpenRouter's options of reasoning."""

    effort: str | None = Field(default=None, description="As `reasoning_effort`.", examples=["low"])
    enabled: bool | None = Field(
        default=None, description="Sets the template's `enable_thinking` and `thinking`.", examples=[False]
    )
    max_tokens: UInt32 | None = Field(default=None, description="As `thinking_token_budget`.", examples=[200])
    exclude: bool = Field(default=False, description="Leave the reasoning out of the answer.", examples=[True])


_NO_OPTIONS = ReasoningOptions()


TemplateVariables = Annotated[
    dict[str, Any],
    Field(description="More variables for the chat template.", examples=[{"enable_thinking": False}]),
]
Budget = Annotated[int, Field(ge=-1, le=2**32 - 1)]
ThinkingBudget = Annotated[
    Budget | None,
    Field(
        description="Most tokens of reasoning before the answer begins; for models whose reasoning ends with a token. "
        "-1 or absent: no bound.",
        examples=[200],
    ),
]


class TemplateBody(OpenAIBody):
    """A body whose prompt a chat template makes, and whose answer may begin with reasoning."""

    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)
    add_generation_prompt: bool | None = Field(
        default=None,
        description="As in transformers. Absent: the answer begins after the messages, or continues the assistant's "
        "last one.",
        examples=[True],
    )
    continue_final_message: bool | None = Field(
        default=None, description="As in transformers: the answer continues the last message.", examples=[False]
    )
    documents: Items[dict[str, Any]] | None = Field(
        default=None,
        description="Objects with `title` and `text`, for chat templates that read `documents`; others refuse them.",
        examples=[[]],
    )
    reasoning_effort: str | None = Field(
        default=None,
        description="A variable of some chat templates. `none` also sets `enable_thinking` and `thinking` to false.",
        examples=["low"],
    )
    thinking_token_budget: ThinkingBudget = None
    thinking_budget_tokens: Budget | None = Field(
        default=None, description="As `thinking_token_budget`.", examples=[200]
    )
    reasoning: ReasoningOptions | None = Field(
        default=None, description="OpenRouter's name for these options.", examples=[{"effort": "low"}]
    )
    include_reasoning: bool = Field(
        default=True, description="`false`: leave the reasoning out of the answer.", examples=[False]
    )

    @property
    def hides_reasoning(self) -> bool:
        return not self.include_reasoning or self._options.exclude

    @property
    def _options(self) -> ReasoningOptions:
        return self.reasoning or _NO_OPTIONS

    @property
    def effort(self) -> str | None:
        """Return the reasoning effort, in whichever field."""
        return _one_of({"reasoning_effort": self.reasoning_effort, "reasoning.effort": self._options.effort})[1]

    @property
    def thinking_budget(self) -> int | None:
        """Return the most reasoning tokens, in whichever field."""
        budget = self._budget[1]
        return None if budget == -1 else budget

    @property
    def budget_field(self) -> str:
        """Return the field of `thinking_budget`."""
        return self._budget[0]

    @property
    def _budget(self) -> tuple[str, int | None]:
        asked = {name: getattr(self, name) for name in ("thinking_token_budget", "thinking_budget_tokens")}
        return _one_of({**asked, "reasoning.max_tokens": self._options.max_tokens})

    @model_validator(mode="after")
    def _has_one_ending(self) -> TemplateBody:
        if self.add_generation_prompt and self.continue_final_message:
            raise FieldError(
                "`add_generation_prompt` and `continue_final_message` exclude each other",
                param="continue_final_message",
                reason="conflict",
            )
        return self

    @model_validator(mode="after")
    def _says_things_once(self) -> TemplateBody:
        """Read what several fields may say, refusing two values."""
        _ = self.effort, self.thinking_budget
        return self


def _one_of(asked: Mapping[str, T | None]) -> tuple[str, T | None]:
    """Return the one value of several fields, and the first field that has it."""
    given = [(name, value) for name, value in asked.items() if value is not None]
    if not given:
        return "", None
    (first, chosen), *others = given
    for name, value in others:
        if value != chosen:
            text = f"`{first}` is given twice, with two values: the other one is in `{name}`"
            raise FieldError(text, param=first, reason="conflict")
    return first, chosen
