"""One request's state on the shard; a batch is a list of these."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Sequence as Ids
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from model_server.batch.results import FinishReason, GeneratedText
from model_server.batch.stopping import StoppingState
from model_server.errors import RequestError, public_text
from model_server.runner.runner import RequestState
from model_server.sampling.logprobs import PromptScores
from model_server.sampling.parameters import SamplingParameters, StoppingParameters
from model_server.sampling.row import SamplingRow
from model_server.text.detokenizer import Detokenizer
from wire.decoder_blocks import positions_between

logger = logging.getLogger(__name__)


class Asked(Protocol):
    """What a request asks of a feature (`batch.feature`)."""

    @property
    def refusal(self) -> str:
        """Say that a model has no such feature."""


class Attachment:
    """What a feature knows of a sequence."""

    __slots__ = ()
    # A generated token's position minus its place in the cache.
    offset = 0

    def pass_by(self, cache_length: int) -> None:
        """Forget what cached tokens do not need."""

    def chunk_end(self, start: int, end: int, rows: int, *, takes_any: bool) -> tuple[int, int]:
        """Return where a chunk ends, at `end` if it may, and how many of `rows` are computed for it before."""
        return end, 0


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request before it is a sequence."""

    id: int
    input_ids: tuple[int, ...]  # the prompt
    sampling: SamplingParameters
    stopping: StoppingParameters
    prefill_logprobs: bool
    top_n_tokens: int
    blocks: npt.NDArray[np.int32]  # empty, in a warm-up: the shard numbers them itself
    cache_len: int  # leading tokens whose KV is in the cache; resume_ids are part of what is counted
    chunk_len: int | None  # tokens of the first forward; None: all that are not in the cache
    resume_ids: tuple[int, ...] = ()  # tokens generated before the request was preempted
    prediction_ids: tuple[int, ...] = ()  # what will probably be generated
    asked: tuple[Asked, ...] = ()  # of features
    is_trial: bool = False  # of a warm-up: features let it compute what requests will
    state_slot: int = 0  # of recurrent layers' state, and where the first cache_len tokens' comes from
    state_from: int | None = None
    state_saves: tuple[tuple[int, int], ...] = ()  # (position, slot) of copies


