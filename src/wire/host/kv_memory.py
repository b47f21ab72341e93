"""The KV cache's default size on a CPU, for launcher and shards."""

from __future__ import annotations

SHARE = 0.25
"""Of the memory that is free beside the weights. Pages are taken as they are first written, so it is an upper bound."""
LEAST_TOKENS, MOST_TOKENS = 16_000, 2**20
BLOCK = 16
"""Tokens of a block on a CPU."""
LEAST_STATES, MOST_STATES_CPU, MOST_STATES_GPU = 4, 64, 1024
"""Requests that run at once where each keeps a state beside the cache, and no option says how many."""
STATES_SHARE = 0.2
"""Of a CPU's memory that is free beside the weights, for these states."""
UNCACHED_TOKENS = 2**24
"""Tokens that blocks are numbered for where no layer caches keys, and blocks take no memory."""
_STEP = 256


def state_slots(asked: int | None, max_batch_size: int | None, share: int, slot_bytes: int, *, on_gpu: bool) -> int:
    """Return how many states are kept at once, of running requests and copies for later prompts.

    Args:
        asked: `--state-slots`.
        share: Bytes for all of them, where no option says how many.
    """
    if asked is not None:
        return asked
    most = MOST_STATES_GPU if on_gpu else MOST_STATES_CPU
    return max(min(most, max(LEAST_STATES, share // slot_bytes)), max_batch_size or 0)


def default_bytes(free: int) -> int:
    """Return the cache's bytes of `free` ones, in eight steps per power of two, to be stable."""
    share = max(0, int(free * SHARE))
    step = 1 << max(0, share.bit_length() - 4)
    return share // step * step


def tokens_in(num_bytes: int, token_bytes: int) -> int:
    """Return the tokens that `num_bytes` hold, a whole number of blocks of any size.

    Args:
        token_bytes: 0: no layer caches keys.
    """
    if not token_bytes:
        return UNCACHED_TOKENS
    return num_bytes // token_bytes // _STEP * _STEP


def default_tokens(num_bytes: int, token_bytes: int, longest: int) -> int:
    """Return the default cache's tokens.

    Args:
        longest: Tokens of the longest request, which always fits, beside the reserved block.
    """
    least = max(LEAST_TOKENS, (-(-longest // BLOCK) + 1) * BLOCK)
    return min(max(tokens_in(num_bytes, token_bytes), least), max(MOST_TOKENS, least))
