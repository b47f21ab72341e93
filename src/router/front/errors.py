"""What goes wrong because there are several models."""

from __future__ import annotations

from collections.abc import Iterable

from router.api.errors import BodyError, NotServedError
from router.errors import OverloadedError, RouterError, UnavailableError

_MOST_NAMES = 50


def listed(names: Iterable[str]) -> str:
    """Join names for a message, the first of many."""
    known = list(names)
    more = f" and {len(known) - _MOST_NAMES} more" if len(known) > _MOST_NAMES else ""
    return ", ".join(known[:_MOST_NAMES]) + more


def model_required(names: Iterable[str]) -> RouterError:
    """Return the refusal of a request that names no model."""
    text = f"name one of the models in `model`: {listed(names)}"
    return BodyError(400, "model_required", text, param="model", reason="missing_field", code="model_required")


def model_not_found(name: str, names: Iterable[str]) -> RouterError:
    """Return the refusal of a name that no model has."""
    text = f"The model `{name[:128]}` does not exist; this server serves {listed(names)}"
    return NotServedError(text, param="model", reason="unknown_model")


class LoadingError(UnavailableError):
    """A model was not loaded in time."""

    def __init__(self, name: str, retry_after_s: int) -> None:
        text = f"the model {name} is being loaded: try again in {retry_after_s} s"
        super().__init__(text, "model_loading", retry_after_s)


class NotLoadedError(UnavailableError):
    """A model is not loaded, and requests load none."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the model {name} is not loaded: POST /v1/models/load loads it", "model_not_loaded")


class ModelFailedError(UnavailableError):
    """A model did not start, or has ended."""

    def __init__(self, name: str, error: str, retry_after_s: int) -> None:
        text = f"the model {name} has failed ({error}); it is started again in {retry_after_s} s at the earliest"
        super().__init__(text, "model_failed", retry_after_s)


class TooManyWaitingError(OverloadedError):
    """The most requests that may wait for a model do."""

    def __init__(self, name: str, limit: int) -> None:
        super().__init__(retry_after_s=5)
        self.args = (f"{limit} requests wait for the model {name} to be loaded already",)
        self.detail = self.args[0]
        self.limit = limit
