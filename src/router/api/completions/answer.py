"""From events to completion answers, in TGI's key order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from router.answers.stops import (
    FINISH_REASONS,
    StopHoldBack,
    ended_by_stop,
    openai_reason,
    stops_left_out,
    without_stop,
)
from router.api.completions.schema import CompletionBody
from router.api.openai.answers import AnswerHead, usage
from router.api.openai.logprobs import Named, TokenNames
from router.errors import GenerationError
from router.events import Finished, FinishReason, Token, TokenGenerated
from router.generation.collect import GenerationResult
from router.generation.inference import mean_logprob
from router.request import ValidRequest


class CompletionHead(AnswerHead):
    """A completion's head, in TGI's key order."""

    def answer(self, choices: list[dict[str, Any]], used: dict[str, Any] | None) -> dict[str, Any]:
        """Order keys of answers, last chunks and usage."""
        return {
            **self._start(),
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            "choices": choices,
            "usage": used,
            **self._tier(),
        }

    def chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Order keys of other chunks."""
        return {
            **self._start(),
            "choices": [choice],
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            **self._tier(),
        }

    def _start(self) -> dict[str, Any]:
        return {"object": "text_completion", "id": self.id, "created": self.created}


class Logprobs:
    """OpenAI's parallel lists of a choice or chunk."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._tokens: list[str] = []
        self._logprobs: list[Any] = []
        self._tops: list[dict[str, Any] | None] = []
        self._offsets: list[int] = []

    def add(self, token: Token, top_tokens: Sequence[Token], offset: int) -> None:
        """Add a token, also among its alternatives."""
        chosen = self._names.chosen(token)
        self._append(_key(chosen), token, _by_name([*self._names.listed(top_tokens, token), chosen]), offset)

    def add_prompt(self, token: Token, top_tokens: Sequence[Token], offset: int) -> None:
        """Add a token of the prompt; without `top_tokens` its alternatives are not known."""
        chosen = self._names.alone(token)
        top = _by_name([*map(self._names.alone, top_tokens), chosen]) if top_tokens else None
        self._append(_key(chosen), token, top, offset)

    def _append(self, name: str, token: Token, top: dict[str, Any] | None, offset: int) -> None:
        self._tokens.append(name)
        self._logprobs.append(token.logprob)
        self._tops.append(top)
        self._offsets.append(offset)

    def json(self) -> dict[str, Any]:
        return {
            "tokens": self._tokens,
            "token_logprobs": self._logprobs,
            "top_logprobs": self._tops,
            "text_offset": self._offsets,
        }


def _by_name(names: Sequence[Named]) -> dict[str, Any]:
    """Return logprobs by name; of equal names the first, which is the likeliest."""
    top: dict[str, Any] = {}
    for one in names:
        top.setdefault(_key(one), one.logprob)
    return top


def _key(one: Named) -> str:
    """Name a token without text by bytes, as OpenAI."""
    return one.name if one.is_text else f"bytes:{one.name}"


def completion(
    head: CompletionHead,
    body: CompletionBody,
    groups: Sequence[Sequence[GenerationResult]],
    offsets: Sequence[Sequence[int]],
    names: TokenNames,
) -> dict[str, Any]:
    """Return the answer of each prompt's generations."""
    number = body.n or 1
    choices: list[dict[str, Any]] = []
    for index, group in enumerate(groups):
        places = offsets[index] if offsets else ()
        echo = echoed(body, index, group[0].request)
        choices += [
            _choice(len(choices) + i, one, body, echo, places, names) for i, one in enumerate(_best(group, number))
        ]
    prompt_tokens = sum(group[0].request.input_length for group in groups)
    completion_tokens = sum(generation.generated_tokens for group in groups for generation in group)
    cached_tokens = sum(min(generation.cached_tokens for generation in group) for group in groups)
    predicted = [generation.predicted for group in groups for generation in group]
    used = usage(prompt_tokens, completion_tokens, cached_tokens=cached_tokens, predicted=predicted)
    return head.answer(choices, used)


def without_tokens(generation: GenerationResult) -> GenerationResult:
    """Leave the prompt alone, of an answer that is to have no token."""
    return replace(generation, text="", tokens=[], top_tokens=[], generated_tokens=0, finish_reason="length")


def without_token(event: Finished) -> Finished:
    """Take the text from the only event of an answer that is to have no token."""
    return replace(
        event, token=replace(event.token, text=""), text="", generated_tokens=0, finish_reason="length"
    )  # fmt: skip


def _best(group: Sequence[GenerationResult], number: int) -> Sequence[GenerationResult]:
    """Return the `number` highest mean logprobs, or all in order."""
    return group if len(group) == number else sorted(group, key=mean_logprob, reverse=True)[:number]


def echoed(body: CompletionBody, index: int, request: ValidRequest) -> str:
    """Return a prompt's repeated text."""
    if not body.echo:
        return ""
    prompt = body.prompt[index]
    return prompt if isinstance(prompt, str) else request.inputs


