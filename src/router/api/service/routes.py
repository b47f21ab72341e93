"""The routes that describe the server: health, info, metrics, models."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from fastapi import Request
from starlette.responses import Response

from router import metrics
from router.api.app_state import AppState, state_of
from router.api.chat.prompt import BASE_MODEL
from router.api.errors import NotServedError
from router.api.json_out import JsonResponse
from router.api.pages import pages
from router.api.routes import Routes
from router.api.service.schema import (
    Info,
    MessagesModel,
    MessagesModelList,
    ModelCard,
    ModelList,
    Props,
    PropsModalities,
    PropsSettings,
    Version,
)
from router.config import TGI_VERSION
from router.errors import UnhealthyError
from router.schemas.errors import ErrorBody

routes = Routes("Service")
_LLAMA_CPPS_NAMES = {"repetition_penalty": "repeat_penalty", "typical_p": "typ_p"}
_VERSION_HEADER = "anthropic-version"
_UNHEALTHY: dict[int | str, dict[str, Any]] = {503: {"model": ErrorBody, "description": "Not able to generate"}}
_METRICS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The metrics", "content": {"text/plain": {"schema": {"type": "string"}}}}
}


@routes.describes("/ping", "/health", span="health", responses=_UNHEALTHY)
async def health(request: Request) -> Response:
    """200 without a body if the shards can generate, else 503."""
    if not await state_of(request).inference.is_healthy():
        raise UnhealthyError
    return Response()


@routes.describes("/", span="health", responses=_UNHEALTHY)
async def root(request: Request) -> Response:
    """Answer as `/health`; browsers get a page to try the model, unless `--no-playground` is set."""
    if not state_of(request).config.no_playground and pages.asks_for_page(request):
        return pages.playground()
    answer = await health(request)
    answer.headers["vary"] = "Accept"
    return answer


@routes.describes("/info", span="get_model_info", response_model=Info)
async def info(request: Request) -> Response:
    """The model and the limits of a request."""
    state = state_of(request)
    config, limits = state.config, state.inference.limits
    answer = Info(
        model_id=state.model_id,
        model_sha=state.model_sha,
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
        sha=state.git_sha,
        docker_label=state.docker_label,
        model_dtype=state.info.dtype,
        model_device_type=state.info.device_type,
        waiting_served_ratio=limits.waiting_served_ratio,
        max_batch_total_tokens=limits.max_batch_total_tokens,
        max_waiting_tokens=limits.max_waiting_tokens,
        max_batch_size=limits.max_batch_size,
        tercet_version=version("tercet"),
        kv_cache_dtype=state.info.kv_cache_dtype,
        quantize=state.info.quantize,
        speculate=state.info.speculate,
        speculator=state.info.speculator,
        tool_call_parser=state.model_format.tool_call_parser,
        reasoning_parser=state.model_format.reasoning_parser,
        quantization=state.quantization or state.info.quantize,
        has_chat_template=bool(state.chat_template.sources),
        reads_images=state.inference.images is not None,
        sampling_defaults=dict(state.sampling_defaults),
    )
    return JsonResponse(answer.model_dump())


@routes.describes("/props", response_model=Props)
async def props(request: Request) -> Response:
    """The model and the limits of a request, in llama.cpp's form."""
    state = state_of(request)
    limits = state.inference.limits
    sampling = {_LLAMA_CPPS_NAMES.get(name, name): value for name, value in state.sampling_defaults.items()}
    answer = Props(
        default_generation_settings=PropsSettings(n_ctx=limits.max_total_tokens, params=sampling),
        total_slots=limits.max_concurrent_requests,
        model_alias=state.model_names[0],
        model_path=state.model_id,
        chat_template=state.chat_template.sources.get("default", ""),
        modalities=PropsModalities(vision=state.inference.images is not None, audio=False),
        build_info=f"tercet-{version('tercet')}",
    )
    return JsonResponse(answer.model_dump())


@routes.describes("/version", response_model=Version)
async def server_version(request: Request) -> Response:
    """This server's version, and the version of TGI whose API it serves."""
    return JsonResponse(Version(version=version("tercet"), tgi_version=TGI_VERSION).model_dump())


async def openapi_document(request: Request) -> Response:
    """The OpenAPI document under the name that other servers use; TGI's path for it is the framework's."""
    return JsonResponse(request.app.openapi())


@routes.describes("/metrics", response_class=Response, responses=_METRICS)
async def render_metrics(request: Request) -> Response:
    """Counters and histograms in Prometheus' text format."""
    text = state_of(request).inference.metrics.render()
    return Response(text, headers={"content-type": metrics.CONTENT_TYPE})


@routes.describes("/v1/models", span="openai_get_model_info", response_model=ModelList | MessagesModelList)
async def models(request: Request) -> Response:
    """The one model that is served, under each of its names; then its LoRA adapters. Clients of Anthropic's API, which
    send `anthropic-version`, get its form."""
    state = state_of(request)
    names = (*state.model_names, *filter(state.adapter_of, state.inference.adapters.names))
    if _VERSION_HEADER in request.headers:
        data = [_messages_model(state, name) for name in names]
        return JsonResponse(MessagesModelList(data=data, first_id=names[0], last_id=names[-1]).model_dump())
    return JsonResponse(ModelList(data=[_card(state, name) for name in names]).model_dump(exclude_none=True))


@routes.describes("/v1/models/{model_id:path}", span="openai_get_model_info", response_model=ModelCard | MessagesModel)
async def model(request: Request, model_id: str) -> Response:
    """The model or LoRA adapter of that name."""
    if not model_id:  # clients that join their base URL with a slash too many mean the list
        return await models(request)
    state = state_of(request)
    names = (state.model_id, BASE_MODEL)
    if model_id not in (*state.model_names, *names) and state.adapter_of(model_id) is None:
        text = f"The model does not exist; this server serves {', '.join(state.model_names)}"
        raise NotServedError(text, param="model", reason="unknown_model")
    name = state.model_names[0] if model_id in names else model_id
    if _VERSION_HEADER in request.headers:
        return JsonResponse(_messages_model(state, name).model_dump())
    return JsonResponse(_card(state, name).model_dump(exclude_none=True))


def _card(state: AppState, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        object="model",
        created=state.created,
        owned_by=state.model_names[0],
        max_model_len=state.inference.limits.max_total_tokens,
        root=state.adapter_of(name),
        parent=None if state.adapter_of(name) is None else state.model_names[0],
        sampling_defaults=dict(state.sampling_defaults),
    )


def _messages_model(state: AppState, name: str) -> MessagesModel:
    created = datetime.fromtimestamp(state.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return MessagesModel(id=name, display_name=name, created_at=created)
