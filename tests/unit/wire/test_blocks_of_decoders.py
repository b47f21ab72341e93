"""Where the keys of an encoder-decoder's own tokens begin."""

from __future__ import annotations

from wire.decoder_blocks import most_between, positions_between


def test_generated_tokens_follow_the_prefix_in_the_block_behind_the_prompt():
    assert [positions_between(n, 1, 4) for n in (1, 3, 4, 5)] == [4, 2, 1, 4]
    assert positions_between(6, 2, 4) == 4
    assert max(positions_between(n, 2, 4) for n in range(1, 20)) == most_between(2, 4)


def test_other_models_have_none():
    assert (positions_between(5, 0, 4), most_between(0, 4)) == (0, 0)
