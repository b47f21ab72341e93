"""`/v1/chat/completions`, at once and streamed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import Request
from starlette.responses import Response

from router.answers.formats.choice import ModelFormat
from router.answers.formats.format import IdKind
from router.answers.formats.reader import AnswerReader
from router.answers.reading import CallIds, ChoiceReader
from router.answers.stop_watch import StopWatch
from router.answers.tgi_form.two_passes import TwoPasses, permits_of_one_pass
from router.api.app_state import AppState, StreamFailure, request_id_of, state_of, stream_failure
from router.api.chat.answer import completion, prompt_tokens_of, reasoning_tokens_of
from router.api.chat.calls import CallStream
from router.api.chat.chunks import ChatHead, ChoiceStream, usage_chunk
from router.api.chat.prompt import (
    answered,
    ending_of,
    images_of,
    model_name,
    request_of,
    turns_of,
    variables_of,
    with_counted_ids,
    with_marked_images,
)
from router.api.chat.read_stream import ReadStream
from router.api.chat.schema import ChatBody, ChatChunk, ChatCompletion
from router.api.chat.tools import OfferedTools, offered_tools
from router.api.http import sse
from router.api.http.disconnect import cancel_on_disconnect
from router.api.http.headers import chat_headers, stream_headers
from router.api.json_out import JsonResponse, dumps
from router.api.openai.answers import usage
from router.api.openai.logprobs import TokenNames
from router.api.openai.parameters import choices_of, with_defaults
from router.api.openapi.answers import JSON_HEADERS
from router.api.routes import Routes
from router.errors import ValidationError
from router.events import Finished, Predicted, Prefilled
from router.generation.api_rules import CHAT, ApiRules
from router.generation.asked import GenerateRequest
from router.generation.collect import GenerationResult, collect_all, end_all, interleaved, start_all
from router.generation.permits import HeldPermits
from router.generation.running import Run
from router.grammar.checker import AskedGrammar
from router.images.prompt import ImagePrompts
from router.request import AnswerKind, ValidRequest
from router.template.messages import Turn
from router.tracing import name_response

AnyStream = ChoiceStream | CallStream | ReadStream

routes = Routes("Chat", is_fast=True)

_MANY_MESSAGES = 500
_BYTES_OF_A_MESSAGE = 100  # at least, and what takes time is their number


@routes.answers(
    "/v1/chat/completions",
    ChatBody,
    ChatCompletion,
    span="chat_completions",
    event=ChatChunk,
    headers=tuple(JSON_HEADERS),
)
async def chat_completions(request: Request) -> Response:
    """Answer a chat; with `stream`, as server-sent events that end with `[DONE]`."""
    state = state_of(request)
    return await answer(request, state, await state.read(request, ChatBody))


async def answer(request: Request, state: AppState, body: ChatBody) -> Response:
    """Answer a chat body of any route."""
    chat = Chat(state, body)
    head = ChatHead.new("chatcmpl", model_name(body.model, state.model_names[0]))
    name_response(head.id)
    with state.inference.take_permits(chat.number, request_id=request_id_of(request)) as permits:
        if body.stream:
            running = await cancel_on_disconnect(request.receive, chat.start(permits))
            return _stream(chat, head.served(running[0].request, body.service_tier), running, stream_failure(request))
        generations = await cancel_on_disconnect(request.receive, chat.generate(permits))
    return JsonResponse(whole(chat, generations, head), headers=chat_headers(generations, state.config.compute_type))


def whole(chat: Chat, generations: Sequence[GenerationResult], head: ChatHead | None = None) -> dict[str, Any]:
    """Return the answer to a chat that is not streamed."""
    head = head or ChatHead.new("chatcmpl", model_name(chat.body.model, chat.state.model_names[0]))
    return completion(
        head.served(generations[0].request, chat.body.service_tier),
        generations,
        chat.reading_of,
        logprobs=chat.names,
        tools=chat.tools,
        keeps_stop=chat.body.include_stop_str_in_output,
    )


async def first_request(state: AppState, body: ChatBody, api: ApiRules = CHAT) -> GenerateRequest:
    """Return one choice's generation, with tools its call; `inputs` is the rendered chat."""
    return await Chat(state, body, api).request()


