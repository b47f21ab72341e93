"""Health, info, metrics and models of servers for vectors or scores."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any

from fastapi import Request
from starlette.responses import Response

from router import metrics
from router.api.embeddings import routes as tei
from router.api.embeddings.root import RootBody
from router.api.embeddings.schema import PooledCard, PooledInfo, PooledModels, PredictBody, RerankBody
from router.api.embeddings.state import PooledState, state_of
from router.api.errors import NotServedError
from router.api.json_out import JsonResponse
from router.api.routes import Routes
from router.errors import UnhealthyError

TEI_VERSION = "1.9.0"
"""The TEI level whose API this is."""

routes = Routes("Service")


@routes.describes("/health", "/ping", "/", span="health")
async def health(request: Request) -> Response:
    """200 without a body if the shards answer, else 503."""
    if not await state_of(request).inference.is_healthy():
        raise UnhealthyError
    return Response()


@routes.describes("/info", span="get_model_info", response_model=PooledInfo)
async def info(request: Request) -> Response:
    """The model and the limits of a request."""
    state = state_of(request)
    limits = state.inference.limits
    return JsonResponse(
        {
            "model_id": state.model_id,
            "model_sha": state.model_sha,
            "model_dtype": state.info.dtype.removeprefix("torch."),
            "served_model_name": state.model_names[0],
            "model_type": _kind(state),
            "max_concurrent_requests": limits.max_concurrent_requests,
            "max_input_length": limits.max_input_tokens,
            # A longer text is a step of its own.
            "max_batch_tokens": max(limits.max_batch_tokens, limits.max_input_tokens),
            "max_batch_requests": limits.max_batch_size,
            "max_client_batch_size": limits.max_client_batch_size,
            "auto_truncate": limits.auto_truncate,
            "tokenization_workers": state.config.validation_workers,
            "version": TEI_VERSION,
            "sha": state.git_sha,
            "docker_label": state.docker_label,
            "tercet_version": version("tercet"),
            "task": state.task,
            "dimensions": limits.dimensions,
        }
    )


def _kind(state: PooledState) -> dict[str, Any]:
    """Return TEI's word for the model, and its facts."""
    if state.task == "embed":
        return {"embedding": {"pooling": state.pooling}}
    labels = {
        "id2label": {str(place): label for place, label in state.labels.items()},
        "label2id": {label: place for place, label in state.labels.items()},
    }
    return {"reranker" if state.task == "rerank" else "classifier": labels}


@routes.describes("/version")
async def server_version(request: Request) -> Response:
    """This server's version, and the version of TEI whose API it serves."""
    return JsonResponse({"version": version("tercet"), "tei_version": TEI_VERSION})


@routes.describes("/metrics", response_class=Response)
async def render_metrics(request: Request) -> Response:
    """Counters and histograms in Prometheus' text format."""
    text = state_of(request).inference.metrics.render()
    return Response(text, headers={"content-type": metrics.CONTENT_TYPE})


@routes.describes("/v1/models", span="openai_get_model_info", response_model=PooledModels)
async def models(request: Request) -> Response:
    """The one model that is served, under each of its names."""
    state = state_of(request)
    return JsonResponse({"object": "list", "data": [_card(state, name).model_dump() for name in state.model_names]})


@routes.describes("/v1/models/{model_id:path}", span="openai_get_model_info", response_model=PooledCard)
async def model(request: Request, model_id: str) -> Response:
    """The model of that name."""
    if not model_id:  # clients that join their base URL with a slash too many mean the list
        return await models(request)
    state = state_of(request)
    if model_id not in state.model_names:
        text = f"The model does not exist; this server serves {', '.join(state.model_names)}"
        raise NotServedError(text, param="model", reason="unknown_model")
    return JsonResponse(_card(state, model_id).model_dump())


def _card(state: PooledState, name: str) -> PooledCard:
    return PooledCard(
        id=name,
        created=state.created,
        owned_by=state.model_names[0],
        max_model_len=state.inference.limits.max_input_tokens,
        task=state.task,
    )


async def invocations(request: Request) -> Response:
    """SageMaker's and Hugging Face Endpoints' route: the one of TEI's that the model is for."""
    return await _of_task(state_of(request))(request)


def _of_task(state: PooledState) -> Callable[[Request], Awaitable[Response]]:
    if state.task == "rerank":
        return tei.rerank
    if state.task == "classify":
        return tei.predict
    return tei.embed_sparse if state.is_sparse else tei.embed_or_compare


_BODIES = (RootBody, PredictBody, RerankBody)
for _path in ("/", "/invocations"):
    routes.answers(_path, _BODIES, Any, span="invocations")(invocations)


async def openapi_document(request: Request) -> Response:
    """The OpenAPI document under the name that other servers use."""
    return JsonResponse(request.app.openapi())
