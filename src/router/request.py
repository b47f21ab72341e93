"""A request that has passed validation, in the router's own types.

Knows nothing of HTTP bodies or protobuf; `router.api` builds these through `router.generation.validation`, and
`router.shards.convert` turns them into messages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from router.generation_trace import GenerationTrace
from wire.extensions import Extension
from wire.images.prepared import ImagePlace, PreparedImage

GrammarKind = Literal["none", "json", "regex", "lark"]


@dataclass(frozen=True, kw_only=True)
class SamplingParameters:
    """How the next token is chosen; every default is the value that switches the step off."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    typical_p: float = 1.0
    min_p: float = 0.0
    min_tokens: int = 0
    seed: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0  # TGI's: relative to the share of the token in the history
    presence_penalty: float = 0.0  # OpenAI's: absolute, over generated tokens
    absolute_frequency_penalty: float = 0.0  # OpenAI's
    logit_bias: tuple[tuple[int, float], ...] = ()
    watermark: bool = False
    grammar: str = ""
    grammar_kind: GrammarKind = "none"


SAMPLING_RANGES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("temperature", lambda value: value > 0, "`temperature` must be > 0"),
    ("repetition_penalty", lambda value: value > 0, "`repetition_penalty` must be > 0"),
    ("frequency_penalty", lambda value: -2 <= value <= 2, "`frequency_penalty` must be in [-2, 2]"),
    ("absolute_frequency_penalty", lambda value: -2 <= value <= 2, "`frequency_penalty` must be in [-2, 2]"),
    ("presence_penalty", lambda value: -2 <= value <= 2, "`presence_penalty` must be in [-2, 2]"),
    # 1.0 is TGI's own value for "off" and what OpenAI's clients send; TGI refuses it.
    ("top_p", lambda value: 0 < value <= 1, "`top_p` must be in (0, 1]"),
    ("typical_p", lambda value: 0 < value < 1, "`typical_p` must be in (0, 1)"),
    ("min_p", lambda value: 0 <= value <= 1, "`min_p` must be in [0, 1]"),
    ("top_k", lambda value: value > 0, "`top_k` must be > 0"),
)
"""What a given value must be, in the order in which TGI checks, and TGI's words for a value that is not."""

FILTERS_OFF = {"top_k": 0, "top_p": 1.0, "typical_p": 1.0, "min_p": 0.0}
"""What removes candidates before one is sampled: switched off where temperature 0 asks for the likeliest token."""

SAMPLING_EXTENSIONS: dict[str, Extension] = {
    "absolute_frequency_penalty": Extension.OPENAI_PENALTIES,
    "presence_penalty": Extension.OPENAI_PENALTIES,
    "min_p": Extension.OPENAI_PENALTIES,
    "logit_bias": Extension.LOGIT_BIAS,
    "min_tokens": Extension.MIN_TOKENS,
}
"""Parameters that go to shards only if those announced the extension; all others are in TGI's protocol."""


@dataclass(frozen=True, kw_only=True)
class StoppingParameters:
    """When the request ends. `max_new_tokens` is resolved: exact, and within the token limits."""

    max_new_tokens: int
    stop_sequences: tuple[str, ...] = ()
    ignore_eos_token: bool = False
    stop_anywhere: bool = True
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image of a prompt and where it is. is_indivisible: no chunk of the prompt may end within it."""

    image: PreparedImage
    place: ImagePlace
    is_indivisible: bool = False


@dataclass(frozen=True, kw_only=True)
class ValidRequest:
    """A request that the scheduler may run as it is.

    `inputs` is the prompt as the model reads it, `num_characters` how long the client's own was: with images they
    differ. `input_ids` are the router's own token ids of the prompt after truncation, `input_length` their number.
    `truncate` is the largest number of prompt tokens the shard may keep (the user's value, else the server's limit).
    `adapter_id` names a LoRA adapter, `adapter` is its load id where it came while the shards serve.
    `prediction_ids` are the tokens of what the answer will probably be, for shards that draft tokens. `images` are in
    the order of their places in `input_ids`. `chunks`: texts and files of images, for shards of upstream TGI: what they
    are sent instead of `inputs`, if there are any.
    """

    inputs: str
    num_characters: int
    input_ids: tuple[int, ...]
    input_length: int
    truncate: int
    add_special_tokens: bool = True
    decoder_input_details: bool = False
    top_n_tokens: int = 0
    adapter_id: str | None = None
    adapter: int | None = None
    prediction_ids: tuple[int, ...] = ()
    images: tuple[PlacedImage, ...] = field(default=(), repr=False)
    chunks: tuple[str | bytes, ...] = field(default=(), repr=False)
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    stopping: StoppingParameters
    trace: GenerationTrace | None = field(default=None, compare=False, repr=False)  # only with a collector

    @property
    def namespace(self) -> str:
        """Requests whose KV is of the same weights have the same."""
        return (self.adapter_id or "") if self.adapter is None else f"{self.adapter_id}@{self.adapter}"
