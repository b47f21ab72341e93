"""From sampled tokens to answers: text, end, top tokens, prompt logprobs, errors."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable

from model_server.batch.growth import Failure
from model_server.batch.results import Generation, PlacesTop, Tokens
from model_server.batch.sequence import Sequence
from model_server.errors import GrammarError, RequestError, public_text
from model_server.sampling.sampler import HostSampled
from model_server.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Answers:
    """Turns a step's tokens into answers, on one rank."""

    def __init__(self, tokenizer: Tokenizer, *, alone: bool) -> None:
        """alone: there are no other ranks."""
        self._tokenizer = tokenizer
        self._alone = alone

    def step(self, rows: list[Sequence], host: HostSampled) -> list[Generation]:
        """Give a step's tokens to the sequences, and return this rank's answers."""
        generations = []
        first = 0
        for row, sequence in enumerate(rows):
            count = 1 if host.counts is None else host.counts[row]
            # One that has ended did so while this step was already on the device; one without a token was idle in it.
            if count and not sequence.finished:
                owned = sequence.owned
                generation = self._row(sequence, host, row, first, count)
                if owned:
                    generations.append(generation)
            first += count
        return generations

    def failures(self, failures: Iterable[Failure]) -> list[Generation]:
        """Answer for rows that could not take part."""
        return [Generation(request_id=sequence.id, error=reason) for sequence, reason in failures if sequence.owned]

    def _row(self, sequence: Sequence, host: HostSampled, row: int, first: int, count: int) -> Generation:
        """first, count: where the row's tokens are."""
        if host.failed[row]:
            sequence.finished = True
            grammar = sequence.row.grammar
            overloaded = grammar is not None and grammar.is_crowded_out
            at_fault = grammar is not None and grammar.error is not None and not overloaded
            why = sequence.row.why_failed
            return Generation(sequence.id, error=why, grammar_at_fault=at_fault, overloaded=overloaded)
        known = len(sequence.ids)
        try:
            if count == 1:
                return self._token(sequence, host, first)
            return self._tokens(sequence, host, first, count)
        except Exception as error:
            if self._alone:
                sequence.finished = True
            else:
                sequence.disown()
                self._follow(sequence, host.ids[first + len(sequence.ids) - known : first + count])
            if not isinstance(error, RequestError):
                logger.exception("the answer of request %d cannot be made", sequence.id)
            return Generation(sequence.id, error=public_text(error), grammar_at_fault=isinstance(error, GrammarError))

    def _tokens(self, sequence: Sequence, host: HostSampled, first: int, count: int) -> Generation:
        """Return a row's tokens up to its end."""
        generation = self._token(sequence, host, first)
        for index in range(first + 1, first + count):
            if generation.generated_text is not None:
                break
            generation.append(self._token(sequence, host, index))
        return generation

    def _follow(self, sequence: Sequence, rest: list[int]) -> None:
        """Accept the rest of a step's tokens without an answer, as other ranks do."""
        with contextlib.suppress(RequestError):
            for token_id in rest:
                if sequence.finished:
                    break
                sequence.append(token_id)

    def _token(self, sequence: Sequence, host: HostSampled, index: int) -> Generation:
        token_id = host.ids[index]
        text, ended = sequence.append(token_id)
        prompt, prompt_top = self._prompt_tokens(sequence) if sequence.prefill_logprobs else (None, None)
        return Generation(
            request_id=sequence.id,
            tokens=Tokens([token_id], [host.logprobs[index]], [text], [token_id in self._tokenizer.special_ids]),
            prefill_tokens=prompt,
            prefill_top=prompt_top,
            top_tokens=[self._top_tokens(host.top[index])] if sequence.top_n_tokens else [],
            generated_text=ended,
        )

    def _prompt_tokens(self, sequence: Sequence) -> tuple[Tokens, PlacesTop | None] | tuple[None, None]:
        """Return all prompt logprobs and the top tokens, once; NaN for cached tokens and the first."""
        parts, sequence.prompt_scores = sequence.prompt_scores, []
        sequence.prefill_logprobs = False
        if not sequence.owned:
            return None, None
        known: list[float] = [logprob for part in parts for logprob in part.chosen.tolist()]
        ids = sequence.ids[: sequence.prompt_length]
        unknown = [float("nan")] * (sequence.prompt_length - len(known))
        prompt = Tokens(ids, unknown + known, [self._tokenizer.decode_one(i) for i in ids], [])
        if not sequence.top_n_tokens:
            return prompt, None
        top_ids = [token_id for part in parts for token_id in part.top_ids.flatten().tolist()]
        top = [logprob for part in parts for logprob in part.top.flatten().tolist()]
        texts = [self._tokenizer.decode_one(i) for i in top_ids]
        return prompt, PlacesTop(Tokens(top_ids, top, texts, []), len(top_ids) // max(len(known), 1))

    def _top_tokens(self, candidates: list[tuple[int, float]]) -> Tokens:
        ids = [token_id for token_id, _ in candidates]
        return Tokens(
            ids=ids,
            logprobs=[logprob for _, logprob in candidates],
            texts=[self._tokenizer.decode_one(i) for i in ids],
            is_special=[i in self._tokenizer.special_ids for i in ids],
        )
