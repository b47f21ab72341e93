"""One HTTP request in its log records and its spans. Works with and without a collector.

                 ┌ validate
request ─────────┼ queued          one of each for every generation of the request
(name of route)  └ infer ◄┄┄┄┄ linked from each `batch` that it takes part in (`router.shards.traced`)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import fields, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from router.gen_ai import GenAi
from router.generation_trace import GenerationTrace
from router.keys.account import Account
from router.request import ValidRequest
from wire.log.console import REQUESTS
from wire.text.counting import counted
from wire.text.escape import one_line
from wire.tracing import Tracing, end

if TYPE_CHECKING:
    from opentelemetry.trace import Span

# The attribute of an endpoint that holds TGI's name for its span. A request to one without it has no span.
_SPAN_NAME = "span_name"

# Its own field, or the client's: a seed, texts, and lists that are counted.
_NOT_SHOWN = {"seed", "grammar", "grammar_kind", "logit_bias"}

BATCH_OWNER = "tercet.batch_owner"
"""Member of a request's scope where it is of a batch: the name of the API key that has sent that."""

_requests = logging.getLogger(REQUESTS)
_MOST_SHOWN = 80  # characters of a path

_current: ContextVar[RequestSpan | None] = ContextVar("request", default=None)


class RequestSpan:
    """A request's span; `scope` is the server's, for who answers."""

    __slots__ = (
        "_scope",
        "account",
        "began_at",
        "fields",
        "gen_ai",
        "inference_s",
        "queue_s",
        "refused",
        "span",
        "tokens_in",
        "tokens_out",
        "tracing",
    )

    def __init__(
        self, scope: Mapping[str, Any], tracing: Tracing | None, traceparent: str = "", *, is_logged: bool = False
    ) -> None:
        """Begin with a request.

        Args:
            is_logged: Whether a line of the request log will be asked for.
        """
        self._scope = scope
        self.began_at = time.monotonic()
        self.fields: dict[str, str] = {}
        self.account: Account | None = None  # of its API key, where keys are of a file
        self.refused = ""  # why, in the words of the log
        self.tokens_in = self.tokens_out = 0  # of all finished generations
        self.queue_s = self.inference_s = 0.0  # the longest wait; the sum
        self.tracing = tracing
        self.span: Span | None = None
        self.gen_ai: GenAi | None = GenAi() if is_logged or tracing is not None else None
        if tracing is not None:
            self.span = tracing.start("request", kind="server", remote={"traceparent": traceparent})

    @property
    def is_of_batch(self) -> bool:
        """Whether it is a batch's, so that no client waits for the answer."""
        return BATCH_OWNER in self._scope

    @property
    def name(self) -> str:
        """Return TGI's route name; empty: untraced."""
        name: str = getattr(self._scope.get("endpoint"), _SPAN_NAME, "")
        return name

    def record(self, fields: Mapping[str, str]) -> None:
        """Note TGI's fields of the last finished generation."""
        self.fields.update(fields)
        if self.span is not None:
            self.span.set_attributes(dict(fields))

    def count(self, *, tokens_in: int, tokens_out: int, queue_s: float, inference_s: float) -> None:
        """A finished generation."""
        self.tokens_in += tokens_in
        self.tokens_out += tokens_out
        self.queue_s, self.inference_s = max(self.queue_s, queue_s), self.inference_s + inference_s

    def log_fields(self) -> dict[str, Any]:
        """Return TGI's `span` and `spans`, and our id."""
        span = {"name": self.name} | self.fields
        fields = {"request_id": self._scope.get("request_id", ""), "span": span, "spans": [span]}
        return fields if self.account is None else fields | {"key": self.account.key.name}

    def usage(self, status: int) -> dict[str, Any]:
        """Return what the request log says of a finished request."""
        gen_ai, took_s = self.gen_ai or GenAi(), time.monotonic() - self.began_at
        prompts = gen_ai.prompts
        arrived = datetime.fromtimestamp(time.time() - took_s, UTC).isoformat(timespec="milliseconds")
        return {
            "time": arrived.replace("+00:00", "Z"),
            "id": self._scope.get("request_id", ""),
            "key": None if self.account is None else self.account.key.name,
            "route": self.name,
            "model": gen_ai.model,
            "status": status,
            "refused": self.refused or None,
            "finish_reasons": gen_ai.reasons,
            "stream": gen_ai.is_stream,
            "tokens_in": sum(map(len, prompts)) if prompts else self.tokens_in,
            "tokens_cached": sum(prompts.values()),
            "tokens_out": self.tokens_out,
            "queue_s": round(self.queue_s, 6),
            "first_token_s": None if gen_ai.first_chunk_s is None else round(gen_ai.first_chunk_s, 6),
            "duration_s": round(took_s, 6),
        }

    async def around_validation(self, validation: Awaitable[ValidRequest]) -> ValidRequest:
        """Validate, in a span with a collector, and hand on the trace."""
        if self.tracing is None or self.span is None:
            return await validation
        span = self.tracing.start("validate", parent=self.span)
        try:
            valid = await validation
        except BaseException as error:
            end(span, error)
            raise
        end(span)
        return replace(valid, trace=GenerationTrace(self.tracing, self.span))

    def log(self, status: int) -> None:
        """Log a finished request at DEBUG of `router.requests`; mere reads only if failed."""
        if not _requests.isEnabledFor(logging.DEBUG):
            return
        method = self._scope["method"]
        if method in ("GET", "HEAD", "OPTIONS") and status < 400:
            return
        parts = [f"{status} {method} {one_line(str(self._scope['path'])[:_MOST_SHOWN])}"]
        if self.account is not None:
            parts.append(f"key {self.account.key.name}")
        if self.refused:
            parts.append(self.refused)
        if self.tokens_out:
            parts.append(f"{counted(self.tokens_in, 'token')} in, {self.tokens_out} out")
        parts.append(f"{time.monotonic() - self.began_at:.2f} s")
        if self.tokens_out:
            per_token_ms = 1000 * self.inference_s / self.tokens_out
            parts.append(f"queued {self.queue_s:.2f} s, {per_token_ms:.1f} ms a token")
        _requests.info("%s", "  ".join(parts), extra={"request_id": self._scope.get("request_id", "")})

    def finish(self, status: int) -> None:
        """End after the answer; unknown paths have no span."""
        self.log(status)
        if self.span is None or not self.name:
            return
        self.span.update_name(self.name)
        if self.gen_ai is not None:
            self.span.set_attributes(self.gen_ai.attributes)
        self.span.set_attributes({"http.request.method": self._scope["method"], "http.response.status_code": status})
        end(self.span, _ServerFailure() if status >= 500 else None)


