"""Each API's names and bounds of fields checked after the body."""

from __future__ import annotations

from dataclasses import dataclass, replace

from router.request import SAMPLING_RANGES, ValueRange

MAX_TOP_LOGPROBS = 20
MAX_STOP_TEXTS = 64


@dataclass(frozen=True, kw_only=True)
class ApiRules:
    """TGI's rules by default."""

    # The prompt's field; others are field names too.
    prompt: str = "inputs"
    max_new_tokens: str = "max_new_tokens"
    top_n_tokens: str = "top_n_tokens"
    stop: str = "stop"
    ranges: tuple[ValueRange, ...] = SAMPLING_RANGES
    # Of alternatives; None: `--max-top-n-tokens`.
    most_top_n_tokens: int | None = None
    # Of stop texts; None: `--max-stop-sequences`.
    most_stops: int | None = None
    # OpenTelemetry's name of what it asks for.
    operation: str = "text_completion"
    # What the number of new tokens must be.
    new_tokens_rule: str = "must be > 0"


def _openai_ranges() -> tuple[ValueRange, ...]:
    changed = {
        "temperature": ValueRange(name="temperature", says="must be >= 0", low=0),
        "top_p": ValueRange(name="top_p", says="must be in [0, 1]", low=0, high=1),
        "top_k": ValueRange(name="top_k", says="must be > 0, or 0 or -1 for no limit", low=0, excludes_low=True),
    }
    return tuple(changed.get(one.name, one) for one in SAMPLING_RANGES)


TGI = ApiRules()
CHAT = ApiRules(
    prompt="messages",
    max_new_tokens="max_tokens",
    top_n_tokens="top_logprobs",
    ranges=_openai_ranges(),
    most_top_n_tokens=MAX_TOP_LOGPROBS,
    most_stops=MAX_STOP_TEXTS,
    new_tokens_rule="must be > 0, or -1 for as many as fit",
    operation="chat",
)
COMPLETIONS = replace(CHAT, prompt="prompt", top_n_tokens="logprobs", operation="text_completion")
RESPONSES = replace(CHAT, prompt="input", max_new_tokens="max_output_tokens")
MESSAGES = replace(CHAT, stop="stop_sequences", new_tokens_rule="must be > 0")
