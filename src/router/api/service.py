"""The routes that describe the server: health, info, metrics, models."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from router import metrics
from router.api.app_state import Served, served_of
from router.api.errors import UnknownModelError
from router.api.http.json_out import JsonResponse
from router.config import TGI_VERSION
from router.errors import UnhealthyError
from router.openai.chat.prompt import BASE_MODEL
from router.schemas.service import ErrorBody, Info, ModelCard, ModelList

routes = APIRouter(tags=["Service"])
_UNHEALTHY: dict[int | str, dict[str, Any]] = {503: {"model": ErrorBody, "description": "Not able to generate"}}
_METRICS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The metrics", "content": {"text/plain": {"schema": {"type": "string"}}}}
}

Handler = TypeVar("Handler", bound=Callable[..., Any])


def get(routes: APIRouter, path: str, **options: Any) -> Callable[[Handler], Handler]:
    """A GET route that answers HEAD too; the documentation names it once."""

    def register(handler: Handler) -> Handler:
        routes.add_api_route(path, handler, methods=["GET"], **options)
        routes.add_api_route(path, handler, methods=["HEAD"], include_in_schema=False, **options)
        return handler

    return register


@get(routes, "/", responses=_UNHEALTHY)
@get(routes, "/health", responses=_UNHEALTHY)
@get(routes, "/ping", responses=_UNHEALTHY)
async def health(request: Request) -> Response:
    """200 without a body if the shards can generate, else 503."""
    if not await served_of(request).inference.is_healthy():
        raise UnhealthyError
    return Response()


@get(routes, "/info", response_model=Info)
async def info(request: Request) -> Response:
    """The model and the limits of a request."""
    served = served_of(request)
    config, limits = served.config, served.inference.limits
    answer = Info(
        model_id=served.model_id,
        model_sha=served.model_sha,
        model_pipeline_tag=None,
        max_concurrent_requests=limits.max_concurrent_requests,
        max_best_of=limits.max_best_of,
        max_stop_sequences=limits.max_stop_sequences,
        max_input_tokens=limits.max_input_tokens,
        max_total_tokens=limits.max_total_tokens,
        validation_workers=config.validation_workers,
        max_client_batch_size=limits.max_client_batch_size,
        router="text-generation-router",
        version=TGI_VERSION,
        sha=served.git_sha,
        docker_label=served.docker_label,
        model_dtype=served.info.dtype,
        model_device_type=served.info.device_type,
        waiting_served_ratio=limits.waiting_served_ratio,
        max_batch_total_tokens=limits.max_batch_total_tokens,
        max_waiting_tokens=limits.max_waiting_tokens,
        max_batch_size=limits.max_batch_size,
        tercet_version=version("tercet"),
    )
    return JsonResponse(answer.model_dump())


@get(routes, "/metrics", response_class=Response, responses=_METRICS)
async def render_metrics(request: Request) -> Response:
    """Counters and histograms in Prometheus' text format."""
    text = served_of(request).inference.metrics.render()
    return Response(text, headers={"content-type": metrics.CONTENT_TYPE})


@get(routes, "/v1/models", response_model=ModelList)
async def models(request: Request) -> Response:
    """The one model that is served."""
    return JsonResponse(ModelList(data=[_card(served_of(request))]).model_dump())


@get(routes, "/v1/models/{model_id:path}", response_model=ModelCard)
async def model(request: Request, model_id: str) -> Response:
    """The model of that name."""
    served = served_of(request)
    if model_id not in (served.model_id, BASE_MODEL):
        raise UnknownModelError("The model does not exist")
    return JsonResponse(_card(served).model_dump())


def _card(served: Served) -> ModelCard:
    return ModelCard(
        id=served.model_id,
        created=served.created,
        owned_by=served.model_id,
        max_model_len=served.inference.limits.max_total_tokens,
    )