class _ServerFailure(Exception):
    pass


def name_span(endpoint: Callable[..., Any], name: str) -> None:
    """Name an endpoint's spans; empty: none."""
    setattr(endpoint, _SPAN_NAME, name)


def enter(request: RequestSpan) -> None:
    """Bind the running task and its children to this request."""
    _current.set(request)


def entered() -> RequestSpan | None:
    """Return the running task's request."""
    return _current.get()


def entered_gen_ai() -> GenAi | None:
    """Return what gathers the running task's attributes; None without a collector."""
    asked = _current.get()
    return None if asked is None else asked.gen_ai


def name_response(response_id: str) -> None:
    """Note the id of the running task's answer."""
    if (gen_ai := entered_gen_ai()) is not None:
        gen_ai.response_id = response_id


def described(request: ValidRequest) -> str:
    """Return TGI's `parameters`, with clients' texts counted only."""
    sampling, stopping = request.sampling, request.stopping
    parameters = {one.name: getattr(sampling, one.name) for one in fields(sampling) if one.name not in _NOT_SHOWN} | {
        "grammar": sampling.grammar_kind,
        "max_new_tokens": stopping.max_new_tokens,
        "stop_sequences": len(stopping.stop_sequences),
        "ignore_eos": stopping.ignore_eos_token,
        "truncate": request.truncate,
        "decoder_input_details": request.decoder_input_details,
        "top_n_tokens": request.top_n_tokens,
        "logit_bias": len(sampling.logit_bias),
    }
    spelled = ", ".join(f"{name}: {str(value).lower()}" for name, value in parameters.items())
    return f"GenerateParameters {{ {spelled} }}"
