"""What an indexer chooses: the best keys, of equal ones the first, whatever else is computed beside them."""

from __future__ import annotations

import math

import pytest
import torch

from model_server.cpp.library import usable
from model_server.models.decoder.attention import indexer
from model_server.models.decoder.attention.indexer import best_places

CPU = torch.device("cpu")


def test_the_best_visible_keys_in_their_order() -> None:
    scores = torch.tensor([[1.0, 5.0, 3.0, 4.0, 9.0], [7.0, 1.0, 2.0, 3.0, 4.0]])
    assert best_places(scores, torch.tensor([[4], [5]]), 3).tolist() == [[1, 2, 3], [0, 3, 4]]


def test_of_equal_keys_the_first() -> None:
    scores = torch.tensor([[0.0, 2.0, 0.0, 0.0, 2.0, 0.0, -1.0]])
    assert best_places(scores, torch.tensor([[7]]), 4).tolist() == [[0, 1, 2, 4]]


def test_all_visible_keys_come_first_where_they_are_few() -> None:
    """As where a GPU alone knows how many there are."""
    scores = torch.tensor([[3.0, 1.0, 2.0, 9.0, 9.0, 9.0]])
    assert best_places(scores, torch.tensor([[3]]), 4).tolist() == [[0, 1, 2, 3]]


def test_a_row_of_no_numbers_has_its_places_and_changes_no_other() -> None:
    scores = torch.tensor([[math.nan] * 5, [1.0, 5.0, 3.0, 4.0, 9.0], [math.inf, -math.inf, 1.0, math.nan, 2.0]])
    found = best_places(scores, torch.tensor([[5], [5], [5]]), 2)
    assert found[1].tolist() == [1, 4] and found.shape == (3, 2)


@pytest.mark.parametrize("has_operators", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [1, 7, 64])
def test_scores_by_their_formula(
    heads: int, dtype: torch.dtype, has_operators: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products and sums are not rounded to the type of the keys."""
    if not has_operators:
        monkeypatch.setattr(indexer, "usable", lambda device, dtype: False)
        monkeypatch.setattr(indexer, "_HEAD_BYTES", 8 * heads * 600)  # two queries at once
    keys, queries, weights = torch.randn(600, 32).to(dtype), torch.randn(5, heads, 32).to(dtype), torch.randn(5, heads)
    products = torch.einsum("rhd,kd->rhk", queries.double(), keys.double()).relu()
    wanted = torch.einsum("rh,rhk->rk", weights.double(), products)
    torch.testing.assert_close(indexer.scorer(keys)(queries, weights).double(), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.skipif(not usable(CPU, torch.float32), reason="no C++ operators")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_score_has_the_same_bits_whatever_is_beside_it(dtype: torch.dtype) -> None:
    """A prompt's queries choose the same keys in any chunk, and behind a cached prefix."""
    heads, dim = 24, 64
    keys, queries = torch.randn(777, dim).to(dtype), torch.randn(40, heads, dim).to(dtype)
    weights = torch.randn(40, heads)
    whole = indexer.scorer(keys)(queries, weights)
    for rows, length in ((slice(0, 1), 777), (slice(5, 6), 300), (slice(3, 20), 111), (slice(39, 40), 1)):
        assert torch.equal(indexer.scorer(keys[:length])(queries[rows], weights[rows]), whole[rows, :length])


@pytest.mark.skipif(not usable(CPU, torch.float32), reason="no C++ operators")
def test_what_the_operator_does_not_check_is_refused() -> None:
    score = indexer.scorer(torch.randn(9, 8))
    for queries, weights in (
        (torch.randn(2, 3, 6), torch.randn(2, 3)),
        (torch.randn(2, 3, 8), torch.randn(2, 4)),
        (torch.randn(2, 3, 8).bfloat16(), torch.randn(2, 3)),
    ):
        with pytest.raises(RuntimeError, match="keys of 8 numbers, queries"):
            score(queries, weights)
