"""OpenTelemetry's attributes of generative AI (`gen_ai.*`), gathered over the generations of a request.

None of them has a text of the client: the model is the served one, by its own name.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from router.events import Finished
from router.request import ValidRequest

Value = str | bool | int | float | Sequence[str]
Attributes = dict[str, Value]

_REASONS = {"length": "length", "eos_token": "stop", "stop_sequence": "stop"}
_INT64 = 2**63
_SAMPLING = ("temperature", "top_p", "top_k", "seed")


class GenAi:
    """What is known of a request."""

    __slots__ = ("_asked", "first_chunk_s", "is_stream", "num_generated", "prompts", "reasons", "response_id")

    def __init__(self) -> None:
        self.is_stream = False
        self.response_id = ""
        self._asked: Attributes = {}
        self.prompts: dict[tuple[int, ...], int] = {}  # tokens of each prompt that the prefix cache had
        self.num_generated = 0
        self.reasons: list[str] = []
        self.first_chunk_s: float | None = None

    def asked(
        self,
        request: ValidRequest,
        *,
        operation: str,
        model: str,
        given: Collection[str],
        max_new_tokens: int | None,
        num_choices: int,
    ) -> None:
        """Note a generation's parameters.

        Args:
            given: Names of the parameters of sampling that the client or the server's defaults have set.
            max_new_tokens: As asked for.
        """
        sampling = request.sampling
        found: Attributes = {f"gen_ai.request.{name}": getattr(sampling, name) for name in _SAMPLING if name in given}
        if sampling.seed >= _INT64:
            found.pop("gen_ai.request.seed", None)  # the protocol's numbers have a sign
        if not sampling.do_sample:
            found["gen_ai.request.temperature"] = 0.0
        if max_new_tokens is not None:
            found["gen_ai.request.max_tokens"] = max_new_tokens
        if num_choices != 1:
            found["gen_ai.request.choice.count"] = num_choices
        found |= {"gen_ai.operation.name": operation, "gen_ai.provider.name": "tercet"}
        self._asked = found | {"gen_ai.request.model": model, "gen_ai.response.model": model}

    def first_chunk(self, seconds: float) -> None:
        """Note the first token of a generation, counted from the request's arrival."""
        self.first_chunk_s = seconds if self.first_chunk_s is None else min(seconds, self.first_chunk_s)

    def finished(self, request: ValidRequest, event: Finished) -> None:
        """Count a generation; a prompt counts once, as in the answer's `usage`."""
        ids = request.input_ids
        self.prompts[ids] = min(event.cached_tokens, self.prompts.get(ids, event.cached_tokens))
        self.num_generated += event.generated_tokens
        self.reasons.append(_REASONS[event.finish_reason])

    @property
    def model(self) -> str | None:
        """Return who answers; None: no generation was begun."""
        model = self._asked.get("gen_ai.response.model")
        return model if isinstance(model, str) else None

    @property
    def attributes(self) -> Attributes:
        """Return all that is known; nothing, where nothing was generated."""
        if not self._asked:
            return {}
        found = self._asked | {"gen_ai.request.stream": self.is_stream}
        if self.response_id:
            found["gen_ai.response.id"] = self.response_id
        if self.is_stream and self.first_chunk_s is not None:
            found["gen_ai.response.time_to_first_chunk"] = self.first_chunk_s
        if self.reasons:
            found["gen_ai.response.finish_reasons"] = tuple(self.reasons)
            found["gen_ai.usage.input_tokens"] = sum(map(len, self.prompts))
            found["gen_ai.usage.output_tokens"] = self.num_generated
            found["gen_ai.usage.cache_read.input_tokens"] = sum(self.prompts.values())
        return found