class Sequence:
    """A running request.

    `num_sampled` counts tokens sampled on the device, `len(ids) - prompt_length` those the host has seen.
    `cache_length` tokens are in the cache once submitted steps have run; `input_length` take part in the next. No token
    is sampled before the first `prefill_length` tokens are in the cache.
    """

    __slots__ = (
        "attachments", "blocks", "cache_length", "detokenizer", "drafts_from", "ended_in", "finished", "id",
        "ids", "input_length", "max_new_tokens", "num_sampled", "owned", "prediction", "prefill_length",
        "prefill_logprobs", "prompt_length", "prompt_scores", "row", "seed", "slots", "state",
        "stopping", "top_n_tokens",
    )  # fmt: skip

    def __init__(
        self,
        request: NewRequest,
        prompt_ids: list[int],
        *,
        block_size: int,
        row: SamplingRow,
        stopping: StoppingState,
        detokenizer: Detokenizer | None,
        owned: bool,
        prefill_logprobs: bool,
        attachments: tuple[Attachment, ...] = (),
        prefix_length: int = 0,
    ) -> None:
        """Replay `resume_ids`, if any.

        Raises:
            RequestError: They cannot be replayed.
        """
        self.id = request.id
        self.attachments = attachments
        self.ids = [*prompt_ids, *request.resume_ids]
        self.prompt_length = len(prompt_ids)
        self.prefill_length = len(self.ids)
        self.state = RequestState(self.prompt_length, request.state_slot, request.state_from, request.state_saves)
        self.blocks = request.blocks
        between = positions_between(len(prompt_ids), prefix_length, block_size)
        # Of the prompt's tokens, then of generated ones.
        self.slots = np.delete(
            slots_of(request.blocks, block_size), slice(len(prompt_ids), len(prompt_ids) + between)
        )  # fmt: skip
        self.cache_length = request.cache_len
        self.input_length = request.chunk_len or self.prefill_length - request.cache_len
        self.max_new_tokens = request.stopping.max_new_tokens
        self.num_sampled = len(request.resume_ids)
        self.row = row
        self.prediction = request.prediction_ids
        self.drafts_from: Any = None  # what a drafter keeps of the last steps, which alone reads and writes it
        self.stopping = stopping
        self.detokenizer = detokenizer
        self.owned = owned
        self.prefill_logprobs = prefill_logprobs  # wanted, and not delivered yet
        self.prompt_scores: list[PromptScores] = []  # of the chunks so far, on the host with the first token
        self.top_n_tokens = request.top_n_tokens
        self.seed = request.sampling.seed if request.sampling.samples else None
        self.finished = False
        self.ended_in: int | None = None  # the number of the call in which it ended, once that is collected
        self._replay(request.resume_ids)

    @property
    def position_offset(self) -> int:
        """Return a generated token's position minus its place in the cache."""
        return sum([attached.offset for attached in self.attachments]) if self.attachments else 0

    @property
    def is_prefilling(self) -> bool:
        """Whether first tokens are neither in the cache nor on their way."""
        return self.cache_length < self.prefill_length

    @property
    def samples(self) -> bool:
        """Whether the next forward ends with a sampled token."""
        return self.cache_length + self.input_length >= self.prefill_length

    @property
    def has_slots(self) -> bool:
        """Whether the next forward's tokens have slots."""
        return self.cache_length + self.input_length <= len(self.slots)

    @property
    def is_exhausted(self) -> bool:
        """Whether all its tokens are sampled, and no step may include it."""
        return self.num_sampled >= self.max_new_tokens

    @property
    def has_unseen(self) -> bool:
        """Whether the host lacks the last sampled token."""
        return len(self.ids) - self.prompt_length < self.num_sampled

    def advance(self) -> None:
        """Note a submitted forward of `input_length` tokens, and its sampled token."""
        self.cache_length += self.input_length
        self.input_length = 1
        for attached in self.attachments:
            attached.pass_by(self.cache_length)
        if self.cache_length >= self.prefill_length:
            self.num_sampled += 1

    def accept(self, num_tokens: int) -> None:
        """Note so many tokens more than `advance` counted; only the newest is not cached."""
        self.num_sampled += num_tokens
        self.cache_length += num_tokens

    def extend_blocks(self, blocks: npt.NDArray[np.int64], block_size: int) -> None:
        """Append blocks, and all their slots."""
        self.blocks = np.concatenate([self.blocks, blocks.astype(np.int32)])
        self.slots = np.concatenate([self.slots, slots_of(blocks, block_size)])

    def append(self, token_id: int) -> tuple[str, GeneratedText | None]:
        """Note a sampled token, and return its streamed text and the request's end, if any.

        Raises:
            RequestError: The grammar cannot continue.
        """
        self.ids.append(token_id)
        text = ""
        try:
            text = self.detokenizer.append(token_id) if self.detokenizer is not None else ""
        finally:
            # Whatever becomes of the text, which not every rank makes, all ranks decide alike.
            reason = self._end_reason(token_id, text)
        if reason is None:
            return text, None
        final = self.stopping.cut(self.detokenizer.final_text()) if self.detokenizer is not None else ""
        ended = GeneratedText(
            text=final,
            generated_tokens=len(self.ids) - self.prompt_length,
            finish_reason=reason,
            seed=self.seed,
        )
        return text, ended

    def disown(self) -> None:
        """Note the error as this rank's last answer; the row runs on, as on other ranks, until it is filtered."""
        self.owned = False
        self.detokenizer = None

    def _replay(self, token_ids: Ids[int]) -> None:
        """Replay these tokens through text, stop checks and grammar."""
        for token_id in token_ids:
            try:
                text = self.detokenizer.append(token_id) if self.detokenizer is not None else ""
            except Exception as error:
                if not isinstance(error, RequestError):
                    logger.exception("the text of request %d cannot be made", self.id)
                raise RequestError(f"request {self.id}: {public_text(error)}") from error
            if self._end_reason(token_id, text) is not None:
                raise RequestError(f"request {self.id}: it ends with its resume_ids, nothing is left to generate")

    def _end_reason(self, token_id: int, text: str) -> FinishReason | None:
        """Advance stop checks and grammar.

        Raises:
            RequestError: The grammar cannot continue.
        """
        reason = self.stopping.check(token_id, text)
        self.finished = reason is not None
        grammar = self.row.grammar
        if reason is not None or grammar is None:
            return reason
        self.finished = True
        grammar.advance(token_id)
        self.finished = grammar.is_over
        return FinishReason.EOS_TOKEN if grammar.is_over else None


