"""One request's state on the shard, an ordinary object; a batch is a list of these."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Sequence as Ids
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from model_server.adapters.residents import Residence
from model_server.adapters.rows import BASE
from model_server.batch.results import FinishReason, GeneratedText
from model_server.batch.stopping import StoppingState
from model_server.errors import RequestError, public_text
from model_server.runner.runner import RequestState
from model_server.sampling.parameters import SamplingParameters, StoppingParameters
from model_server.sampling.row import SamplingRow
from model_server.text.detokenizer import Detokenizer
from model_server.vision.image import ImagePlace
from model_server.vision.placed import PromptImages

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request as it arrived, before it is a sequence."""

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
    adapter_id: str | None = None  # None: the base model
    adapter_slot: int | None = None  # of the warm-up: computes with a slot, whatever is in it
    adapter: int | None = None  # load id of an adapter that came while the model serves; None: it has none
    prediction_ids: tuple[int, ...] = ()  # what will probably be generated
    images: tuple[ImagePlace, ...] = ()


class Sequence:
    """What the shard knows of one running request.

    Two counts run side by side: `num_sampled` counts tokens sampled on the device, `len(ids) - prompt_length` those the
    host has seen. They differ by the steps that are submitted but not collected.

    `cache_length` tokens are in the KV cache once all submitted steps have run, `input_length` take part in the next
    one. Until the first `prefill_length` tokens (the prompt, and what was generated before a preemption) are in the
    cache, no token is sampled.
    """

    __slots__ = (
        "adapter", "blocks", "cache_length", "detokenizer", "drafts_from", "ended_in", "finished", "id", "ids",
        "images", "input_length", "max_new_tokens", "num_sampled", "owned", "prediction", "prefill_length",
        "prefill_logprobs", "prompt_length", "prompt_logprobs", "residence", "row", "seed", "slots", "state",
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
        adapter: int = BASE,
        residence: Residence | None = None,
        images: PromptImages | None = None,
    ) -> None:
        """Raises RequestError if `resume_ids` cannot be gone through again."""
        self.id = request.id
        self.adapter = adapter  # its number, or slot
        self.residence = residence  # while this refers to it, the number stays that adapter's
        self.images = images
        self.ids = [*prompt_ids, *request.resume_ids]
        self.prompt_length = len(prompt_ids)
        self.prefill_length = len(self.ids)
        self.state = RequestState(self.prompt_length)
        self.blocks = request.blocks
        self.slots = slots_of(request.blocks, block_size)
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
        self.prompt_logprobs: list[
            Tensor
        ] = []  # of the chunks so far, each [n] float32 on the host, there with the first token
        self.top_n_tokens = request.top_n_tokens
        self.seed = request.sampling.seed if request.sampling.samples else None
        self.finished = False
        self.ended_in: int | None = None  # the number of the call in which it ended, once that is collected
        self._replay(request.resume_ids)

    @property
    def position_offset(self) -> int:
        """What is added to a generated token's place in the cache to get its position."""
        return 0 if self.images is None else self.images.offset

    @property
    def is_prefilling(self) -> bool:
        """Not all of its first tokens are in the cache, nor on their way there."""
        return self.cache_length < self.prefill_length

    @property
    def samples(self) -> bool:
        """The next forward reaches the end of its tokens: one more is sampled after it."""
        return self.cache_length + self.input_length >= self.prefill_length

    @property
    def has_slots(self) -> bool:
        """There are slots for what the next forward writes."""
        return self.cache_length + self.input_length <= len(self.slots)

    @property
    def is_exhausted(self) -> bool:
        """Every token it may have is already sampled: no step may include it any more (it has no slot left)."""
        return self.num_sampled >= self.max_new_tokens

    @property
    def has_unseen(self) -> bool:
        """The host has not yet seen the last token sampled."""
        return len(self.ids) - self.prompt_length < self.num_sampled

    def advance(self) -> None:
        """A forward with the next `input_length` tokens of this sequence has been submitted, and if it `samples`, the
        sampling of one more."""
        self.cache_length += self.input_length
        self.input_length = 1
        if self.images is not None:
            self.images.pass_by(self.cache_length)
        if self.cache_length >= self.prefill_length:
            self.num_sampled += 1

    def accept(self, num_tokens: int) -> None:
        """The step just collected gave this many tokens more than the one that `advance` counted. Except the newest
        token they are in the cache."""
        self.num_sampled += num_tokens
        self.cache_length += num_tokens

    def extend_blocks(self, blocks: npt.NDArray[np.int64], block_size: int) -> None:
        """Append blocks, and all their slots."""
        self.blocks = np.concatenate([self.blocks, blocks.astype(np.int32)])
        self.slots = np.concatenate([self.slots, slots_of(blocks, block_size)])

    def append(self, token_id: int) -> tuple[str, GeneratedText | None]:
        """Take note of a sampled token: its streamed text ("" on a rank that does not follow the text), and the end of
        the request if this is its last token. Raises RequestError if the request's grammar cannot continue."""
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
        """This rank has answered for the request with an error, its last answer. Where other ranks cannot know of that,
        it runs on like theirs until the router filters it away."""
        self.owned = False
        self.detokenizer = None

    def _replay(self, token_ids: Ids[int]) -> None:
        """Bring text, stop checks and grammar to where they were when these tokens had been generated."""
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
        """Move stop checks and grammar on. A grammar that cannot continue ends the request and raises RequestError."""
        reason = self.stopping.check(token_id, text)
        self.finished = reason is not None
        grammar = self.row.grammar
        if reason is not None or grammar is None:
            return reason
        self.finished = True
        grammar.advance(token_id)
        self.finished = grammar.is_over
        return FinishReason.EOS_TOKEN if grammar.is_over else None


def check_layout(request: NewRequest, block_size: int, num_blocks: int, *, chunking: bool, grows: bool) -> None:
    """Refuse blocks that would write outside the request's own part of the cache.

    Args:
        chunking: The first forward may leave some of the prompt out.
        grows: More blocks may come later, as the request needs them.

    Raises:
        RequestError: What does not fit.
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
    if len(request.blocks) * block_size < needed:
        raise RequestError(f"{name}: {len(request.blocks)} blocks for {needed} tokens")
    if int(request.blocks.max()) >= num_blocks:
        raise RequestError(f"{name}: a block is outside the cache of {num_blocks} blocks")


def slots_of(blocks: npt.NDArray[Any], block_size: int) -> npt.NDArray[np.int64]:
    """Return the slots of all tokens that `blocks` hold, in order."""
    return (blocks.astype(np.int64)[:, None] * block_size + np.arange(block_size)).ravel()


def number_blocks(num_tokens: list[int], block_size: int) -> list[npt.NDArray[np.int32]]:
    """Return blocks for requests of so many tokens each, one after another from block 0."""
    counts = [math.ceil(tokens / block_size) for tokens in num_tokens]
    firsts = itertools.accumulate(counts, initial=0)
    return [np.arange(first, first + count, dtype=np.int32) for first, count in zip(firsts, counts, strict=False)]
