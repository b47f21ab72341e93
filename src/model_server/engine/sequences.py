"""From requests to sequences; what is wrong with one request is its own error."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable

from model_server.batch.feature import Admission, ModelFeature
from model_server.batch.sequence import NewRequest, Sequence, check_layout, check_state, number_blocks
from model_server.batch.stopping import StoppingState
from model_server.distributed.group import ProcessGroup
from model_server.errors import RequestError
from model_server.sampling.grammars.masks import Grammars
from model_server.sampling.sampler import Sampler
from model_server.text.detokenizer import Detokenizer
from model_server.text.tokenizer import Tokenizer

# The id of a request that cannot run, and why.
Refusal = tuple[int, Exception]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """What a request's blocks are checked against."""

    block_size: int
    num_blocks: int
    chunking: bool  # its first forward may leave some of the prompt out
    grows: bool  # it may get more blocks later
    num_states: int = 0  # slots of layers' states; 0: they keep none
    prefix_length: int = 0  # of a decoder with blocks of its own


class SequenceFactory:
    """Makes sequences, for one model on one rank."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        sampler: Sampler,
        vocab_size: int,
        prompt_logprobs_allowed: bool,
        owns: Callable[[int], bool],
        decoder_prefix: tuple[int, ...] | None = None,
        features: tuple[ModelFeature, ...] = (),
        peers: ProcessGroup | None = None,
    ) -> None:
        """Take what sequences are made with.

        Args:
            owns: Whether this rank answers for a request.
            decoder_prefix: Tokens before the first generated one, if not the prompt.
            features: Read what requests ask of them; all else is refused.
            peers: Ranks that sample the same rows, if others do.
        """
        self._tokenizer = tokenizer
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._prompt_logprobs_allowed = prompt_logprobs_allowed
        self._owns = owns
        self._decoder_prefix = decoder_prefix
        self._grammars = Grammars(tokenizer, vocab_size, peers.all_reduce_min if peers and peers.size > 1 else None)
        self._features = features

    def compile_grammars(self, requests: list[NewRequest]) -> None:
        """Compile the requests' grammars on any thread, while earlier steps run."""
        for request in requests:
            if request.sampling.grammar is not None:
                with contextlib.suppress(RequestError):  # reported for this request alone, when it is admitted
                    self._grammars.compiled(request.sampling.grammar)

    def sequences(
        self,
        requests: list[NewRequest],
        layout: CacheLayout,
        running: Callable[[], Iterable[Sequence]] = tuple,
    ) -> tuple[list[Sequence], list[Refusal]]:
        """Return sequences, and refusals that are the same on all ranks.

        Args:
            running: Return sequences that have further steps.
        """
        if not requests:
            raise RequestError("Batch must have at least one request")
        sequences: list[Sequence] = []
        refusals: list[Refusal] = []

        def with_earlier() -> list[Sequence]:
            return [*running(), *sequences]

        for request in with_blocks(requests, layout):
            try:
                sequences.append(self._sequence(request, layout, with_earlier))
            except (RequestError, ValueError) as error:
                refusals.append((request.id, error))
        return sequences, refusals

    def _sequence(
        self, request: NewRequest, layout: CacheLayout, running: Callable[[], Iterable[Sequence]]
    ) -> Sequence:
        """Return a request's sequence.

        Raises:
            RequestError, ValueError: The request cannot be computed; others can.
        """
        check_layout(
            request, layout.block_size, layout.num_blocks, chunking=layout.chunking, grows=layout.grows,
            prefix_length=layout.prefix_length,
        )  # fmt: skip
        check_state(request, layout.num_states)
        admission = self._read(request, running)
        known = admission.known
        highest = max(*known, *request.resume_ids, *request.prediction_ids, 0)
        if highest >= self._vocab_size:
            raise RequestError(f"request {request.id}: token {highest} is outside the model's {self._vocab_size}")
        if request.resume_ids and request.prefill_logprobs:
            raise RequestError(f"request {request.id}: its prompt logprobs were delivered before it was preempted")
        before = known if self._decoder_prefix is None else list(self._decoder_prefix)
        grammar = request.sampling.grammar
        owned = self._owns(request.id)
        follows_text = owned or bool(request.stopping.stop_sequences)
        sequence = Sequence(
            request,
            admission.prompt,
            row=self._sampler.new_row(
                request.sampling,
                [*before, *request.resume_ids],
                request.stopping.max_new_tokens,
                request.top_n_tokens,
                num_generated=len(request.resume_ids),
                grammar=self._grammars.start(grammar) if grammar is not None else None,
                end_ids=self._tokenizer.eos_token_ids | request.stopping.stop_token_ids,
            ),
            stopping=StoppingState(request.stopping, self._tokenizer.eos_token_ids, request.sampling.min_tokens),
            # All ranks go through the text from before a preemption, so that if this fails, it fails alike.
            detokenizer=Detokenizer(self._tokenizer, before) if follows_text or request.resume_ids else None,
            block_size=layout.block_size,
            owned=owned,
            prefill_logprobs=request.prefill_logprobs and self._prompt_logprobs_allowed,
            attachments=tuple(admission.attachments),
            prefix_length=layout.prefix_length,
        )
        if not follows_text:
            sequence.detokenizer = None
        return sequence

    def _read(self, request: NewRequest, running: Callable[[], Iterable[Sequence]]) -> Admission:
        """Have each feature read what the request asks of it."""
        ids = request.input_ids
        admission = Admission(request, list(ids), list(ids), list(request.asked), running)
        for feature in self._features:
            feature.admit(admission)
        for asked in admission.unserved:
            raise RequestError(f"request {request.id}: {asked.refusal}")
        return admission


def with_blocks(requests: list[NewRequest], layout: CacheLayout) -> list[NewRequest]:
    """Return the requests with blocks, numbered from 0 in a warm-up."""
    if all(len(r.blocks) for r in requests):
        return requests
    numbered = number_blocks(requests, layout.block_size, layout.prefix_length)
    return [dataclasses.replace(r, blocks=blocks) for r, blocks in zip(requests, numbered, strict=True)]
