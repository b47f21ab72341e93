"""How much memory a KV cache takes by default, and how many tokens that holds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from wire.host.kv_memory import (
    BLOCK,
    LEAST_TOKENS,
    MOST_TOKENS,
    SHARE,
    UNCACHED_TOKENS,
    default_bytes,
    default_tokens,
    tokens_in,
)

GIB = 2**30


@given(st.integers(-(2**30), 2**45))
def test_the_share_is_one_of_eight_sizes_between_powers_of_two(free: int) -> None:
    size = default_bytes(free)
    share = max(0, int(free * SHARE))
    assert share * 7 // 8 <= size <= share
    assert size % (1 << max(0, size.bit_length() - 4)) == 0


def test_a_little_more_or_less_that_is_free_changes_nothing() -> None:
    assert default_bytes(24 * GIB) == default_bytes(24 * GIB + 700_000_000) == 6 * GIB
    assert default_bytes(23 * GIB) == default_bytes(23 * GIB + 100_000_000) == 5.5 * GIB


@given(st.integers(0, 2**40), st.integers(1, 2**20), st.integers(0, 2**21))
def test_tokens_are_within_their_bounds_and_whole_blocks(size: int, token: int, longest: int) -> None:
    tokens = default_tokens(size, token, longest)
    assert tokens % BLOCK == 0
    assert tokens >= max(LEAST_TOKENS, longest + BLOCK)
    assert tokens <= max(MOST_TOKENS, longest + 2 * BLOCK)
    if LEAST_TOKENS < tokens < MOST_TOKENS and tokens > longest + 2 * BLOCK:
        assert tokens == tokens_in(size, token) and tokens * token <= size


def test_blocks_without_keys_are_numbered_up_to_a_bound() -> None:
    """Of models in which no layer has attention; on a CPU a default is bounded as others are."""
    assert tokens_in(1, 0) == tokens_in(2**40, 0) == UNCACHED_TOKENS
    assert default_tokens(2**30, 0, 100) == MOST_TOKENS
