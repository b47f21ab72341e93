"""TGI's own routes: `/`, `/generate`, `/generate_stream`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import Request
from starlette.responses import Response

from router.api.app_state import AppState, errors_of, request_id_of, state_of
from router.api.errors import ErrorAnswers, tgi_event_of
from router.api.http import sse
from router.api.http.disconnect import cancel_on_disconnect
from router.api.http.headers import json_headers, stream_headers
from router.api.json_out import JsonResponse
from router.api.openapi.answers import JSON_HEADERS
from router.api.routes import Routes
from router.api.tgi.schema import (
    CompatBody,
    GenerateBody,
    GenerateParameters,
    GenerateResponse,
    StreamEvent,
)
from router.events import Finished, Prefilled, Token, TokenGenerated
from router.generation.asked import GenerateRequest
from router.generation.checks import check_best_of, check_streamed
from router.generation.collect import GenerationResult
from router.generation.running import Running

routes = Routes("Text Generation", is_fast=True)


@routes.answers("/generate", GenerateBody, GenerateResponse, span="generate", headers=tuple(JSON_HEADERS))
async def generate(request: Request) -> Response:
    """Generate tokens; answer when the last one is there."""
    state = state_of(request)
    body = await state.read(request, GenerateBody)
    generation = await _generate(request, state, body)
    prefix = body.inputs if body.parameters.return_full_text else ""
    answer = generation_json(generation, body.parameters, prefix=prefix)
    return JsonResponse(answer, headers=json_headers(generation, state.config.compute_type))


@routes.answers("/generate_stream", GenerateBody, None, span="generate_stream", event=StreamEvent, stream="ends")
async def generate_stream(request: Request) -> Response:
    """Generate tokens; one server-sent event for each."""
    state = state_of(request)
    body = await state.read(request, GenerateBody)
    return await _stream(request, state, body, full_text=bool(body.parameters.return_full_text))


@routes.answers(
    "/",
    CompatBody,
    list[GenerateResponse],
    span="compat_generate",
    event=StreamEvent,
    stream="ends",
    headers=tuple(JSON_HEADERS),
)
async def compat_generate(request: Request) -> Response:
    """Generate as `/generate` in a list; with `stream` as `/generate_stream`."""
    state = state_of(request)
    return await answer_compat(request, state, await state.read(request, CompatBody))


async def answer_compat(request: Request, state: AppState, body: CompatBody) -> Response:
    """Answer `POST /`, by any route."""
    # The default of this route only: the prompt is repeated (the model's task is taken to be text generation).
    full_text = body.parameters.return_full_text is not False
    if body.stream:
        return await _stream(request, state, body, full_text=full_text)
    generation = await _generate(request, state, body)
    answer = generation_json(generation, body.parameters, prefix=body.inputs if full_text else "")
    return JsonResponse([answer], headers=json_headers(generation, state.config.compute_type))


async def _generate(request: Request, state: AppState, body: GenerateBody) -> GenerationResult:
    inference, asked = state.inference, request_of(body)
    best_of = asked.best_of or 1
    check_best_of(best_of, inference.limits)

    async def work() -> GenerationResult:
        with inference.take_permits(best_of, request_id=request_id_of(request)) as permits:
            if best_of > 1:
                return await inference.generate_best_of(asked, permits)
            return await inference.generate(asked, permits)

    return await cancel_on_disconnect(request.receive, work())


async def _stream(request: Request, state: AppState, body: GenerateBody, *, full_text: bool) -> Response:
    inference, asked = state.inference, request_of(body)
    check_streamed(asked)
    with inference.take_permits(request_id=request_id_of(request)) as permits:
        running = await cancel_on_disconnect(request.receive, inference.start(asked, permits))
    return sse.EventStream(
        _events(
            running,
            errors_of(request),
            details=body.parameters.details,
            prefix=asked.inputs if full_text else "",
        ),
        headers=stream_headers(running, compute_type=state.config.compute_type),
        close=running.close,
        stalled_s=state.config.stalled_client_seconds,
    )


async def _events(running: Running, errors: ErrorAnswers, *, details: bool, prefix: str) -> AsyncGenerator[bytes, None]:
    index = 0
    try:
        while True:
            event = await running.next_event()
            if isinstance(event, Prefilled):
                continue
            index += 1
            yield sse.event(token_event(index, event, running, details=details, prefix=prefix))
            if isinstance(event, Finished):
                return
    except Exception as error:
        yield sse.frame(tgi_event_of(errors.of_stream(error, running.request_id)))


def token_event(
    index: int, event: TokenGenerated | Finished, running: Running, *, details: bool, prefix: str
) -> dict[str, Any]:
    """Return one event of `/generate_stream`, in TGI's key order."""
    answer: dict[str, Any] = {"index": index, "token": _token(event.token)}
    if event.top_tokens:
        answer["top_tokens"] = [_token(token) for token in event.top_tokens]
    if not isinstance(event, Finished):
        answer["generated_text"] = answer["details"] = None
        return answer
    answer["generated_text"] = prefix + event.text
    answer["details"] = None
    if details:
        answer["details"] = {
            "finish_reason": event.finish_reason,
            "generated_tokens": event.generated_tokens,
            "seed": event.seed,
            "input_length": running.request.input_length,
        }
    return answer


def generation_json(generation: GenerationResult, parameters: GenerateParameters, *, prefix: str) -> dict[str, Any]:
    """Return `/generate`'s answer in TGI's key order; `prefix` before each text."""
    answer: dict[str, Any] = {"generated_text": prefix + generation.text}
    if parameters.details or parameters.decoder_input_details:
        details = _details(generation)
        top_tokens = details.pop("top_tokens", None)
        if generation.best_of_sequences:
            details["best_of_sequences"] = [
                {"generated_text": prefix + other.text} | _details(other) for other in generation.best_of_sequences
            ]
        if top_tokens is not None:
            details["top_tokens"] = top_tokens
        answer["details"] = details
    return answer


def _details(generation: GenerationResult) -> dict[str, Any]:
    details: dict[str, Any] = {
        "finish_reason": generation.finish_reason,
        "generated_tokens": generation.generated_tokens,
        "seed": generation.seed,
        "prefill": [{"id": token.id, "text": token.text, "logprob": token.logprob} for token in generation.prefill],
        "tokens": [_token(token) for token in generation.tokens],
    }
    if generation.top_tokens:
        details["top_tokens"] = [[_token(token) for token in tokens] for tokens in generation.top_tokens]
    return details


def _token(token: Token) -> dict[str, Any]:
    return {"id": token.id, "text": token.text, "logprob": token.logprob, "special": token.special}


def request_of(body: GenerateBody) -> GenerateRequest:
    """The body as validation takes it."""
    parameters = body.parameters
    return GenerateRequest.of(
        parameters,
        inputs=body.inputs,
        best_of=parameters.best_of,
        max_new_tokens=parameters.max_new_tokens,
        stop=tuple(parameters.stop),
        truncate=parameters.truncate,
        decoder_input_details=parameters.decoder_input_details,
        top_n_tokens=parameters.top_n_tokens,
        grammar=None if parameters.grammar is None else parameters.grammar.asked,
        adapter_id=parameters.adapter_id,
    )
