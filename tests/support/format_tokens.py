"""Which marks of formats are tokens in the vocabularies of the models that write them, and which of those special."""

from __future__ import annotations

_SPECIAL = (
    "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>",
    "<|eom|>", "<|eot|>",
    "<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]",
    "<start_function_call>", "<end_function_call>", "<escape>",
    "<|tool_call|>", "<|/tool_call|>",
    "<|START_ACTION|>", "<|END_ACTION|>", "<|START_THINKING|>", "<|END_THINKING|>",
    "<|python_tag|>", "<|python_start|>", "<|python_end|>",
    "<seed:think>", "</seed:think>", "<|tool_call_start|>",
    "<|open|>", "<|close|>", "<|sep|>", "]<]minimax[>[",
    "<|tools_prefix|>", "<|tools_suffix|>", "<|function_call|>", "<|message_sep|>\n\n", "<|role_sep|>\n",
    "<|action_start|>", "<|action_end|>", "<|plugin|>",
    "<|tool_call:start|>", "<|tool_call:end|>", "<|tool_arg:start|>", "<|tool_arg:value|>", "<|tool_arg:end|>",
    "<|think:start|>", "<|think:end|>",
    "<|plamo:begin_", "<|plamo:end_", ":plamo|>", "<|plamo:constrain|>", "<|plamo:msg|>",
)  # fmt: skip
_PLAIN = (
    "<TOOLCALL>", "</TOOLCALL>", "<minimax:tool_call>", "</minimax:tool_call>", "<seed:tool_call>", "</seed:tool_call>",
    "<tool_call>", "</tool_call>", "<think>", "</think>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>", "｜DSML｜",
    "<function_calls>", "</function_calls>", "<longcat_tool_call>", "</longcat_tool_call>",
    "<longcat_arg_key>", "</longcat_arg_key>", "<longcat_arg_value>", "</longcat_arg_value>",
    "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>", "<｜tool_call_begin｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>",
    "<tool_calls:opensource>", "</tool_calls:opensource>", "<tool_call:opensource>", "</tool_call:opensource>",
    "<tool_sep:opensource>", "<arg_key:opensource>", "</arg_key:opensource>", "<arg_value:opensource>",
    "</arg_value:opensource>", "<tool_sep>",
)  # fmt: skip

TOKENS = dict.fromkeys(_SPECIAL, True) | dict.fromkeys(_PLAIN, False)
"""Whether each is special."""
ENDS = ("<|return|>", "<|call|>", "<|eot|>")
"""Those that end an answer."""
