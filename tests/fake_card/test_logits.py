"""The product of logits in a graph writes where they are wanted: no copy of them is captured."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from engines import CARD
from stand_in.counters import Counter, counted

from model_server.distributed.group import ProcessGroup
from model_server.layers.embedding import Head
from model_server.layers.linear.factory import LinearFactory
from model_server.quantization.forms import Form, Plain
from model_server.quantization.forms.float8 import quantize_rows
from model_server.runner.graph_capture import CudaGraphCapture

ROWS, HIDDEN, VOCAB = 3, 64, 96


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def _form(kind: str, weight: torch.Tensor) -> Form:
    return quantize_rows(weight.float(), weight.float().abs().amax(1)) if kind == "fp8" else Plain(weight)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param("plain", torch.float32, id="plain float32"),
        pytest.param("plain", torch.bfloat16, id="plain", marks=pytest.mark.short),
        pytest.param("fp8", torch.bfloat16, id="fp8"),
    ],
)
def test_a_graph_copies_no_logits(kind: str, dtype: torch.dtype, order: str) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, given = (torch.randn(n, HIDDEN, generator=generator).to(CARD, dtype) for n in (VOCAB, ROWS))
    hidden, out = torch.zeros_like(given), torch.full((ROWS, VOCAB), torch.nan, device=CARD)
    head = Head(LinearFactory(CARD, dtype).make(_form(kind, weight)), ProcessGroup(), sharded=False)
    capture = CudaGraphCapture(CARD)
    capture.warm_up(lambda: head(hidden, out))
    with counted() as grown:
        graph = capture.capture(lambda: head(hidden, out))
    assert grown[Counter.COPIES] == 0
    hidden.copy_(given)
    graph.replay()
    expected = head(given)
    torch.testing.assert_close(out.cpu(), expected.cpu(), rtol=0, atol=0)
    graph.release()
