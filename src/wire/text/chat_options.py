"""Options about chats that launcher and router know: names of the formats of answers, variables of every template."""

from __future__ import annotations

import json
from typing import Any

AUTO, TGI, NONE, HARMONY = "auto", "tgi", "none", "harmony"
DEFAULT_VARIABLES = "`--default-chat-template-kwargs`"

TOOL_CALL_PARSERS = (
    AUTO, TGI, "apertus", "cohere", "deepseek_dsml", "deepseek_v3", "deepseek_v31", "deepseek_v4", "functiongemma",
    "gemma4", "gigachat3", "gigachat31", "glm", "granite3", HARMONY, "hermes", "hunyuan_a13b", "hy_v3",
    "hy_v3_opensource", "internlm", "kimi_k2", "kimi_k3", "lfm2", "llama_json", "longcat_args", "longcat_json",
    "minicpm5", "minimax_m2", "minimax_m3", "mistral_args", "mistral_json", "muse_glimmer", "nemotron_nano_v2", "olmo3",
    "phi4_mini", "plamo3", "pythonic", "qwen_xml", "seed_xml", "solar_open2", "step3", "xlam",
)  # fmt: skip
REASONING_PARSERS = (
    AUTO, NONE, HARMONY, "apertus", "apriel", "cohere", "gemma4", "granite32", "hy_v3", "kimi_k3", "magistral",
    "minimax_m3", "muse_glimmer", "plamo3", "seed", "solar_open2", "think", "think_answer", "think_response",
)  # fmt: skip

_OTHER_TOOL_CALL_PARSERS = frozenset(
    {"openai", "gpt-oss", "gpt_oss", "deepseek_v32", "glm45", "glm47", "glm4", "qwen3_coder",
     "qwen3_xml", "nemotron_v3", "mistral", "cohere_command3", "phi4_mini_json", "granite",
     "llama4_pythonic", "llama3_json", "llama3", "llama4_json", "qwen", "qwen25", "qwen3", "granite4",
     "ernie45", "jamba", "mimo", "minimax", "minimax_m1", "nemotron_json", "seed_oss", "step3p5",
     "apertus2509", "hunyuan", "internlm2", "interns1", "longcat", "minimax-m2", "muse", "museglimmer"}
)  # fmt: skip
_OTHER_REASONING_PARSERS = frozenset(
    {"openai", "gpt-oss", "gpt_oss", "seed_oss", "mistral", "cohere_command3", "cohere_command4", "ernie45",
     "granite33", "deepseek_r1", "deepseek-r1",
     "deepseek_v3", "qwen3", "glm45", "kimi_k2", "hunyuan_a13b", "step3", "granite", "muse",
     "museglimmer"}
)  # fmt: skip
"""Names that other servers have for them; tests compare them with the router's tables, which say what they mean."""


def check_chat_options(
    tool_call_parser: str | None, reasoning_parser: str | None, variables: str | None, error: type[Exception]
) -> None:
    """Refuses what a router would refuse, before a model is loaded for it. Raises `error`."""
    for flag, asked, names, others in (
        ("--tool-call-parser", tool_call_parser, TOOL_CALL_PARSERS, _OTHER_TOOL_CALL_PARSERS),
        ("--reasoning-parser", reasoning_parser, REASONING_PARSERS, _OTHER_REASONING_PARSERS),
    ):
        if asked is not None and asked not in names and asked not in others:
            raise unknown_name(flag, asked, names, error)
    default_variables(variables, error)


def unknown_name(flag: str, asked: str, names: tuple[str, ...], error: type[Exception]) -> Exception:
    return error(f"`{flag}` {asked} is unknown; choose one of {', '.join(names)}")


def default_variables(text: str | None, error: type[Exception]) -> dict[str, Any]:
    """What `--default-chat-template-kwargs` says. Raises `error` unless it is a JSON object."""
    if text is None:
        return {}
    try:
        variables = json.loads(text, parse_constant=_refuse_constant)
    except ValueError as reason:  # also of numbers with too many digits
        raise error(f"{DEFAULT_VARIABLES} is no JSON: {reason}") from None
    except RecursionError:
        raise error(f"{DEFAULT_VARIABLES} is no JSON: it is nested too deeply") from None
    if not isinstance(variables, dict):
        raise error(f"{DEFAULT_VARIABLES} must be a JSON object")
    return variables


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
