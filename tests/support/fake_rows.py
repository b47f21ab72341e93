"""The requests of a scripted shard: what they hold, how far they are, and the tokens that they answer with."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass

from wire.v3 import generate_pb2 as pb

_NAMES: dict[int, str] = {}  # by the first token of the prompts that have them


def first_id(name: str) -> int:
    """The token that a prompt begins with to have its request called `name` on a fake shard."""
    token_id = 100_000 + zlib.crc32(name.encode()) % 800_000
    assert _NAMES.setdefault(token_id, name) == name
    return token_id


def name_of(request: pb.Request) -> str:
    return _NAMES.get(request.input_ids[0], f"r{request.id}")


@dataclass(frozen=True)
class Script:
    """When a request ends by itself, or at which token it fails, perhaps by its grammar or for others' sake."""

    eos_after: int | None = None
    error_at: int | None = None
    grammar_at_fault: bool = False
    overloaded: bool = False


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
        self.prompt_ids = list(request.input_ids)
        self.blocks = list(request.blocks)
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

    @property
    def slots(self) -> list[int]:
        return [slot for b in self.blocks for slot in range(b * self.block_size, (b + 1) * self.block_size)]

    def grow(self, blocks: Iterable[int]) -> None:
        self.blocks.extend(blocks)

    def breaches(self, *, may_grow: bool) -> list[str]:
        """What the blocks it came with get wrong."""
        found = []
        most = len(self.prompt_ids) + self.request.stopping_parameters.max_new_tokens - 1
        least = self.prompt_length if may_grow else most
        if not -(-least // self.block_size) <= len(self.blocks) <= -(-most // self.block_size):
            found.append(f"{self.name}: {len(self.blocks)} blocks for {least} to {most} tokens")
        if not 0 < self.input_length <= self.prompt_length - self.cache_length:
            found.append(f"{self.name}: cache_len {self.cache_length}, chunk of {self.input_length}")
        return found

    def add_to(self, columns: pb.Columns) -> None:
        """Its last token."""
        token = token_of(self.name, self.num_generated)
        columns.request_ids.append(self.request.id)
        columns.ids.append(token.ids[0])
        columns.logprobs.append(token.logprobs[0])
        columns.texts.append(token.texts[0])
        columns.is_special.append(False)

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


def shared_blocks(request: pb.Request, block_size: int) -> list[int]:
    """Blocks of a prompt's beginning that is in the cache; all of it but the last token counts as all of it."""
    length = request.cache_len
    if length + 1 == len(request.input_ids) + len(request.resume_ids):
        length += 1
    return list(request.blocks[: length // block_size])


def cached_batch(batch_id: int, rows: list[FakeRow]) -> pb.CachedBatch:
    """What a shard says of a batch that it keeps."""
    return pb.CachedBatch(
        id=batch_id,
        request_ids=[row.request.id for row in rows],
        max_tokens=sum(row.block_size * len(row.blocks) for row in rows),
        current_tokens=sum(row.input_length for row in rows),
    )


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
