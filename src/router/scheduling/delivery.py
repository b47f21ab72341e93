"""From the rows of a step to events in outboxes."""

from __future__ import annotations

from collections.abc import Mapping

from router.errors import GenerationError, IncompleteError
from router.events import Failed, Finished, Prefilled, Token, TokenGenerated
from router.scheduling.entry import Entry
from router.shards.interface import Columns, Row


def deliver_columns(columns: Columns, entries: Mapping[int, Entry]) -> None:
    """One plain token for each row. The hot path of the router: a few microseconds per token."""
    find = entries.get
    for request_id, token_id, logprob, text, special in zip(
        columns.request_ids, columns.ids, columns.logprobs, columns.texts, columns.is_special, strict=True
    ):
        entry = find(request_id)
        if entry is not None:
            entry.put(TokenGenerated(Token(token_id, text, logprob, special)))


def deliver_row(row: Row, entry: Entry) -> None:
    """All that a row says to its request, in order."""
    if row.error is not None:
        entry.put(Failed(server_error(row.error)))
        return
    if row.prefill_tokens is not None:
        entry.put(Prefilled(row.prefill_tokens))
    if row.ended is not None and not row.tokens:
        entry.put(Failed(IncompleteError()))  # against the protocol; never leave a caller without an end
        return
    top_tokens = row.top_tokens
    last = len(row.tokens) - 1
    for i, token in enumerate(row.tokens):
        top = top_tokens[i] if i < len(top_tokens) else ()
        if i == last and row.ended is not None:
            entry.put(_finished(row, token, top, entry))
        else:
            entry.put(TokenGenerated(token, top))


def server_error(message: str) -> GenerationError:
    """What a caller hears of a shard's failure, in TGI's words."""
    return GenerationError(f"Server error: {message}")


def _finished(row: Row, token: Token, top: tuple[Token, ...], entry: Entry) -> Finished:
    ended = row.ended
    assert ended is not None
    return Finished(
        token=token,
        top_tokens=top,
        text=ended.text,
        generated_tokens=ended.generated_tokens,
        finish_reason=ended.finish_reason,
        seed=ended.seed,
        queued_at=entry.queued_at,
        started_at=entry.started_at if entry.started_at is not None else entry.queued_at,
    )
