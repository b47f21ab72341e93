"""The order of rows inside a head."""

from __future__ import annotations

import torch

from model_server.weights.matrix import HeadOrder


def test_rows_of_heads_are_paired() -> None:
    assert HeadOrder(4, 4).apply(torch.arange(8)).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    matrix = torch.arange(16).view(8, 2)
    assert HeadOrder(4, 4).apply(matrix)[:, 0].tolist() == [0, 4, 2, 6, 8, 12, 10, 14]


def test_rows_that_do_not_rotate_stay() -> None:
    assert HeadOrder(6, 4).apply(torch.arange(12)).tolist() == [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]
