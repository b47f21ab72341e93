"""`/v1/completions`, at once and streamed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from fastapi import Request
from starlette.responses import Response

from router.answers.stops import StopHoldBack, stops_left_out
from router.api.app_state import AppState, StreamFailure, request_id_of, state_of, stream_failure
from router.api.completions.answer import (
    ChoiceStream,
    CompletionHead,
    completion,
    echoed,
    infill_answer,
    infill_event,
    without_token,
    without_tokens,
)
from router.api.completions.infill import Extra, Infill, with_ids
from router.api.completions.prompt import Counts, check_served, counts_of, requests_of
from router.api.completions.schema import (
    Completion,
    CompletionBody,
    CompletionChunk,
    InfillAnswer,
    InfillBody,
    InfillEvent,
)
from router.api.errors import RENAMED
from router.api.http import sse
from router.api.http.disconnect import cancel_on_disconnect
from router.api.http.headers import stream_headers, summed_headers
from router.api.json_out import JsonResponse
from router.api.openai.answers import usage
from router.api.openai.logprobs import TokenNames
from router.api.openai.parameters import with_defaults
from router.api.openapi.answers import SUMMED_HEADERS
from router.api.routes import Routes
from router.events import Finished, Predicted, Prefilled
from router.generation.asked import GenerateRequest
from router.generation.checks import check_best_of
from router.generation.collect import GenerationResult, arrivals
from router.generation.permits import HeldPermits
from router.generation.running import Running
from router.tracing import name_response

routes = Routes("Completions", is_fast=True)


@routes.answers(
    "/v1/completions",
    CompletionBody,
    Completion,
    span="completions",
    event=CompletionChunk,
    headers=SUMMED_HEADERS,
)
async def completions(request: Request) -> Response:
    """Continue one text or several; with `stream`, as server-sent events that end with `[DONE]`."""
    state = state_of(request)
    return await answer(request, state, await state.read(request, CompletionBody))


async def answer(request: Request, state: AppState, body: CompletionBody) -> Response:
    """Answer a completion body of any route."""
    inference = state.inference
    body = with_defaults(body, state.sampling_defaults)
    counts = _counts(state, body)
    head = CompletionHead.new("cmpl", state.adapter_of(body.model) or state.model_names[0])
    names = _names(state)
    name_response(head.id)
    with inference.take_permits(counts.generations, request_id=request_id_of(request)) as permits:
        if body.suffix is not None:
            body = await cancel_on_disconnect(request.receive, Infill(inference.tokenizer).filled(body))
        if body.stream:
            running = await cancel_on_disconnect(request.receive, _start(state, body, counts, permits))
            head = head.served(running[0].request, body.service_tier)
            return _stream(state, body, counts, head, running, stream_failure(request))
        groups, offsets = await cancel_on_disconnect(request.receive, _generate(state, body, counts, permits))
    head = head.served(groups[0][0].request, body.service_tier)
    headers = summed_headers(groups, state.config.compute_type)
    if offsets:  # lists of all tokens of the prompts, which take long: other requests continue meanwhile
        return await asyncio.to_thread(
            lambda: JsonResponse(completion(head, body, groups, offsets, names), headers=headers)
        )
    return JsonResponse(completion(head, body, groups, offsets, names), headers=headers)


@routes.answers("/infill", InfillBody, InfillAnswer, span="infill", event=InfillEvent, stream="ends")
async def infill(request: Request) -> Response:
    """Fill the gap between two texts, in llama.cpp's form."""
    state = state_of(request)
    body = with_defaults(await state.read(request, InfillBody), state.sampling_defaults)
    counts = _counts(state, body)
    request.scope[RENAMED]["suffix"] = "input_suffix"
    gaps = Infill(state.inference.tokenizer)
    marks = gaps.marks()
    (begin,) = body.prompt
    assert isinstance(begin, str)
    prompt = gaps.ids(
        body.input_prefix,
        body.input_suffix,
        begins_with_marks=body.add_special_tokens,
        begin=begin,
        extras=[Extra(name=one.filename, text=one.text) for one in body.input_extra],
    )
    model = state.adapter_of(body.model) or state.model_names[0]
    with state.inference.take_permits(1, request_id=request_id_of(request)) as permits:
        asked = with_ids(body, [await cancel_on_disconnect(request.receive, prompt)], marks)
        if body.stream:
            running = await cancel_on_disconnect(request.receive, _start(state, asked, counts, permits))
            return sse.EventStream(
                infill_events(asked, running[0], model, stream_failure(request)),
                headers=stream_headers(*running, compute_type=state.config.compute_type),
                close=running[0].close,
                stalled_s=state.config.stalled_client_seconds,
            )
        groups, _ = await cancel_on_disconnect(request.receive, _generate(state, asked, counts, permits))
    return JsonResponse(
        infill_answer(asked, groups[0][0], model), headers=summed_headers(groups, state.config.compute_type)
    )


