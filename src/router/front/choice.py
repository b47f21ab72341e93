"""Chooses the model of a request: by its path, a header, its body or its query, else by what there is."""

from __future__ import annotations

import re
from typing import Any

import orjson
from starlette.requests import Request

from router.api.http.base64_runs import Base64Runs
from router.api.http.body import parse_json
from router.front.errors import model_not_found, model_required
from router.front.models import Model, Models

MODEL_HEADER = "x-tercet-model"
PREFIX = "/models"
OF_PATH = "tercet.model"
"""Member of a request's scope: the model that its path names, or the rest of a path that names none."""
_UNNAMED = ("", "tgi")
"""What clients of TGI send, which has one model."""
_TASKS = (
    (re.compile(r"/(v1/)?embed(dings|_all|_sparse)?|/similarity|/v1/embeddings"), "embed"),
    (re.compile(r"/(v[12]/)?rerank|/(v1/)?score"), "rerank"),
    (re.compile(r"/predict|/(v1/)?classify"), "classify"),
)


def cut_path(path: str, models: Models) -> tuple[Model | str, str] | None:
    """Return the model that `/models/NAME/…` names, and the rest; None for any other path."""
    if not path.startswith(PREFIX + "/"):
        return None
    rest = path.removeprefix(PREFIX)
    return models.of_path(rest) or (rest[1:].partition("/")[0], "/")


def task_of(path: str) -> str:
    """Return the task that a route is for."""
    return next((task for pattern, task in _TASKS if pattern.fullmatch(path)), "generate")


def named_in(raw: bytes) -> str | None:
    """Return the `model` of a JSON body. Raises BodyError for what is no JSON."""
    try:
        value: Any = orjson.loads(Base64Runs(raw).rest)
    except orjson.JSONDecodeError:
        value = parse_json(raw)
    name = value.get("model") if isinstance(value, dict) else None
    return name if isinstance(name, str) else None


def choose(request: Request, body_model: str | None, models: Models, default: str | None) -> tuple[Model, str]:
    """Return a request's model, and the name by which it asks for that.

    Raises:
        RouterError: No model has that name, or it names none and there are several.
    """
    of_path = request.scope.get(OF_PATH)
    if isinstance(of_path, Model):
        return of_path, of_path.name
    asked = of_path or request.headers.get(MODEL_HEADER) or body_model or request.query_params.get("model") or ""
    if asked not in _UNNAMED or (asked and models.find(asked) is not None):
        return _found(models, asked), asked
    model = models.only_of(task_of(request.url.path))
    if model is None and default is not None:
        model = _found(models, default)
    if model is None and len(models.by_name) == 1:
        [model] = models.by_name.values()
    if model is None:
        raise model_required(models.by_name)
    return model, model.name


def _found(models: Models, name: str) -> Model:
    model = models.find(name)
    if model is None:
        raise model_not_found(name, models.by_name)
    return model