def _choice(
    index: int, generation: GenerationResult, body: CompletionBody, echo: str, places: Sequence[int], names: TokenNames
) -> dict[str, Any]:
    stops = stops_left_out(generation.request, keeps_stop=body.include_stop_str_in_output)
    text = echo + without_stop(generation.text, stops, generation.finish_reason)
    return {
        "index": index,
        "text": text,
        "logprobs": None if body.logprobs is None else _logprobs(generation, body, text, len(echo), places, names),
        "finish_reason": FINISH_REASONS[openai_reason(generation.text, generation.request, generation.finish_reason)],
    }


def _logprobs(
    generation: GenerationResult,
    body: CompletionBody,
    text: str,
    position: int,
    places: Sequence[int],
    names: TokenNames,
) -> dict[str, Any]:
    """Return the lists; `position`: of the generated text."""
    logprobs = Logprobs(names)
    if body.echo:
        if len(generation.prefill) != len(places):
            raise GenerationError(
                f"{len(places)} prompt logprobs were asked for, {len(generation.prefill)} came from the model server"
            )
        num_tokens = len(places)
        for i, (token, place) in enumerate(zip(generation.prefill, places, strict=True)):
            logprobs.add_prompt(token, generation.prefill_top.at(i - num_tokens), place)
    tops = generation.top_tokens or [()] * len(generation.tokens)
    for token, top in zip(generation.tokens, tops, strict=True):
        logprobs.add(token, top, min(position, len(text)))
        position += 0 if token.special else len(token.text)
    return logprobs.json()


class ChoiceStream:
    """A choice's stream: a chunk a token; special ones say nothing."""

    def __init__(
        self,
        head: CompletionHead,
        index: int,
        request: ValidRequest,
        body: CompletionBody,
        echo: str,
        names: TokenNames,
    ) -> None:
        """echo: what comes before the generated text."""
        self._head = head
        self._index = index
        self._request = request
        self._stops = stops_left_out(request, keeps_stop=body.include_stop_str_in_output)
        self._hold_back = StopHoldBack(self._stops)
        self._logprobs = body.logprobs
        self._names = names
        self._include_usage = body.stream_options.include_usage
        # As TGI, whose clients find a prompt's usage in its last chunk, where OpenAI's option is not used.
        says_usage = "include_usage" in body.stream_options.model_fields_set
        self._ends_with_usage = not says_usage and (body.n or 1) == 1
        self._echo = echo
        self._position = len(self._echo)

    def chunk(self, event: TokenGenerated | Finished) -> dict[str, Any]:
        """The chunk of one token."""
        token = event.token
        piece = "" if token.special else token.text
        reason: str | None = None
        if isinstance(event, Finished):
            reason = FINISH_REASONS[openai_reason(event.text, self._request, event.finish_reason)]
            text = self._hold_back.finish(piece, stopped=ended_by_stop(event.text, self._stops, event.finish_reason))
        else:
            text = self._hold_back.push(piece)
        text, self._echo = self._echo + text, ""
        choice = {
            "index": self._index,
            "text": text,
            "logprobs": self._logprobs_of(event),
            "finish_reason": reason,
        }
        self._position += len(piece)
        if isinstance(event, Finished) and self._ends_with_usage:
            used = usage(
                self._request.input_length,
                event.generated_tokens,
                cached_tokens=event.cached_tokens,
                predicted=[event.predicted],
            )
            return self._head.answer([choice], used)
        chunk = self._head.chunk(choice)
        return chunk | {"usage": None} if self._include_usage else chunk

    def _logprobs_of(self, event: TokenGenerated | Finished) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        logprobs = Logprobs(self._names)
        logprobs.add(event.token, event.top_tokens, self._position)
        return logprobs.json()


_STOP_TYPES = {"eos_token": "eos", "length": "limit", "stop_sequence": "word"}


def infill_answer(body: CompletionBody, generation: GenerationResult, model: str) -> dict[str, Any]:
    """Return llama.cpp's answer."""
    stops = stops_left_out(generation.request, keeps_stop=body.include_stop_str_in_output)
    text = without_stop(generation.text, stops, generation.finish_reason)
    return {"content": text} | _infill_end(
        model, generation.request, generation.finish_reason, generation.generated_tokens, generation.cached_tokens
    )


def infill_event(
    event: TokenGenerated | Finished, request: ValidRequest, hold_back: StopHoldBack, stops: Sequence[str], model: str
) -> dict[str, Any]:
    """Return llama.cpp's event of a token."""
    piece = "" if event.token.special else event.token.text
    if not isinstance(event, Finished):
        return {"content": hold_back.push(piece), "stop": False}
    text = hold_back.finish(piece, stopped=ended_by_stop(event.text, stops, event.finish_reason))
    end = _infill_end(model, request, event.finish_reason, event.generated_tokens, event.cached_tokens)
    return {"content": text} | end


def _infill_end(
    model: str, request: ValidRequest, reason: FinishReason, num_generated: int, num_cached: int
) -> dict[str, Any]:
    return {
        "stop": True,
        "stop_type": _STOP_TYPES[reason],
        "truncated": False,
        "model": model,
        "tokens_predicted": num_generated,
        "tokens_evaluated": request.input_length,
        "tokens_cached": num_cached,
    }
