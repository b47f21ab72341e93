"""A chat body on its way to generations, and what reads them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from router.answers.formats.choice import ModelFormat
from router.answers.formats.format import IdKind
from router.answers.reading import CallIds, ChoiceReader
from router.answers.stop_watch import StopWatch
from router.answers.tgi_form.two_passes import TwoPasses, permits_of_one_pass
from router.api.app_state import AppState
from router.api.chat.form import AnswerForm
from router.api.chat.prompt import (
    answered,
    begun_of,
    ending_of,
    images_of,
    request_of,
    turns_of,
    variables_of,
    with_counted_ids,
    with_marked_images,
)
from router.api.chat.schema import ChatBody
from router.api.chat.tools import OfferedTools, offered_tools
from router.api.json_out import dumps
from router.api.openai.logprobs import TokenNames
from router.api.openai.parameters import choices_of, with_defaults
from router.errors import TemplateError, ValidationError
from router.generation.api_rules import CHAT, ApiRules
from router.generation.asked import GenerateRequest
from router.generation.collect import GenerationResult, collect_all, start_all
from router.generation.permits import HeldPermits
from router.generation.running import Run
from router.grammar.checker import AskedGrammar
from router.images.prompt import ImagePrompts
from router.request import ValidRequest
from router.template.messages import Turn

_MANY_MESSAGES = 500
_BYTES_OF_A_MESSAGE = 100  # at least, and what takes time is their number


class Chat:
    """A checked body; nothing of it changes later."""

    def __init__(self, state: AppState, body: ChatBody, api: ApiRules = CHAT) -> None:
        """Check the body.

        Args:
            api: The rules of the API it came by.
        """
        self.state = state
        self._api = api
        self._inference = state.inference
        self._template = state.chat_template
        self._image_prompts = images = state.inference.images
        if images is not None and not self._template.iterates_content:
            body = with_marked_images(body, images.reader.max_images)
        self.body = body = with_defaults(body, state.sampling_defaults)
        self._images = images_of(body)
        if images is not None:
            images.reader.check_number(len(self._images))
        self.number = _number_of_choices(state, body)
        self.tools = offered_tools(body)
        self._form = AnswerForm(
            format=state.model_format,
            body=body,
            tools=self.tools,
            has_grammars=not state.config.disable_grammar_support,
        )

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
        if not self._form.has_two_passes:
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
        if request.answer != "marked":
            return None
        reader = self._form.reader(request.inputs, begun=begun_of(self.body, self._image_prompts))
        if reader is None:
            return None
        num_earlier = sum(len(message.tool_calls or ()) for message in self.body.messages)
        choice = ChoiceReader(
            reader,
            request.stopping.stop_sequences,
            keeps_stop=self.body.include_stop_str_in_output,
            min_tokens=request.sampling.min_tokens,
            max_calls=1 if self._form.has_one_call else None,
            hides_reasoning=self.body.hides_reasoning,
        )
        return choice, CallIds(self.state.model_format.ids, num_earlier)

    async def _request(self, tools: OfferedTools | None) -> GenerateRequest:
        body = self.body
        prepare = partial(
            _prepared,
            body,
            tools,
            self._image_prompts,
            self.state.model_format,
            field=self._api.prompt,
            is_native=self._form.is_native,
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
        ending = ending_of(body)
        if ending == "continued" and not turns[-1].is_open:
            text = "`continue_final_message` needs a last message of the assistant with text"
            raise TemplateError(text, param="continue_final_message")
        prompt = await render(turns, ending=ending)
        end = await answered(render, turns, prompt) if self.state.info.saves_states else None
        grammar = self._form.grammar(tools, grammar, prompt)
        if grammar is not None and tools is not None and self.state.model_format.has_json_arguments:
            grammar = replace(grammar, loose=tools.loose)
        if tools is not None and self._form.has_two_passes and body.constraint is not None:
            await self._inference.validator.check_grammar(body.constraint, self._api)
        request = request_of(body, prompt, grammar, self._images, self._api)
        kind = self._form.kind(tools, grammar, prompt, begun=begun_of(body, self._image_prompts))
        return replace(request, answer=kind, answered=end, adapter_id=self.state.adapter_of(body.model))


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
