"""The rows of an encoder-decoder's steps: prompts, decode rows and both together."""

from __future__ import annotations

import pytest
import torch
from parity.protocol import CPU, attention_metadata

from model_server.errors import RequestError
from model_server.models.hf.decoder_rows import DecoderRows, RowLayout
from model_server.models.hf.encoder_decoder import _groups
from model_server.runner.runner import ModelInputs, RequestState

# Blocks of two requests with prompts of 5 and 4 tokens.
TABLES = ([3, 1, 7, 5], [2, 6, 4, 8])
PREFIX, BLOCK = (90, 91), 4


def rows(*spans: tuple[int, int], wanted: list[int] | None = None) -> DecoderRows:
    """The rows of the tokens in `spans`; token j of request i is 10 * i + j."""
    ids = torch.cat([10 * i + torch.arange(*span) for i, span in enumerate(spans)])
    states = tuple(RequestState(n) for n in (5, 4))
    metadata = attention_metadata(TABLES, list(spans), BLOCK, width=4)
    picked = None if wanted is None else torch.tensor(wanted)
    return RowLayout(PREFIX, CPU).rows(ModelInputs(ids, ids, metadata, picked, states), BLOCK)


def test_prompts_give_the_prefix_to_the_decoder() -> None:
    found = rows((0, 5), (0, 4), wanted=[4, 8])
    assert [p.tolist() for p in found.prompts] == [[0, 1, 2, 3, 4], [10, 11, 12, 13]]
    assert found.ids.tolist() == [90, 91, 90, 91]
    assert found.positions.tolist() == [0, 1, 0, 1]
    # Two blocks of the first prompt, one of the second; the decoder's own keys begin at the next.
    assert found.own.slots.tolist() == [28, 29, 24, 25]
    assert found.encoded_slots is not None
    assert found.encoded_slots.tolist() == [12, 13, 14, 15, 4, 8, 9, 10, 11]
    assert found.crossing.kv_lengths_host == (5, 5, 4, 4)
    assert found.picked is not None
    assert found.picked.tolist() == [1, 3]
    assert found.unknown is None


def test_a_decode_step_reads_the_prompt_and_its_own_keys() -> None:
    found = rows((7, 8), (4, 5))
    assert found.ids.tolist() == [7, 14]
    assert found.positions.tolist() == [4, 2]
    assert found.own.kv_lengths.tolist() == [5, 3] == list(found.own.kv_lengths_host)
    assert found.own.block_tables.tolist() == [[7, 5], [6, 4]]
    assert found.own.slots.tolist() == [20, 26]
    assert found.crossing.kv_lengths.tolist() == [5, 4]
    assert (found.prompts, found.encoded_slots, found.picked) == ((), None, None)


def test_a_resumed_request_beside_a_decode_row() -> None:
    found = rows((0, 7), (5, 6))
    assert found.ids.tolist() == [90, 91, 5, 6, 15]
    assert found.positions.tolist() == [0, 1, 2, 3, 3]
    assert found.own.query_lengths_host == (4, 1)
    assert found.picked is not None
    assert found.picked[4:].tolist() == [1, 2, 3, 4]
    assert found.unknown is not None
    assert found.unknown.flatten().tolist() == [True] * 4 + [False] * 4


def test_a_prompt_comes_whole() -> None:
    with pytest.raises(RequestError, match="as a whole"):
        rows((0, 3), (4, 5))
    with pytest.raises(RequestError, match="as a whole"):
        rows((2, 5), (4, 5))


def test_texts_are_padded_to_others_of_about_their_length() -> None:
    assert _groups([20, 1, 30]) == [[1, 0, 2]]  # all are short
    assert _groups([900, 100, 1000, 90]) == [[3, 1], [0, 2]]
    assert _groups([]) == []
