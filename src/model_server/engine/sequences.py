"""From requests to sequences; what is wrong with one request is its own error."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

from model_server.adapters.residents import Residence, Residents
from model_server.adapters.rows import BASE
from model_server.adapters.slots.table import SlotTable
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
        adapters: tuple[str, ...] = (),
        features: tuple[ModelFeature, ...] = (),
        residents: Residents | None = None,
        slots: SlotTable | None = None,
        peers: ProcessGroup | None = None,
    ) -> None:
        """Take what sequences are made with.

        Args:
            owns: Whether this rank answers for a request.
            decoder_prefix: Tokens before the first generated one, if not the prompt.
            adapters: Loaded names, by number.
            features: Read what requests ask of them; all else is refused.
            residents: Adapters that come while serving, if any may.
            slots: Of the device's adapters; None: rows use numbers.
            peers: Ranks that sample the same rows, if others do.
        """
        self._tokenizer = tokenizer
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._prompt_logprobs_allowed = prompt_logprobs_allowed
        self._owns = owns
        self._decoder_prefix = decoder_prefix
        self._grammars = Grammars(tokenizer, vocab_size, peers.all_reduce_min if peers and peers.size > 1 else None)
        self._adapters = {name: number for number, name in enumerate(adapters)}
        self._features = features
        self._residents = residents
        self._slots = slots

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
        slots_in_use: Callable[[], set[int]] = set,
    ) -> tuple[list[Sequence], list[Refusal]]:
        """Return sequences, and refusals that are the same on all ranks.

        Args:
            slots_in_use: By running rows.
        """
        if not requests:
            raise RequestError("Batch must have at least one request")
        sequences: list[Sequence] = []
        refusals: list[Refusal] = []

        def in_use() -> set[int]:
            return slots_in_use() | {sequence.adapter for sequence in sequences}

        for request in with_blocks(requests, layout):
            try:
                sequences.append(self._sequence(request, layout, in_use))
            except (RequestError, ValueError) as error:
                refusals.append((request.id, error))
        return sequences, refusals

    def _sequence(
        self,
        request: NewRequest,
        layout: CacheLayout,
        slots_in_use: Callable[[], set[int]],
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
        residence = self._residence(request)
        adapter = self._adapter(request) if residence is None else residence.number
        adapter = self._slot(request, adapter, slots_in_use)
        admission = self._read(request)
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
            adapter=adapter,
            residence=residence,
            attachments=tuple(admission.attachments),
            prefix_length=layout.prefix_length,
        )
        if not follows_text:
            sequence.detokenizer = None
        return sequence

    def _read(self, request: NewRequest) -> Admission:
        """Have each feature read what the request asks of it."""
        admission = Admission(request, list(request.input_ids), list(request.input_ids), list(request.asked))
        for feature in self._features:
            feature.admit(admission)
        for asked in admission.unserved:
            raise RequestError(f"request {request.id}: {asked.refusal}")
        return admission

    def _residence(self, request: NewRequest) -> Residence | None:
        """Find the adapter that came while serving, if asked for."""
        if request.adapter is None:
            return None
        found = None if self._residents is None else self._residents.find(request.adapter)
        if found is None:
            raise RequestError(f"request {request.id}: no adapter is loaded under {request.adapter}")
        return found

    def _slot(self, request: NewRequest, number: int, in_use: Callable[[], set[int]]) -> int:
        """Return where rows find the adapter, copied there if need be."""
        if request.adapter_slot is not None:
            return request.adapter_slot
        if self._slots is None or number == BASE:
            return number
        slot = self._slots.acquire(number, in_use)
        if slot is None:
            raise RequestError(
                f"request {request.id}: rows that run have other adapters in all {self._slots.num_slots} slots; raise "
                "--lora-slots"
            )
        return slot

    def _adapter(self, request: NewRequest) -> int:
        """Return the number of its adapter."""
        if request.adapter_id is None:
            return BASE
        if request.adapter_id not in self._adapters:
            raise RequestError(f"request {request.id}: no adapter {request.adapter_id[:100]!r} is loaded")
        return self._adapters[request.adapter_id]


def with_blocks(requests: list[NewRequest], layout: CacheLayout) -> list[NewRequest]:
    """Return the requests with blocks, numbered from 0 in a warm-up."""
    if all(len(r.blocks) for r in requests):
        return requests
    numbered = number_blocks(requests, layout.block_size, layout.prefix_length)
    return [dataclasses.replace(r, blocks=blocks) for r, blocks in zip(requests, numbered, strict=True)]
