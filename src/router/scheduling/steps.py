"""Between the scheduler's entries and a step on the shards: what a Prefill carries, and what an answer says of whom."""

from __future__ import annotations

from collections.abc import Mapping

from router.scheduling.entry import Entry
from router.scheduling.request_queue import NextBatch
from router.shards.interface import NewBatch, NewRequest, StepReply


def new_batch(found: NextBatch) -> NewBatch:
    """What the shards are told of the requests that the queue gave out."""
    requests = [_new_request(entry) for entry in found.entries]
    return NewBatch(found.batch_id, requests, found.max_tokens, found.max_blocks)


def _new_request(entry: Entry) -> NewRequest:
    allocation = entry.allocation
    if allocation is None:
        return NewRequest(entry.request_id, entry.request)
    return NewRequest(
        entry.request_id,
        entry.request,
        allocation.blocks,
        allocation.slots(),
        allocation.prefix_length,
        entry.chunk_len,
        tuple(entry.generated_ids),
    )


def keep_ids(reply: StepReply, entries: Mapping[int, Entry]) -> None:
    """Note the tokens that the requests got."""
    find = entries.get
    for columns in reply.columns:
        for request_id, token_id in zip(columns.request_ids, columns.ids, strict=True):
            entry = find(request_id)
            if entry is not None:
                entry.generated_ids.append(token_id)
    for row in reply.rows:
        entry = find(row.request_id)
        if entry is not None:
            entry.generated_ids.extend(token.id for token in row.tokens)


def first_tokens(reply: StepReply, prefilling: Mapping[int, Entry]) -> list[Entry]:
    """Those among `prefilling` that got a token."""
    ids = dict.fromkeys(request_id for columns in reply.columns for request_id in columns.request_ids)
    ids |= dict.fromkeys(row.request_id for row in reply.rows if row.tokens)
    return [prefilling[request_id] for request_id in ids if request_id in prefilling]