async def prompt_tokens(state: AppState, body: ChatBody, api: ApiRules = CHAT) -> int:
    """Count the tokens of a chat's prompt."""
    prompt = await state.inference.prompt_of(await first_request(state, body, api))
    tokenizer = state.inference.tokenizer
    return len(await tokenizer.encode(prompt.text, add_special_tokens=prompt.add_special_tokens, truncate=None))


class Chat:
    """A chat body on its way to generations."""

    def __init__(self, state: AppState, body: ChatBody, api: ApiRules = CHAT) -> None:
        """Check the body.

        Args:
            api: The rules of the API it came by.
        """
        self._api = api
        self._inference = state.inference
        self._template = state.chat_template
        self.state = state
        self._prompt = ""
        self._begun = ""  # what the client has written of the answer
        self._image_prompts = images = state.inference.images
        if images is not None and not self._template.iterates_content:
            body = with_marked_images(body, images.reader.max_images)
        self.body = body = with_defaults(body, state.sampling_defaults)
        self._images = images_of(body)
        if images is not None:
            images.reader.check_number(len(self._images))
        self.number = _number_of_choices(state, body)
        self.tools = offered_tools(body)
        self._has_frames = not state.config.disable_grammar_support
        self._is_native = self._speaks_natively()

    @property
    def names(self) -> TokenNames | None:
        """Name tokens for log probabilities, if wanted."""
        return TokenNames(self._inference.tokenizer.token_bytes) if self.body.logprobs else None

    async def request(self) -> GenerateRequest:
        """Return a choice's generation, a tool's call if there are any."""
        return await self._request(self.tools)

    async def start(self, permits: HeldPermits) -> list[Run]:
        """Queue the generations of all choices, or none."""
        requests = choices_of(await self.request(), self.number)
        return await start_all(
            partial(self.start_choice, request, index, permits) for index, request in enumerate(requests)
        )

    async def generate(self, permits: HeldPermits) -> list[GenerationResult]:
        return await collect_all(await self.start(permits))

    async def start_choice(self, request: GenerateRequest, index: int, permits: HeldPermits) -> Run:
        """Queue a choice; two passes take one permit."""
        if not self._has_two_passes:
            return await self._start(request, permits)

        async def as_text(permits: HeldPermits) -> Run:
            return await self._start(choices_of(await self._request(None), self.number)[index], permits)

        decision = await self._inference.start(request, permits_of_one_pass(permits))
        return TwoPasses(decision, as_text, permits)

    async def _start(self, request: GenerateRequest, permits: HeldPermits) -> Run:
        running = await self._inference.start(request, permits)
        if request.stop and (reading := self.reading_of(running.request)) is not None:
            return StopWatch(running, reading[0])
        return running

    def reading_of(self, request: ValidRequest) -> tuple[ChoiceReader, CallIds] | None:
        """Return what reads a choice's tokens, unless text only or TGI's calls."""
        reader = self._reader() if request.answer == "marked" else None
        if reader is None:
            return None
        num_earlier = sum(len(message.tool_calls or ()) for message in self.body.messages)
        choice = ChoiceReader(
            reader,
            request.stopping.stop_sequences,
            keeps_stop=self.body.include_stop_str_in_output,
            min_tokens=request.sampling.min_tokens,
            max_calls=1 if self._has_one_call else None,
            hides_reasoning=self.body.hides_reasoning,
        )
        return choice, CallIds(self.state.model_format.ids, num_earlier)

    def _reader(self) -> AnswerReader | None:
        """Return what reads an answer that is not TGI's call, if it has marks."""
        schemas = self.tools.schemas if self._is_native and self.tools is not None else None
        return self.state.model_format.reader(schemas, self._prompt, begun=self._begun)

    @property
    def _has_one_call(self) -> bool:
        return self.state.model_format.has_one_call or not self.body.parallel_tool_calls

    def _speaks_natively(self) -> bool:
        """Whether calls have the model's format: free, or forced by grammar."""
        format, tools, constraint = self.state.model_format, self.tools, self.body.constraint
        if format.format is None or tools is None:
            return False
        can_force = self._has_frames and format.can_force(tools.enforced)
        if not tools.or_none:
            return can_force  # and the constraint is of answers in words
        if constraint is None:
            return True
        # One grammar for both, where it can tell them apart.
        return can_force and constraint.type not in ("regex", "grammar") and format.takes_forms

    @property
    def _has_two_passes(self) -> bool:
        """Whether the model first decides, in TGI's form, and else answers in words."""
        return self.tools is not None and self.tools.or_none and not self._is_native

    def _own_grammar(self, tools: OfferedTools | None, asked: AskedGrammar | None) -> AskedGrammar | None:
        """Return the model's own format's grammar instead, if there is one."""
        format, budget = self.state.model_format, self.body.thinking_budget
        if not self._has_frames:
            if budget is not None and asked is None and format.may_think(self._prompt):
                text = "a budget of reasoning tokens needs grammars, which `--disable-grammar-support` switches off"
                raise ValidationError(text, reason="unsupported")
            return asked
        schemas = tools.enforced if tools is not None and format.can_force(tools.enforced) else {}
        if asked is not None:
            return asked if tools is not None else format.behind_thinking(asked, self._prompt, budget)
        if (form := self.body.constraint) is not None and tools is not None and tools.or_none:
            return format.calls_or_answer(schemas, form, self._prompt, is_one=self._has_one_call, budget=budget)
        if tools is not None and not tools.or_none:
            return format.forced(schemas, self._prompt, is_one=self._has_one_call, budget=budget)
        if budget is not None and format.may_think(self._prompt):
            return format.limited(schemas, self._prompt, is_one=self._has_one_call, budget=budget)
        if tools is None or not schemas:
            return None
        return format.free(schemas, is_one=self._has_one_call, is_strict=tools.is_strict)

    async def _request(self, tools: OfferedTools | None) -> GenerateRequest:
        body = self.body
        prepare = partial(
            _prepared,
            body,
            tools,
            self._image_prompts,
            self.state.model_format,
            field=self._api.prompt,
            is_native=self._is_native,
        )
        # Schemas and long chats may take a tenth of a second to go through.
        if tools is not None or len(body.messages) > _MANY_MESSAGES:
            turns, listed, grammar = await self.state.bodies.run(_cost(body), prepare)
        else:
            turns, listed, grammar = prepare()
        render = partial(
            self._template.render,
            tools=listed,
            tool_prompt=body.tool_prompt,
            variables={**self.state.template_defaults, **variables_of(body)},
            documents=body.documents,
        )
        prompt = self._prompt = await render(turns, ending=ending_of(body))
        end = await answered(render, turns, prompt) if self.state.info.saves_states else None
        if turns[-1].is_open and ending_of(body) in ("usual", "continued"):
            self._begun = turns[-1].text
        grammar = self._own_grammar(tools, grammar)
        if grammar is not None and tools is not None and self.state.model_format.has_json_arguments:
            grammar = replace(grammar, loose=tools.loose)
        if tools is not None and self._has_two_passes and body.constraint is not None:
            await self._inference.validator.check_grammar(body.constraint, self._api)
        request = request_of(body, prompt, grammar, self._images, self._api)
        kind = self._kind_of_answer(tools, grammar)
        return replace(request, answer=kind, answered=end, adapter_id=self.state.adapter_of(body.model))

    def _kind_of_answer(self, tools: OfferedTools | None, grammar: AskedGrammar | None) -> AnswerKind:
        if tools is not None and not self._is_native:
            return "call"
        is_all_under_grammar = tools is None and grammar is not None and grammar == self.body.constraint
        return "text" if is_all_under_grammar or self._reader() is None else "marked"