def check_layout(
    request: NewRequest, block_size: int, num_blocks: int, *, chunking: bool, grows: bool, prefix_length: int = 0
) -> None:
    """Refuse blocks outside the request's part of the cache.

    Args:
        chunking: The first forward may leave some prompt out.
        grows: More blocks may come later.
    """
    name = f"request {request.id}"
    num_prompt = len(request.input_ids)
    resumed, max_new_tokens = len(request.resume_ids), request.stopping.max_new_tokens
    length = num_prompt + resumed
    if num_prompt == 0:
        raise RequestError(f"{name}: the prompt has no tokens")
    if resumed >= max_new_tokens:
        raise RequestError(f"{name}: it has {resumed} of its {max_new_tokens} tokens, nothing is left to generate")
    if not 0 <= request.cache_len < length:
        raise RequestError(f"{name}: cache_len {request.cache_len} must be less than its {length} tokens")
    rest = length - request.cache_len
    if request.chunk_len is not None and not chunking and request.chunk_len != rest:
        raise RequestError(f"{name}: this shard does not chunk prefills, as its Info says")
    if request.chunk_len is not None and not 0 < request.chunk_len <= rest:
        raise RequestError(f"{name}: chunk_len {request.chunk_len} is not one of the {rest} tokens that are left")
    needed = length if grows else num_prompt + max_new_tokens - 1
    needed += positions_between(num_prompt, prefix_length, block_size)
    if len(request.blocks) * block_size < needed:
        raise RequestError(f"{name}: {len(request.blocks)} blocks for {needed} tokens")
    if int(request.blocks.max()) >= num_blocks:
        raise RequestError(f"{name}: a block is outside the cache of {num_blocks} blocks")


def check_state(request: NewRequest, num_states: int) -> None:
    """Refuse slots of states that are not there, and what cannot be continued or saved.

    Args:
        num_states: Slots; 0: no layer keeps states.
    """
    if not num_states:
        return
    name = f"request {request.id}"
    saved = [slot for _, slot in request.state_saves]
    if max(request.state_slot, request.state_from or 0, *saved) >= num_states:
        raise RequestError(f"{name}: a state is outside the {num_states} slots")
    if request.cache_len and request.state_from is None:
        raise RequestError(f"{name}: cache_len is {request.cache_len}, but state_from names no state to continue from")


def slots_of(blocks: npt.NDArray[Any], block_size: int) -> npt.NDArray[np.int64]:
    """Return the slots of `blocks` in order."""
    return (blocks.astype(np.int64)[:, None] * block_size + np.arange(block_size)).ravel()


def number_blocks(
    requests: Ids[NewRequest], block_size: int, prefix_length: int = 0, *, keep_last: bool = False
) -> list[npt.NDArray[np.int32]]:
    """Number blocks from 0 on; `keep_last`: with room for the last token, which no step reads."""
    counts = []
    for request in requests:
        num_prompt = len(request.input_ids)
        between = positions_between(num_prompt, prefix_length, block_size)
        tokens = num_prompt + between + request.stopping.max_new_tokens - (not keep_last)
        counts.append(math.ceil(tokens / block_size))
    firsts = itertools.accumulate(counts, initial=0)
    return [np.arange(first, first + count, dtype=np.int32) for first, count in zip(firsts, counts, strict=False)]
