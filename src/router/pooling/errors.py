"""Faults of such requests, in TEI's words and kinds."""

from __future__ import annotations

from typing import Literal

from router.errors import RouterError

Kind = Literal["Validation", "Empty", "Overloaded", "Backend", "Tokenizer"]
Failure = Literal["batch_size", "dropped", "inference", "model_type", "overloaded", "tokenization", "validation"]
"""Values of the label `err` of `te_request_failure`."""


class PoolingError(RouterError):
    """A fault; `detail` lacks TEI's beginning; `param`, `code` are OpenAI's; `failure` its label."""

    def __init__(
        self,
        kind: Kind,
        detail: str,
        *,
        failure: Failure = "validation",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        self.kind = kind
        self.failure = failure
        self.retry_after_s = retry_after_s
        self.prefix = {"Validation": "Input validation error: ", "Empty": "Input validation error: "}.get(kind, "")
        super().__init__(detail, param=param, code=code)


def invalid(detail: str, *, param: str | None = None, code: str | None = None) -> PoolingError:
    """The request asks for something that cannot be."""
    return PoolingError("Validation", detail, param=param, code=code)


def empty(name: str) -> PoolingError:
    """Return the fault of an empty text or list."""
    return PoolingError("Empty", f"`{name}` cannot be empty", param=name)


def too_many(count: int, most: int, name: str) -> PoolingError:
    """Return TEI's fault of too many texts."""
    return BatchSizeError(count, most, name)


class BatchSizeError(PoolingError):
    """See `too_many`."""

    def __init__(self, count: int, most: int, name: str) -> None:
        text = f"batch size {count} > maximum allowed batch size {most}"
        super().__init__("Validation", text, failure="batch_size", param=name)
        self.args = (text,)


def wrong_task(detail: str) -> PoolingError:
    """The model is of another kind."""
    return PoolingError("Backend", detail, failure="model_type", code="unsupported_task")


def failed(detail: str) -> PoolingError:
    """The shards could not compute it."""
    return PoolingError("Backend", detail, failure="inference")


def overloaded(retry_after_s: int) -> PoolingError:
    return PoolingError("Overloaded", "Model is overloaded", failure="overloaded", retry_after_s=retry_after_s)
