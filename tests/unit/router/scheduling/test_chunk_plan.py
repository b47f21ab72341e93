"""The router's plan of chunks is what the shards do."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import examples
from support.factories import make_request
from support.fake_rows import next_chunks

from router.scheduling.batch import ChunkPlan
from router.scheduling.entry import Entry

MOST = 64


@dataclass
class Row:
    """What the shard knows of a prompt."""

    prompt_length: int
    input_length: int
    cache_length: int = 0
    prefilling: bool = True


def entry(length: int, chunk: int | None) -> Entry:
    made = Entry(make_request("a", length, 5))
    made.chunk_len = chunk if chunk is not None and chunk < length else None
    return made


prompts = st.tuples(st.integers(1, 30), st.none() | st.integers(1, 10)).map(lambda p: entry(*p))
steps = st.lists(st.tuples(st.integers(1, 12), st.lists(prompts, max_size=3)), min_size=1, max_size=12)


@settings(max_examples=examples(60, 2000), deadline=None)
@given(steps=steps)
def test_the_plan_says_who_gets_a_first_token_and_whether_a_prompt_is_cut(steps):
    plan = ChunkPlan()
    rows: dict[Entry, Row] = {}
    for chunk_tokens, newcomers in steps:
        rows |= {new: Row(new.num_tokens, new.chunk_len or new.num_tokens) for new in newcomers}
        for row in rows.values():
            row.cache_length += row.input_length
        through = [new for new, row in rows.items() if row.cache_length == row.prompt_length]
        assert plan.step_sent(chunk_tokens, newcomers) == through
        for new in through:
            del rows[new]
        for row in rows.values():
            row.input_length = 0
        for row, chunk in zip(rows.values(), next_chunks(list(rows.values()), MOST, chunk_tokens), strict=True):
            row.input_length = chunk
        assert bool(plan) == bool(rows)
        assert plan.is_cut == any(row.cache_length + row.input_length < row.prompt_length for row in rows.values())


def test_the_rest_of_a_prompt_that_is_given_up_is_not_planned():
    plan, first, second = ChunkPlan(), entry(9, 2), entry(5, 4)
    plan.step_sent(4, [first, second])
    plan.remove(first)
    assert (bool(plan), plan.is_cut) == (True, False)
    assert plan.step_sent(4, []) == [second]