def _names(state: AppState) -> TokenNames:
    return TokenNames(state.inference.tokenizer.token_bytes)


def _counts(state: AppState, body: CompletionBody) -> Counts:
    """Refuse what prompts do not matter for."""
    limits = state.inference.limits
    counts = counts_of(body, limits)
    check_served(body, counts, prompt_logprobs=state.config.request_logprobs)
    if counts.best_of > counts.n:
        check_best_of(counts.best_of, limits)
    return counts


def _requests(state: AppState, body: CompletionBody, counts: Counts) -> list[GenerateRequest]:
    adapter = state.adapter_of(body.model)
    return [replace(request, adapter_id=adapter) for request in requests_of(body, counts)]


async def _generate(
    state: AppState, body: CompletionBody, counts: Counts, permits: HeldPermits
) -> tuple[list[list[GenerationResult]], list[list[int]]]:
    """Generate each prompt, with its tokens' places if listed."""
    generations = await state.inference.generate_many(_requests(state, body, counts), permits)
    if body.only_echoes:
        generations = [without_tokens(generation) for generation in generations]
    groups = [generations[i : i + counts.best_of] for i in range(0, len(generations), counts.best_of)]
    if not body.echo or body.logprobs is None:
        return groups, []
    tokenizer = state.inference.tokenizer
    offsets: list[list[int]] = []
    for prompt, group in zip(body.prompt, groups, strict=True):
        if isinstance(prompt, str):
            offsets.append(await tokenizer.offsets(prompt, add_special_tokens=True))
        else:
            offsets.append(await tokenizer.offsets_of_ids(group[0].request.input_ids))
    return groups, offsets


async def _start(state: AppState, body: CompletionBody, counts: Counts, permits: HeldPermits) -> list[Running]:
    return await state.inference.start_many(_requests(state, body, counts), permits)


def _stream(
    state: AppState,
    body: CompletionBody,
    counts: Counts,
    head: CompletionHead,
    running: Sequence[Running],
    failure: StreamFailure,
) -> Response:
    def close() -> None:
        for one in running:
            one.close()

    return sse.EventStream(
        _events(body, counts, head, running, failure, _names(state)),
        headers=stream_headers(*running[:: counts.n], compute_type=state.config.compute_type),
        close=close,
        stalled_s=state.config.stalled_client_seconds,
    )


async def _events(
    body: CompletionBody,
    counts: Counts,
    head: CompletionHead,
    running: Sequence[Running],
    failure: StreamFailure,
    names: TokenNames,
) -> AsyncGenerator[bytes, None]:
    """Stream all choices' tokens; a failed choice does not end the others."""
    choices = [
        ChoiceStream(head, index, one.request, body, echoed(body, index // counts.n, one.request), names)
        for index, one in enumerate(running)
    ]
    num_unfinished, generated = len(running), [0] * len(running)
    cached = [0] * len(running)
    predicted: list[Predicted | None] = []
    options = body.stream_options
    num_prompt_tokens = sum(one.request.input_length for one in running[:: counts.n])
    try:
        async with aclosing(arrivals(running)) as items:
            async for index, item in items:
                if isinstance(item, Prefilled):
                    continue
                if isinstance(item, Exception):
                    num_unfinished -= 1
                    generated[index] = 0
                    piece = sse.frame(failure(item))
                else:
                    if body.only_echoes and isinstance(item, Finished):
                        item = without_token(item)
                    generated[index] += not body.only_echoes
                    chunk = choices[index].chunk(item)
                    if options.continuous_usage_stats:
                        chunk |= {"usage": usage(num_prompt_tokens, sum(generated), cached_tokens=None)}
                    piece = sse.event(chunk)
                    if isinstance(item, Finished):
                        num_unfinished -= 1
                        cached[index] = item.cached_tokens
                        predicted.append(item.predicted)
                if not num_unfinished:
                    if options.include_usage:
                        num_cached = sum(min(cached[i : i + counts.n]) for i in range(0, len(cached), counts.n))
                        used = usage(num_prompt_tokens, sum(generated), cached_tokens=num_cached, predicted=predicted)
                        piece += sse.event(head.answer([], used))
                    piece += sse.DONE
                yield piece
    except Exception as error:  # of ours, not of a generation
        yield sse.frame(failure(error)) + sse.DONE


async def infill_events(
    body: CompletionBody, running: Running, model: str, failure: StreamFailure
) -> AsyncGenerator[bytes, None]:
    """Stream a gap's text, in llama.cpp's form."""
    stops = stops_left_out(running.request, keeps_stop=body.include_stop_str_in_output)
    hold_back = StopHoldBack(stops)
    async with aclosing(arrivals([running])) as items:
        async for _, item in items:
            if isinstance(item, Exception):
                yield sse.frame(failure(item))
            elif not isinstance(item, Prefilled):
                yield sse.event(infill_event(item, running.request, hold_back, stops, model))
