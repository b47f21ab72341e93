"""Which format a module is stored in, and what plain matrices are read into."""

from __future__ import annotations

import pytest
import torch
from support.dict_reader import DictReader

from model_server.errors import StartupError
from model_server.quantization.formats import read_matrix
from model_server.quantization.forms import Plain
from model_server.weights.matrix import HeadOrder, MatrixSlice, Part

MATRIX = torch.arange(32.0).view(8, 4)
STACK = torch.arange(24.0).view(2, 3, 4)
READER = DictReader({"m.weight": MATRIX, "t.weight": MATRIX.t(), "stack": STACK, "codes.weight": MATRIX.int()})


def read(*parts: Part, columns: tuple[int, int] = (0, 4), **options: object) -> torch.Tensor:
    form = read_matrix(READER, MatrixSlice(parts=parts, columns=columns, **options))  # type: ignore[arg-type]
    assert isinstance(form, Plain)
    assert form.nbytes == form.weight.nbytes
    return form.dequantize(torch.float32)


def test_rows_and_columns_of_several_parts() -> None:
    first, second = Part("m", ((0, 1), (6, 8)), 8), Part("m", ((2, 3),), None)
    assert torch.equal(read(first, second), MATRIX[[0, 6, 7, 2]])
    assert torch.equal(read(first, columns=(1, 3)), MATRIX[[0, 6, 7], 1:3])


@pytest.mark.parametrize("order", [None, HeadOrder(4, 4)])
def test_a_matrix_stored_the_other_way_round(order: HeadOrder | None) -> None:
    wanted = MATRIX[4:8] if order is None else MATRIX[[4, 6, 5, 7]]
    assert torch.equal(read(Part("t", ((4, 8),), 8, order), transposed=True), wanted)
    assert torch.equal(read(Part("m", ((4, 8),), 8, order)), wanted)
    assert torch.equal(read(Part("t", ((4, 8),), 8, order), columns=(1, 3), transposed=True), wanted[:, 1:3])


def test_heads_that_are_several_ranges_each() -> None:
    """Of each head of four rows the last two come first, and these rotate."""
    part = Part("m", ((2, 4), (0, 2), (6, 8), (4, 6)), 8, HeadOrder(4, 2))
    assert torch.equal(read(part), MATRIX[[2, 3, 0, 1, 6, 7, 4, 5]])
    part = Part("m", ((1, 4), (0, 1)), 8, HeadOrder(4, 4))
    assert torch.equal(read(part), MATRIX[[1, 3, 2, 0]])


def test_one_matrix_of_a_stack() -> None:
    assert torch.equal(read(Part("stack", ((0, 1), (2, 3)), None), columns=(1, 4), expert=1), STACK[1, [0, 2], 1:4])
    part = Part("stack", ((0, 2), (3, 4)), None)
    assert torch.equal(read(part, columns=(0, 3), expert=0, transposed=True), STACK[0].t()[[0, 1, 3]])


def test_rows_of_a_form_change_places() -> None:
    assert torch.equal(Plain(MATRIX).permuted(torch.tensor([7, 0])).weight, MATRIX[[7, 0]])


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (Part("m", ((0, 4),), 9), r"^weight m\.weight has shape \[8, 4\]; the config asks for 9 at dimension 0$"),
        (Part("t", ((0, 4),), 8), r"^weight t\.weight has shape \[4, 8\]; the config asks for 8 at dimension 0$"),
        (Part("other", ((0, 1),), 1), r"^weight other\.weight does not exist$"),
        (Part("codes", ((0, 1),), 8), r"^weight codes\.weight is stored as I32, in no format that this version serves"),
    ],
)
def test_what_does_not_fit(part: Part, message: str) -> None:
    with pytest.raises(StartupError, match=message):
        read(part)
    with pytest.raises(StartupError, match=r"the config asks for 5 at dimension 1$"):
        read(Part("m", ((0, 4),), 8), columns=(0, 5), num_columns=5)
