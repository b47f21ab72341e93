"""From a step's reply to requests' tokens and events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from router.errors import GenerationError, GrammarError, IncompleteError, OverloadedError, RouterError
from router.events import Failed, Finished, Predicted, Prefilled, Token, TokenGenerated
from router.scheduling.entry import Entry
from router.scheduling.pipeline import Call
from router.shards.interface import Columns, Row, StepReply


@dataclass(slots=True)  # not frozen: one is made for every step
class Delivery:
    """A step's events, put off until the next calls."""

    call: Call
    reply: StepReply
    # Requests may have left their batch.
    rows: Sequence[tuple[Row, Entry]]
    # By request id, for columns.
    entries: Mapping[int, Entry]

    def deliver(self) -> None:
        """Fill the outboxes in order."""
        for columns in self.reply.columns:
            _deliver_columns(columns, self.entries)
        for row, entry in self.rows:
            _deliver_row(row, entry)


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


def keep_predicted(reply: StepReply, entries: Mapping[int, Entry]) -> None:
    """Note predictions' outcomes; right tokens behind an answer's end count as rejected."""
    if reply.drafted is None or not reply.drafted.predicted:
        return
    num_got = {row.request_id: len(row.tokens) for row in reply.rows}
    for request_id, (accepted, rejected) in reply.drafted.predicted.items():
        entry = entries.get(request_id)
        if entry is not None and entry.predicted is not None:
            got = min(accepted, num_got.get(request_id, 1))
            entry.predicted += Predicted(got, accepted + rejected - got)


def first_tokens(reply: StepReply, prefilling: Mapping[int, Entry]) -> list[Entry]:
    ids = dict.fromkeys(request_id for columns in reply.columns for request_id in columns.request_ids)
    ids |= dict.fromkeys(row.request_id for row in reply.rows if row.tokens)
    return [prefilling[request_id] for request_id in ids if request_id in prefilling]


def server_error(message: str) -> GenerationError:
    """Word a shard's failure as TGI."""
    return GenerationError(f"Server error: {message}")


def _deliver_columns(columns: Columns, entries: Mapping[int, Entry]) -> None:
    """Deliver a plain token a row: the router's hot path, microseconds each."""
    find = entries.get
    for request_id, token_id, logprob, text, special in zip(
        columns.request_ids, columns.ids, columns.logprobs, columns.texts, columns.is_special, strict=True
    ):
        entry = find(request_id)
        if entry is not None:
            entry.put(TokenGenerated(Token(token_id, text, logprob, special)))


def _row_error(row: Row, message: str) -> RouterError:
    if row.overloaded:
        error = OverloadedError()
        error.say(message)
        return error
    return GrammarError(message) if row.grammar_at_fault else server_error(message)


def _deliver_row(row: Row, entry: Entry) -> None:
    if row.error is not None:
        entry.put(Failed(_row_error(row, row.error)))
        return
    if row.prefill_tokens is not None:
        entry.put(Prefilled(row.prefill_tokens, row.prefill_top_tokens))
    if row.ended is not None and not row.tokens:
        entry.put(Failed(IncompleteError()))  # against the protocol; never leave a caller without an end
        return
    top_tokens = row.top_tokens
    last = len(row.tokens) - 1
    for i, token in enumerate(row.tokens):
        top = top_tokens[i] if i < len(top_tokens) else ()
        step_tokens = last + 1 if i == 0 else 0
        if i == last and row.ended is not None:
            entry.put(_finished(row, token, top, entry, step_tokens))
        else:
            entry.put(TokenGenerated(token, top, step_tokens))


def _finished(row: Row, token: Token, top: tuple[Token, ...], entry: Entry, step_tokens: int) -> Finished:
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
        cached_tokens=entry.cached_tokens,
        predicted=entry.predicted,
        step_tokens=step_tokens,
    )
