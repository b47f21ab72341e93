"""What clears a conversation before the model reads it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from router.errors import FieldError
from router.schemas.base import Body, Items, UInt32
from router.schemas.parameters import PositiveInt


class Threshold(Body):
    """A number of tokens of the prompt, or of calls."""

    type: Literal["input_tokens", "tool_uses"] = Field(description="What is counted.", examples=["input_tokens"])
    value: UInt32 = Field(description="The number.", examples=[100_000])


class KeptCalls(Body):
    """Calls whose results stay."""

    type: Literal["tool_uses"] = Field(description="What is counted.", examples=["tool_uses"])
    value: UInt32 = Field(description="The last ones.", examples=[3])


class LeastCleared(Body):
    """Tokens that are worth it."""

    type: Literal["input_tokens"] = Field(description="What is counted.", examples=["input_tokens"])
    value: UInt32 = Field(description="If it saves fewer, nothing is cleared.", examples=[5000])


class ClearToolUses(Body):
    """Clears the results of earlier calls when the prompt is long; the calls stay."""

    type: Literal["clear_tool_uses_20250919"] = Field(
        description="The kind of edit.", examples=["clear_tool_uses_20250919"]
    )
    trigger: Threshold = Field(
        default=Threshold(type="input_tokens", value=100_000),
        description="Nothing is cleared up to it.",
        examples=[{"type": "input_tokens", "value": 30_000}],
    )
    keep: KeptCalls = Field(
        default=KeptCalls(type="tool_uses", value=3),
        description="The last calls keep their results.",
        examples=[{"type": "tool_uses", "value": 3}],
    )
    clear_at_least: LeastCleared | None = Field(
        default=None, description="Absent: any number.", examples=[{"type": "input_tokens", "value": 5000}]
    )
    exclude_tools: Items[str] = Field(
        default_factory=list, description="Tools whose results always stay.", examples=[["memory"]]
    )
    clear_tool_inputs: bool | list[str] | None = Field(
        default=False, description="Also clears the arguments, of all tools or of these.", examples=[True]
    )

    def clears_input_of(self, tool: str) -> bool:
        """Whether a tool's arguments are cleared, too."""
        cleared = self.clear_tool_inputs
        return tool in cleared if isinstance(cleared, list) else bool(cleared)


class KeptThinking(Body):
    """Turns that keep their thinking."""

    type: Literal["thinking_turns", "all"] = Field(description="What is counted.", examples=["thinking_turns"])
    value: PositiveInt | None = Field(default=None, description="The last ones.", examples=[1])

    @model_validator(mode="after")
    def _has_its_number(self) -> KeptThinking:
        if self.type == "thinking_turns" and self.value is None:
            raise FieldError("`thinking_turns` needs `value`", param="value", reason="missing_field")
        return self


class ClearThinking(Body):
    """Leaves out the thinking of earlier turns. What stays, the chat template may leave out, too."""

    type: Literal["clear_thinking_20251015"] = Field(
        description="The kind of edit.", examples=["clear_thinking_20251015"]
    )
    keep: KeptThinking | Literal["all"] = Field(
        default=KeptThinking(type="thinking_turns", value=1), description="Absent: the last turn's.", examples=["all"]
    )

    @property
    def kept_turns(self) -> int | None:
        """Turns that keep their thinking; None: all."""
        return None if isinstance(self.keep, str) else self.keep.value


class ContextManagement(Body):
    """Edits of the conversation before the model reads it. Compaction (`compact_20260112`) is refused."""

    edits: Items[Annotated[ClearToolUses | ClearThinking, Field(discriminator="type")]] = Field(
        default_factory=list,
        max_length=16,
        description="In their order.",
        examples=[[{"type": "clear_tool_uses_20250919"}]],
    )

    @field_validator("edits", mode="before")
    @classmethod
    def _are_served(cls, edits: Any) -> Any:
        for one in edits if isinstance(edits, list) else ():
            if isinstance(one, dict) and str(one.get("type")).startswith("compact_"):
                text = f"`{one['type']}` is not served: shorten the conversation in the client"
                raise FieldError(text, reason="unsupported")
        return edits