def _cost(body: ChatBody) -> int:
    """About the bytes that `_prepared` goes through."""
    schemas = (tool.function.schema_of_parameters for tool in body.tools or ())
    return len(body.messages) * _BYTES_OF_A_MESSAGE + sum(len(dumps(schema)) for schema in schemas)


def _prepared(
    body: ChatBody,
    tools: OfferedTools | None,
    images: ImagePrompts | None,
    format: ModelFormat,
    *,
    field: str,
    is_native: bool,
) -> tuple[list[Turn], list[dict[str, Any]] | None, AskedGrammar | None]:
    """Return the template's inputs and the grammar; native calls have none."""
    turns = turns_of(body, images, field)
    if format.ids is IdKind.COUNTED:
        turns = with_counted_ids(turns)
    if tools is not None:
        return turns, tools.for_template(describes=format.describes), None if is_native else tools.grammar()
    return turns, None, body.constraint


def _number_of_choices(state: AppState, body: ChatBody) -> int:
    number, limit = 1 if body.n is None else body.n, state.inference.limits.max_choices
    if not 1 <= number <= limit:
        code = "integer_below_min_value" if number < 1 else "integer_above_max_value"
        text = f"`n` must be > 0 and <= {limit}. Given: {number}"
        raise ValidationError(text, param="n", code=code, given=number, limit=limit)
    return number


