"""The requests of a scripted shard: what they hold, how far they are, and the tokens that they answer with."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass

from wire.v3 import generate_pb2 as pb


@dataclass(frozen=True)
class Script:
    """How a request behaves: ends by itself after `eos_after` tokens, or fails at token `error_at`."""

    eos_after: int | None = None
    error_at: int | None = None


@dataclass
class FakeRow:
    """One request on the shard."""

    request: pb.Request
    name: str
    script: Script
    block_size: int
    num_generated: int = 0
    ended: bool = False

    def __post_init__(self) -> None:
        request = self.request
        self.num_generated = len(request.resume_ids)
        self.prompt_ids = list(request.input_ids) or list(range(len(request.inputs.split())))
        self.blocks = list(request.blocks)
        self.slots = list(request.slots)
        self.cache_length = request.cache_len
        to_compute = self.prompt_length - request.cache_len
        self.input_length = request.chunk_len if request.HasField("chunk_len") else to_compute
        self.prefilling = True

    @property
    def prompt_length(self) -> int:
        """Tokens to bring into the cache before the first token here."""
        return len(self.prompt_ids) + len(self.request.resume_ids)

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + [token_of(self.name, n).ids[0] for n in range(1, self.num_generated + 1)]

    def grow(self, blocks: Iterable[int]) -> None:
        self.blocks.extend(blocks)
        self.slots = [s for b in self.blocks for s in range(b * self.block_size, (b + 1) * self.block_size)]

    def generation(self, finished: bool) -> pb.Generation:
        """Its last token; with all its text if it has finished."""
        n = self.num_generated
        generation = pb.Generation(request_id=self.request.id, tokens=token_of(self.name, n))
        if self.request.top_n_tokens:
            generation.top_tokens.append(token_of(self.name, n))
        if self.request.prefill_logprobs and n == 1:
            length = len(self.prompt_ids)
            generation.prefill_tokens.CopyFrom(
                pb.Tokens(ids=range(length), logprobs=[float("nan")] + [-1.0] * (length - 1), texts=["p"] * length)
            )
        if finished:
            generation.generated_text.CopyFrom(
                pb.GeneratedText(
                    text="".join(token_of(self.name, i).texts[0] for i in range(1, n + 1)),
                    generated_tokens=n,
                    finish_reason=pb.FINISH_REASON_EOS_TOKEN if self.script.eos_after == n else pb.FINISH_REASON_LENGTH,
                )
            )
            if self.request.parameters.do_sample:
                generation.generated_text.seed = self.request.parameters.seed
        return generation


def next_chunks(rows: list[FakeRow], most: int, most_of_prompts: int) -> list[int | None]:
    """For each row the length of its next chunk, None if its prompt is through; first rows first."""
    left = min(most - (len(rows) - 1), most_of_prompts)
    chunks: list[int | None] = []
    for row in rows:
        rest = row.prompt_length - row.cache_length - row.input_length if row.prefilling else 0
        if rest > 0:
            chunks.append(max(min(rest, left), 1))
            left -= chunks[-1] or 0
        else:
            chunks.append(None)
    return chunks


def token_of(name: str, n: int) -> pb.Tokens:
    """The n-th token (from 1) of the request called `name`."""
    return pb.Tokens(
        ids=[(zlib.crc32(name.encode()) + n) % 32000], logprobs=[-0.5], texts=[f" {name}{n}"], is_special=[False]
    )
