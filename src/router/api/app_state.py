"""What every endpoint needs, carried by the app."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import Request

from router.answers.formats.choice import ModelFormat
from router.api.errors import COUNTED, ErrorAnswers, event_of
from router.api.http.body import LARGE_BODY, BodyType, LargeBodies, read_body, read_one_of
from router.api.response_store import ResponseStore
from router.config import RouterConfig
from router.generation.inference import Inference
from router.generation.parsed_bodies import ParsedBodies
from router.limits import ShardInfo
from router.schemas.base import Body
from router.template.template import ChatTemplate
from router.worker.lane import Lanes
from wire.text.model_name import short_name

StreamFailure = Callable[[Exception], bytes]
"""From what has ended a stream to its error event."""


@dataclass(frozen=True, kw_only=True)
class AppState:
    """The served model, and the router's parts."""

    config: RouterConfig
    info: ShardInfo
    inference: Inference
    chat_template: ChatTemplate
    model_format: ModelFormat = field(default_factory=ModelFormat)
    """What is read in the model's answers besides text."""
    template_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Variables of every chat's template, where the request does not set them."""
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    """What OpenAI's and Anthropic's routes take where the request does not say it."""
    model_id: str
    model_sha: str | None = None
    quantization: str | None = None
    """Of the checkpoint, as people say it."""
    git_sha: str | None = None
    docker_label: str | None = None
    """What an image was built from, and its name: empty outside of one."""
    bodies: Lanes = field(default_factory=partial(Lanes, "bodies", large_from=LARGE_BODY))
    """Work on bodies that would hold up the event loop."""
    responses: ResponseStore | None = None
    """Those of /v1/responses that are kept; None: none are."""
    parsed_bodies: ParsedBodies = field(default_factory=ParsedBodies)
    long_answers: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the one that is written at the moment."""
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model_names(self) -> tuple[str, ...]:
        """Return the model's names in OpenAI's API, the first for answers."""
        return self.config.served_model_name or (short_name(self.model_id),)

    def adapter_of(self, model: str | None) -> str | None:
        """Return the adapter that OpenAI's `model` names, if it is one."""
        return model if model in self.inference.adapters and model not in self.model_names else None

    @property
    def large_bodies(self) -> LargeBodies:
        return LargeBodies(self.bodies.large, self.parsed_bodies)

    async def read(self, request: Request, body_type: type[BodyType], *, counts: bool = True) -> BodyType:
        """Read and check the body, within `--payload-limit`.

        Args:
            counts: In `tgi_request_count`.
        """
        if counts:
            self._count(request)
        return await read_body(request, body_type, limit=self.config.payload_limit, large=self.large_bodies)

    async def read_one_of(self, request: Request, *body_types: type[Body], counts: bool = True) -> Body:
        """Read the body as the first fitting type."""
        if counts:
            self._count(request)
        return await read_one_of(request, *body_types, limit=self.config.payload_limit, large=self.large_bodies)

    def _count(self, request: Request) -> None:
        request.scope[COUNTED] = True
        self.inference.metrics.count("tgi_request_count")


def state_of(request: Request) -> AppState:
    state: AppState = request.app.state.app_state
    return state


def errors_of(request: Request) -> ErrorAnswers:
    errors: ErrorAnswers = request.app.state.errors
    return errors


def stream_failure(request: Request) -> StreamFailure:
    """Return what makes a stream's error event."""
    errors, family, request_id = errors_of(request), errors_of(request).family(request.url.path), request_id_of(request)
    return lambda error: event_of(errors.of_stream(error, request_id), family)


def request_id_of(request: Request) -> str:
    """Set by the middleware of `router.server.app`."""
    request_id: str = request.scope.get("request_id", "")
    return request_id
