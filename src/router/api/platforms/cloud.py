"""SageMaker's `/invocations` and Vertex AI's `/vertex`."""

from __future__ import annotations

from dataclasses import replace

from fastapi import Request
from starlette.responses import Response

from router.answers.stops import without_stop
from router.api.app_state import AppState, state_of
from router.api.chat import routes as chat
from router.api.chat.chat import Chat
from router.api.chat.schema import ChatBody
from router.api.completions import routes as completions
from router.api.completions.schema import CompletionBody
from router.api.errors import BodyError
from router.api.json_out import JsonResponse
from router.api.platforms.batch import BatchItem, answers_of, item_of
from router.api.platforms.schema import (
    SagemakerResponse,
    SagemakerStreamResponse,
    VertexBody,
    VertexChat,
    VertexResponse,
)
from router.api.routes import Routes
from router.api.tgi import routes as generate
from router.api.tgi.schema import CompatBody, GenerateBody
from router.errors import ValidationError
from router.generation.collect import GenerationResult
from router.generation.permits import HeldPermits
from router.generation.running import Run

routes = Routes("Platforms")


@routes.answers(
    "/invocations",
    (CompatBody, ChatBody, CompletionBody),
    SagemakerResponse,
    span="sagemaker_compatibility",
    event=SagemakerStreamResponse,
    stream="ends",
)
async def invocations(request: Request) -> Response:
    """`inputs` are answered as by `/`, `messages` as by the chat route, a `prompt` as by the completions route."""
    state = state_of(request)
    body = await state.read_one_of(request, CompatBody, ChatBody, CompletionBody)
    if isinstance(body, CompatBody):
        return await generate.answer_compat(request, state, body)
    if isinstance(body, ChatBody):
        return await chat.answer(request, state, body)
    assert isinstance(body, CompletionBody)
    return await completions.answer(request, state, body)


@routes.answers("/vertex", VertexBody, VertexResponse, span="vertex_compatibility")
async def vertex(request: Request) -> Response:
    """One text for each instance, which is a body of `/generate` or a chat; a chat completion for a chat whose
    `@requestFormat` asks for it."""
    state = state_of(request)
    body = await state.read(request, VertexBody)
    if not body.instances:
        text = "Input validation error: `instances` cannot be empty"
        raise BodyError(422, "Input validation error", text, param="instances")
    items = [
        _chat_item(state, instance) if isinstance(instance, VertexChat) else _text_item(state, instance)
        for instance in body.instances
    ]
    return JsonResponse({"predictions": await answers_of(request, state, items)})


def _text_item(state: AppState, instance: GenerateBody) -> BatchItem:
    """Make a generation that samples, as TGI, unless `do_sample` is false."""
    samples = instance.parameters.do_sample or "do_sample" not in instance.parameters.model_fields_set
    asked = generate.request_of(instance)
    sampling = replace(asked.sampling, do_sample=samples)
    asked = replace(asked, sampling=sampling, decoder_input_details=False)
    prefix = asked.inputs if instance.parameters.return_full_text else ""
    return item_of(state.inference, asked, lambda generation: prefix + generation.text)


def _chat_item(state: AppState, instance: VertexChat) -> BatchItem:
    if instance.n is not None and instance.n != 1:
        raise ValidationError("`n` other than 1 is not supported in an instance", param="n", reason="unsupported")
    one = Chat(state, instance)

    async def start(permits: HeldPermits) -> Run:
        return await one.start_choice(await one.request(), 0, permits)

    if instance.request_format is None:
        return BatchItem(start, _chat_text)
    return BatchItem(start, lambda generation: chat.whole(one, [generation]))


def _chat_text(generation: GenerationResult) -> str:
    """Return the text, with tool calls as written, as TGI."""
    return without_stop(generation.text, generation.request.stopping.stop_sequences, generation.finish_reason)
