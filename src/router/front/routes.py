"""What the front answers itself: the models and their states, health, metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from router.api.http.body import read_bytes
from router.api.json_out import JsonResponse
from router.api.pages import pages
from router.config import TGI_VERSION
from router.errors import UnavailableError, UnhealthyError
from router.front.choice import named_in
from router.front.errors import model_not_found, model_required
from router.front.link import Link
from router.front.metrics import FrontMetrics, merged
from router.front.models import Model, Models
from router.front.upstream import UpstreamError
from router.metrics import CONTENT_TYPE

Handler = Callable[[Request], Awaitable[Response]]

_MODELS = "/v1/models"
_ASK_TIMEOUT_S = 5.0
_BODY_LIMIT = 64 * 1024


class OwnRoutes:
    """Handlers by method and path."""

    def __init__(self, models: Models, link: Link, metrics: FrontMetrics, *, playground: bool) -> None:
        self._models, self._link, self._metrics, self._has_page = models, link, metrics, playground
        self._created = int(time.time())
        gets: dict[str, Handler] = {
            "/": self._root, "/health": self._health, "/ping": self._health, "/metrics": self._render,
            "/version": self._version, _MODELS: self._list,
        }  # fmt: skip
        self._handlers = {(method, path): one for path, one in gets.items() for method in ("GET", "HEAD")}
        self._handlers["POST", f"{_MODELS}/load"] = self._load
        self._handlers["POST", f"{_MODELS}/unload"] = self._unload

    def find(self, method: str, path: str) -> Handler | None:
        """Return what answers a request, if the front does."""
        if method in ("GET", "HEAD") and path.startswith(_MODELS + "/"):
            return self._card
        return self._handlers.get((method, path))

    async def _root(self, request: Request) -> Response:
        if self._has_page and pages.asks_for_page(request):
            return pages.playground()
        answer = await self._health(request)
        answer.headers["vary"] = "Accept"
        return answer

    async def _health(self, request: Request) -> Response:
        """200 if the launcher and all models that are loaded at the start are well; `?model=`: that one."""
        name = request.query_params.get("model")
        if name is not None:
            model = self._found(name)
            if not model.is_open:
                raise UnhealthyError
            asked = [model]
        else:
            if not self._models.is_well or self._models.is_draining:
                raise UnhealthyError
            asked = [model for model in self._models.by_name.values() if model.preload and model.is_open]
        if not all(await asyncio.gather(*map(self._is_healthy, asked))):
            raise UnhealthyError
        return Response()

    async def _is_healthy(self, model: Model) -> bool:
        answer = await self._ask(model, b"/health")
        return answer is not None and answer[0] == 200

    async def _ask(
        self, model: Model, target: bytes, headers: list[tuple[bytes, bytes]] | None = None
    ) -> tuple[int, bytes] | None:
        """Return status and body of a loaded model's answer to a GET, if one comes in time."""
        if model.upstream is None:
            return None
        try:
            async with asyncio.timeout(_ASK_TIMEOUT_S):
                answer = await model.upstream.request("GET", target, headers or [])
                try:
                    return answer.status, await answer.body()
                finally:
                    answer.close()
        except (UpstreamError, TimeoutError):
            return None

    async def _render(self, request: Request) -> Response:
        """Return the metrics of the front, and of each loaded model with the label `model`."""
        loaded = [model for model in self._models.by_name.values() if model.is_open]
        key = [one for one in request.scope["headers"] if one[0] == b"authorization"]
        answers = await asyncio.gather(*(self._ask(model, b"/metrics", key) for model in loaded))
        texts = {
            model.name: answer[1]
            for model, answer in zip(loaded, answers, strict=True)
            if answer is not None and answer[0] == 200
        }
        return Response(merged(self._metrics.render(), texts), headers={"content-type": CONTENT_TYPE})

    async def _version(self, request: Request) -> Response:
        return JsonResponse({"version": version("tercet"), "tgi_version": TGI_VERSION})

    # Models

    async def _list(self, request: Request) -> Response:
        """Return all models, loaded or not, each followed by its adapters."""
        cards = [card for model in self._models.by_name.values() for card in self._cards(model)]
        if "anthropic-version" not in request.headers:
            return JsonResponse({"object": "list", "data": cards})
        data = [self._anthropic_card(card["id"]) for card in cards]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
        return JsonResponse({"data": data, "has_more": False, **ends})

    async def _card(self, request: Request) -> Response:
        name = request.url.path.removeprefix(_MODELS + "/")
        model = self._found(name)
        card = next((card for card in self._cards(model) if card["id"] == name), None)
        card = card or {**self._cards(model)[0], "id": name}
        return JsonResponse(self._anthropic_card(name) if "anthropic-version" in request.headers else card)

    def _cards(self, model: Model) -> list[dict[str, Any]]:
        """Describe a model and its adapters in OpenAI's form."""
        listed = {str(card["id"]): card for card in model.cards}
        since = int(time.time() - (time.monotonic() - model.since))
        status = {"value": model.state, "since": since, "error": model.error or None}
        common = {"object": "model", "created": self._created, "owned_by": model.name}
        own = {"task": model.task, "aliases": model.aliases, "preload": model.preload, "status": status}
        cards: list[dict[str, Any]] = [{"id": model.name, **common, **listed.get(model.name, {}), **own}]
        for name in model.all_adapters:
            card = {"id": name, **common, "parent": model.name, **listed.get(name, {})}
            cards.append({**card, "task": model.task, "status": status})
        return cards

    def _anthropic_card(self, name: str) -> dict[str, Any]:
        created = datetime.fromtimestamp(self._created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {"type": "model", "id": name, "display_name": name, "created_at": created}

    async def _load(self, request: Request) -> Response:
        """Load a model, and answer when that is done."""
        model = await self._named(request)
        error = await self._link.load(model)
        if error:
            raise UnavailableError(f"the model {model.name} was not loaded: {error}", "model_failed")
        return JsonResponse(self._cards(model)[0])

    async def _unload(self, request: Request) -> Response:
        """Unload a model once its running requests have ended, and answer when that is done."""
        model = await self._named(request)
        await self._link.unload(model)
        return JsonResponse(self._cards(model)[0])

    async def _named(self, request: Request) -> Model:
        name = named_in(await read_bytes(request, _BODY_LIMIT))
        if not name:
            raise model_required(self._models.by_name)
        return self._found(name)

    def _found(self, name: str) -> Model:
        model = self._models.find(name)
        if model is None:
            raise model_not_found(name, self._models.by_name)
        return model
