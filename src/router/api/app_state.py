"""What every endpoint needs, in one object that the app carries."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from starlette.requests import Request

from router.config import RouterConfig
from router.generation.inference import Inference
from router.limits import ShardInfo
from router.openai.template.template import ChatTemplate


@dataclass(frozen=True, kw_only=True)
class Served:
    """A model that is ready, and who answers for it."""

    config: RouterConfig
    info: ShardInfo
    inference: Inference
    chat_template: ChatTemplate
    model_id: str
    model_sha: str | None = None
    git_sha: str | None = None
    docker_label: str | None = None
    """What an image was built from, and its name: empty outside of one."""
    created: int = field(default_factory=lambda: int(time.time()))


def served_of(request: Request) -> Served:
    served: Served = request.app.state.served
    return served


def request_id_of(request: Request) -> str:
    """Set by the middleware of `router.server.app`."""
    request_id: str = request.scope.get("request_id", "")
    return request_id
