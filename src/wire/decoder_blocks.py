"""How many positions an encoder-decoder's request takes beside those of its tokens."""

# The prompt's blocks hold what the decoder's layers read of the encoder's output. The decoder's own keys begin at the
# next block, with those of the tokens before the first generated one.

from __future__ import annotations


def positions_between(num_prompt: int, prefix_length: int, block_size: int) -> int:
    """Count positions between prompt and first generated token."""
    return -num_prompt % block_size + prefix_length if prefix_length else 0


def most_between(prefix_length: int, block_size: int) -> int:
    """Bound `positions_between` for any prompt."""
    return block_size - 1 + prefix_length if prefix_length else 0