def _stream(chat: Chat, head: ChatHead, running: Sequence[Run], failure: StreamFailure) -> Response:
    def close() -> None:
        for one in running:
            one.close()

    return sse.EventStream(
        _events(chat, head, running, failure),
        headers=stream_headers(running[0], compute_type=chat.state.config.compute_type),
        close=close,
        stalled_s=chat.state.config.stalled_client_seconds,
    )


async def _events(
    chat: Chat, head: ChatHead, running: Sequence[Run], failure: StreamFailure
) -> AsyncGenerator[bytes, None]:
    choices: dict[int, AnyStream] = {}
    num_unfinished, num_tokens = len(running), 0
    cached: list[int] = []
    predicted: list[Predicted | None] = []
    options = chat.body.stream_options
    try:
        async with aclosing(interleaved(running)) as events:
            async for index, event in events:
                if isinstance(event, Prefilled):
                    continue
                choice = choices.get(index) or choices.setdefault(
                    index, choice_stream(chat, head, index, running[index])
                )
                chunks = choice.chunks(event)
                num_tokens += 1
                # Of the answers: a decision that has led to one may have had another prompt.
                num_read = prompt_tokens_of([one.request for one in running])
                if options.continuous_usage_stats:
                    used = usage(num_read, num_tokens, _reasoning_tokens(choices), cached_tokens=None)
                    chunks = [chunk | {"usage": used} for chunk in chunks]
                piece = b"".join([sse.event(chunk) for chunk in chunks])
                if isinstance(event, Finished):
                    num_unfinished -= 1
                    cached.append(event.cached_tokens)
                    predicted.append(event.predicted)
                    if not num_unfinished:
                        if options.include_usage:
                            reasoning = _reasoning_tokens(choices)
                            used_at_end = usage_chunk(head, num_read, num_tokens, reasoning, min(cached), predicted)
                            piece += sse.event(used_at_end)
                        piece += sse.DONE
                if piece:
                    yield piece
    except Exception as error:
        end_all(running, error)
        yield sse.frame(failure(error)) + sse.DONE


def _reasoning_tokens(choices: Mapping[int, AnyStream]) -> int | None:
    return reasoning_tokens_of([one.reader for one in choices.values() if isinstance(one, ReadStream)])


def choice_stream(chat: Chat, head: ChatHead, index: int, running: Run, *, are_joined: bool = True) -> AnyStream:
    """Return a text or call stream, by its first event."""
    keeps_stop, logprobs = chat.body.include_stop_str_in_output, chat.names
    if chat.tools is not None and running.request.answer == "call":
        return CallStream(
            head, index, running.request, keeps_stop=keeps_stop, logprobs=logprobs, only_name=chat.tools.only_name
        )
    if (reading := chat.reading_of(running.request)) is not None:
        return ReadStream(head, index, *reading, logprobs=logprobs, are_joined=are_joined)
    return ChoiceStream(head, index, running.request, keeps_stop=keeps_stop, logprobs=logprobs)
