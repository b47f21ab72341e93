"""KServe's v2 protocol as TGI speaks it; served with `--kserve-api`."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import Response

from router.api.app_state import AppState, state_of
from router.api.errors import BodyError
from router.api.json_out import JsonResponse
from router.api.platforms.batch import BatchItem, answers_of, item_of
from router.api.platforms.schema import InferBody, InferInput, InferResponse, Live, ServerMetadata
from router.api.routes import Routes
from router.api.tgi.routes import request_of
from router.api.tgi.schema import GenerateBody
from router.config import TGI_VERSION

routes = Routes("KServe")
_MODEL = "/v2/models/{name:path}/versions/{version}"


@routes.describes("/v2", response_model=ServerMetadata)
async def server(request: Request) -> Response:
    """The server and what it offers."""
    return JsonResponse(
        {"name": "text-generation-inference", "version": TGI_VERSION, "extensions": ["health", "models", "metrics"]}
    )


@routes.describes(f"{_MODEL}/ready", "/v2/health/ready", "/v2/health/live", response_model=Live)
async def live(request: Request) -> Response:
    """Always true, as in TGI; `/health` asks the shards."""
    return JsonResponse({"live": True})


@routes.describes(_MODEL, response_model=ServerMetadata)
async def model(request: Request, name: str, version: str) -> Response:
    """The names of the path; there is only one model."""
    return JsonResponse({"name": name, "version": version, "extensions": ["infer", "ready"]})


@routes.answers(f"{_MODEL}/infer", InferBody, InferResponse, span="kserve_model_infer")
async def infer(request: Request) -> Response:
    """Generates for each input, with the same parameters; the outputs are in the order of the inputs."""
    state = state_of(request)
    body = await state.read(request, InferBody)
    if len(body.inputs) != len(body.outputs):
        raise BodyError(
            422,
            "length mismatch",
            f"`inputs` and `outputs` must have the same length. Given: {len(body.inputs)} and {len(body.outputs)}",
        )
    texts = await answers_of(request, state, [_item(state, body, one) for one in body.inputs])
    outputs = []
    for output, text in zip(body.outputs, texts, strict=True):
        data = list(text.encode())
        outputs.append({"name": output.name, "shape": [1, len(data)], "datatype": "BYTES", "data": data})
    return JsonResponse({"id": body.id, "outputs": outputs})


def _item(state: AppState, body: InferBody, one: InferInput) -> BatchItem:
    try:
        text = bytes(one.data).decode()
    except UnicodeDecodeError:
        raise BodyError(422, "utf8", f"the data of the input {one.name[:100]} is not UTF-8") from None
    prefix = text if body.parameters.return_full_text else ""
    asked = request_of(GenerateBody(inputs=text, parameters=body.parameters))
    return item_of(state.inference, asked, lambda generation: prefix + generation.text)
