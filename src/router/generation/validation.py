"""From a client's request to one that may run: TGI's checks, in order."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from router.errors import ContextLengthError, GrammarError, ValidationError
from router.generation.api_rules import ApiRules
from router.generation.asked import GenerateRequest
from router.generation.checks import check_logit_bias, check_parameters, check_stop_tokens
from router.grammar.checker import AskedGrammar, GrammarChecker, read_grammar
from router.images.prompt import ImagePrompts
from router.limits import ServingLimits, ShardInfo
from router.lora.registry import unknown
from router.request import (
    FILTERS_OFF,
    GrammarKind,
    PlacedImage,
    SamplingParameters,
    StoppingParameters,
    ValidRequest,
    salt_of,
)
from router.text.tokenizer import PromptTokenizer

logger = logging.getLogger(__name__)

# TGI checks long generations in slices of this many tokens; only the check has remained.
_CHECKED_NEW_TOKENS = 1024
# Characters of a prompt from which images are looked for in a thread: those in data URLs have megabytes.
_LARGE_PROMPT = 1 << 16


class _Extras(NamedTuple):
    """What shards get beside prompt and plain parameters."""

    prediction_ids: tuple[int, ...]
    grammar_kind: GrammarKind
    grammar: str


class Validator:
    """Holds what requests are checked against."""

    def __init__(
        self,
        tokenizer: PromptTokenizer,
        limits: ServingLimits,
        info: ShardInfo,
        *,
        most_new_tokens: Callable[[int, int], int],
        grammars: GrammarChecker | None,
        images: ImagePrompts | None = None,
        max_stop_bytes: int = 4096,
        adapters: Container[str] | None = None,
    ) -> None:
        """Take what requests are checked with.

        Args:
            most_new_tokens: For so many tokens and images.
            grammars: None refuses all.
            images: None: text only.
            adapters: All names; None: the shards'.
        """
        self._tokenizer = tokenizer
        self._limits = limits
        self._drafts = info.speculate > 0
        self._adapters = info.adapters if adapters is None else adapters
        self._most_new_tokens = most_new_tokens
        self._max_stop_bytes = max_stop_bytes
        self._grammars = grammars
        self.images = images

    async def names_images(self, request: GenerateRequest) -> bool:
        """Whether its files must be fetched."""
        if self.images is None:
            return False
        if request.input_ids is not None:
            self.images.check_ids(request.input_ids, request.api.prompt)
            return False
        shared = request.image_prompt
        if shared.asked is None and shared.prompt is None:
            if request.images is None:
                read = partial(self.images.of_text, request.inputs, request.api.prompt)
            else:
                read = partial(self.images.of_chat, request.inputs, request.images)
            is_large = len(request.inputs) > _LARGE_PROMPT
            asked = await asyncio.to_thread(read) if is_large else read()
            if shared.prompt is None:  # another copy may have read it meanwhile
                shared.asked = asked
        return bool(shared.asked is not None and shared.asked.images)

    async def with_images(self, request: GenerateRequest) -> GenerateRequest:
        """Return the request with images written out in its `text`."""
        await self.names_images(request)
        if self.images is None or request.input_ids is not None:
            return request
        await request.image_prompt.read(self.images)
        adds_special_tokens = request.add_special_tokens and self.images.family.adds_special_tokens
        return replace(request, add_special_tokens=adds_special_tokens)

    async def validate(self, request: GenerateRequest) -> ValidRequest:
        """Return what the scheduler gets, or the first fault."""
        check_parameters(request, self._limits, max_stop_bytes=self._max_stop_bytes)
        check_logit_bias(request.sampling.logit_bias, self._tokenizer.vocab_size)
        check_stop_tokens(request.stop_token_ids, self._tokenizer.vocab_size)
        limits = self._limits
        if not (request.inputs if request.input_ids is None else request.input_ids):
            raise _empty(request)
        if request.truncate is not None and not 1 <= request.truncate <= limits.max_input_tokens:
            raise ValidationError(
                f"`truncate` must be in 1..={limits.max_input_tokens}. Given: {request.truncate}",
                param="truncate",
                given=request.truncate,
                limit=limits.max_input_tokens,
            )
        if request.priority.value and not limits.has_priorities:
            text = "the server takes requests in order: start it with `--scheduling-policy priority` or `--keys-file`"
            raise ValidationError(
                f"`{request.priority.field}` is not served here; {text}",
                param=request.priority.field,
                reason="unsupported",
            )
        extras = await self._checked_before_images(request) if await self.names_images(request) else None
        request = await self.with_images(request)
        inputs, input_ids = request.text, request.input_ids
        if input_ids is None:
            self._check_fewest_tokens(request, [inputs])
            input_ids = await self._encode(request)
        shown = request.image_prompt.prompt
        num_images = 0 if shown is None else len(shown.images)
        max_new_tokens = self._max_new_tokens(request, len(input_ids), num_images)
        if request.sampling.min_tokens > max_new_tokens:
            raise ValidationError(
                f"`min_tokens` must be <= `{request.api.max_new_tokens}`. "
                f"Given: {request.sampling.min_tokens} and {max_new_tokens}",
                param="min_tokens",
                given=request.sampling.min_tokens,
                limit=max_new_tokens,
            )
        if request.input_ids is not None:
            inputs = await self._text_of(request, request.input_ids)
        extras = extras or await self._extras(request)
        return ValidRequest(
            inputs=inputs,
            num_characters=len(inputs if request.input_ids is not None else request.inputs),
            input_ids=input_ids,
            input_length=len(input_ids),
            answer_start=await self._answer_start(request, len(input_ids)),
            truncate=request.truncate or limits.max_input_tokens,
            decoder_input_details=request.decoder_input_details,
            top_n_tokens=request.top_n_tokens or 0,
            answer=request.answer,
            adapter_id=request.adapter_id,
            priority=request.priority.value,
            cache_salt=salt_of("", request.cache_salt),
            prediction_ids=extras.prediction_ids,
            images=self._places(request, input_ids),
            sampling=self._sampling(request, extras.grammar_kind, extras.grammar),
            stopping=StoppingParameters(
                max_new_tokens=max_new_tokens,
                stop_sequences=tuple(filter(None, request.stop)),
                ignore_eos_token=request.ignore_eos,
                stop_token_ids=request.stop_token_ids,
            ),
        )

    async def check_grammar(self, grammar: AskedGrammar, api: ApiRules) -> None:
        """Check a later generation's grammar."""
        await self._grammar(GenerateRequest(grammar=grammar, api=api))

    async def _checked_before_images(self, request: GenerateRequest) -> _Extras:
        """Refuse what does not depend on images' tokens."""
        if request.decoder_input_details:
            raise ValidationError(
                "logprobs of the prompt are not supported for prompts with images", reason="unsupported"
            )
        if (asked := request.image_prompt.asked) is not None:
            self._check_fewest_tokens(request, asked.texts)
        return await self._extras(request)

    async def _extras(self, request: GenerateRequest) -> _Extras:
        """What does not depend on the prompt."""
        if request.adapter_id is not None and request.adapter_id not in self._adapters:
            raise unknown(request.adapter_id)
        prediction_ids = await self._prediction(request.prediction)
        return _Extras(prediction_ids, *await self._grammar(request))

    def _places(self, request: GenerateRequest, input_ids: tuple[int, ...]) -> tuple[PlacedImage, ...]:
        prompt = request.image_prompt.prompt
        if self.images is None or prompt is None:
            return ()
        return self.images.places(input_ids, prompt.images)

    def _sampling(self, request: GenerateRequest, kind: GrammarKind, grammar: str) -> SamplingParameters:
        """The parameters as the shards get them."""
        sampling = request.sampling
        changed: dict[str, Any] = {}
        if "seed" not in request.given:
            changed["seed"] = secrets.randbits(64)
        if kind != "none":
            changed |= {"grammar": grammar, "grammar_kind": kind}
        if request.greedy:
            changed |= FILTERS_OFF
        return replace(sampling, **changed) if changed else sampling

    async def _prediction(self, text: str) -> tuple[int, ...]:
        """Return its tokens; longer than any answer is refused, by bytes if possible."""
        if not text:
            return ()
        if not self._drafts:
            raise ValidationError(
                "`prediction` needs a server that drafts tokens: start it with `--speculate`",
                param="prediction",
                reason="unsupported",
            )
        limit = self._limits.max_total_tokens
        num_tokens, or_more = self._tokenizer.fewest_tokens(text), " or more"
        ids: list[int] = []
        if num_tokens <= limit:
            ids = await self._tokenizer.encode(text, add_special_tokens=False, truncate=None)
            num_tokens, or_more = len(ids), ""
        if num_tokens > limit:
            raise ValidationError(
                f"`prediction` must have at most {limit} tokens. Given: {num_tokens}{or_more}",
                param="prediction",
                given=num_tokens,
                limit=limit,
            )
        return tuple(ids)

    def _check_fewest_tokens(self, request: GenerateRequest, texts: Iterable[str]) -> None:
        """Refuse too many bytes before the slow tokenizing."""
        if request.truncate is not None:
            return  # what is kept depends on how all of it is cut
        fewest = sum(map(self._tokenizer.fewest_tokens, texts))
        if fewest > self._limits.max_input_tokens:
            self._max_new_tokens(request, fewest, or_more=True)

    async def _encode(self, request: GenerateRequest) -> tuple[int, ...]:
        input_ids = await self._tokenizer.encode(
            request.text, add_special_tokens=request.add_special_tokens, truncate=request.truncate
        )
        if not input_ids:
            raise _empty(request)
        return tuple(input_ids)

    async def _answer_start(self, request: GenerateRequest, num_tokens: int) -> int:
        """Count the tokens before a chat's end that later turns may leave out; 0: unknown."""
        text = request.answered
        if text is None or (text and request.images):
            return 0
        ids = await self._tokenizer.encode(text, add_special_tokens=False, truncate=None) if text else []
        return max(num_tokens - len(ids), 0)

    async def _text_of(self, request: GenerateRequest, input_ids: tuple[int, ...]) -> str:
        """Return the text of known token ids."""
        unknown = self._tokenizer.first_unknown(input_ids)
        if unknown is not None:
            raise ValidationError(
                f"the token ids name token {unknown}, which is not in the vocabulary", param=request.api.prompt
            )
        return await self._tokenizer.text_of(input_ids)

    def _max_new_tokens(
        self, request: GenerateRequest, input_length: int, num_images: int = 0, *, or_more: bool = False
    ) -> int:
        """Return the exact number of tokens it may generate; `or_more`: of a longer prompt."""
        limits, api, asked = self._limits, request.api, request.max_new_tokens
        most_tokens = min(limits.max_total_tokens, request.max_total_tokens or limits.max_total_tokens)
        longest_input = min(limits.max_input_tokens, most_tokens - 1)
        room = max(most_tokens - input_length, 0)
        checked = min(room if asked is None else asked, _CHECKED_NEW_TOKENS)
        shown = f"{input_length} or more" if or_more else str(input_length)
        is_too_long = input_length > longest_input
        if input_length + checked > most_tokens:
            raise ContextLengthError(
                f"`{api.prompt}` tokens + `{api.max_new_tokens}` must be <= {most_tokens}. "
                f"Given: {shown} `{api.prompt}` tokens and {checked} `{api.max_new_tokens}`",
                param=api.prompt,
                num_tokens=input_length,
                asked=None if is_too_long else asked,
                asked_in=api.max_new_tokens,
                limit=longest_input if is_too_long else most_tokens,
                or_more=or_more,
            )
        if is_too_long:
            raise ContextLengthError(
                f"`{api.prompt}` must have less than {longest_input} tokens. Given: {shown}",
                param=api.prompt,
                num_tokens=input_length,
                limit=longest_input,
                or_more=or_more,
            )
        granted, most = room if asked is None else min(asked, room), self._most_new_tokens(input_length, num_images)
        if asked is None and num_images and most > 0:
            granted = min(granted, most)  # images that are kept with a state take room of the cache
        if granted > most:
            beside = " besides its images" if num_images else ""
            raise ValidationError(
                f"{input_length} `{api.prompt}` tokens and {granted} `{api.max_new_tokens}`{beside} do not fit "
                f"the server's cache of {limits.max_batch_total_tokens} tokens",
                param=api.prompt,
                reason="cache_too_small",
                given=input_length + granted,
                limit=limits.max_batch_total_tokens,
            )
        return granted

    async def _grammar(self, request: GenerateRequest) -> tuple[GrammarKind, str]:
        asked = request.grammar
        try:
            read = None if asked is None else read_grammar(asked)
            if asked is None or read is None:
                return "none", ""
            if (grammars := self._grammars) is None:
                raise GrammarError("grammar is not supported: it is disabled on this server", reason="unsupported")
            return read[0], await grammars.check(*read, asked.loose)
        except GrammarError as error:
            if asked is not None and asked.is_optional and error.reason == "invalid_grammar":
                logger.info("calls of a request are not held to their schemas: %s", error)
                return "none", ""
            if asked is not None:
                error.param = error.param or asked.field
                error.say(asked.in_clients_words(error.detail))
            raise


def _empty(request: GenerateRequest) -> ValidationError:
    name = request.api.prompt
    return ValidationError(f"`{name}` cannot be empty", param=name, reason="prompt_empty")
