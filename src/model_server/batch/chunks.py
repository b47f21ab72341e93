"""How much of each unfinished prompt the next forward computes."""

from __future__ import annotations

from collections.abc import Sequence as Rows

from model_server.batch.sequence import Sequence


def plan_chunks(rows: Rows[Sequence], max_prefill_tokens: int) -> None:
    """Set `input_length` of the rows that are still prefilling, for the forward after the one just launched.

    rows: all that took part in it. One token is kept for each but one of them; what is left of `max_prefill_tokens`
    goes to the oldest row first (TGI's shard gives it to the newest, so that two long prompts starve each other).
    Every row advances by at least one token.
    """
    budget = max_prefill_tokens - (len(rows) - 1)
    for sequence in rows:
        if sequence.is_prefilling:
            rest = sequence.prefill_length - sequence.cache_length
            sequence.input_length = max(min(rest, budget), 1)
            budget -= sequence.input_length
