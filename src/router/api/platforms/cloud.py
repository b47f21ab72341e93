"""The front doors of SageMaker (`/invocations`) and Vertex AI (`/vertex`)."""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter, Request
from starlette.responses import Response

from router.api import chat, completions, generate
from router.api.app_state import Served, served_of
from router.api.errors import BodyError
from router.api.http.body import read_body, read_one_of
from router.api.http.json_out import JsonResponse
from router.api.openapi.openapi import documented
from router.api.platforms.batch import Job, job_of, texts_of
from router.errors import ValidationError
from router.generation.running import Admission, Generation, Run
from router.openai.chat.chunks import without_stop
from router.schemas.chat import ChatBody, ChatCompletion
from router.schemas.completion import Completion, CompletionBody
from router.schemas.generate import CompatBody, GenerateBody, GenerateResponse
from router.schemas.platforms import VertexBody, VertexResponse

routes = APIRouter(tags=["Platforms"])


@routes.post(
    "/invocations",
    **documented((CompatBody, ChatBody, CompletionBody), list[GenerateResponse] | ChatCompletion | Completion),
)
async def invocations(request: Request) -> Response:
    """`inputs` are answered as by `/`, `messages` as by the chat route, a `prompt` as by the completions route."""
    served = served_of(request)
    body = await read_one_of(request, CompatBody, ChatBody, CompletionBody, limit=served.config.payload_limit)
    if isinstance(body, CompatBody):
        return await generate.answer_compat(request, served, body)
    if isinstance(body, ChatBody):
        return await chat.answer(request, served, body)
    assert isinstance(body, CompletionBody)
    return await completions.answer(request, served, body)


@routes.post("/vertex", **documented(VertexBody, VertexResponse))
async def vertex(request: Request) -> Response:
    """One text for each instance, which is a native body or a chat."""
    served = served_of(request)
    body = await read_body(request, VertexBody, limit=served.config.payload_limit)
    served.inference.metrics.count("tgi_request_count")
    if not body.instances:
        raise BodyError(422, "Input validation error", "Input validation error: `instances` cannot be empty")
    jobs = [
        _chat_job(served, instance) if isinstance(instance, ChatBody) else _text_job(served, instance)
        for instance in body.instances
    ]
    return JsonResponse({"predictions": await texts_of(request, served, jobs)})


def _text_job(served: Served, instance: GenerateBody) -> Job:
    """TGI always samples here; so do we, unless `do_sample` is false by name."""
    samples = instance.parameters.do_sample or "do_sample" not in instance.parameters.model_fields_set
    asked = generate.request_of(instance)
    sampling = replace(asked.sampling, do_sample=samples)
    asked = replace(asked, sampling=sampling, decoder_input_details=False)
    prefix = asked.inputs if instance.parameters.return_full_text else ""
    return job_of(served.inference, asked, lambda generation: prefix + generation.text)


def _chat_job(served: Served, instance: ChatBody) -> Job:
    if instance.n is not None and instance.n != 1:
        raise served.inference.refused(ValidationError("`n` other than 1 is not supported in an instance"))
    one = chat.Chat(served, instance)

    async def start(admission: Admission) -> Run:
        return await one.start_choice(await one.request(), 0, admission)

    return Job(start, _chat_text)


def _chat_text(generation: Generation) -> str:
    """A tool call comes as the model has written it, as in TGI."""
    return without_stop(generation.text, generation.request.stopping.stop_sequences, generation.finish_reason)
