"""Adapters small enough to be computed by hand, and what is counted of their tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import write_adapter

from model_server.adapters.factors import EmbeddingFactors, HeadRows
from model_server.adapters.folder import read_adapter
from model_server.adapters.reader import AdapterReader
from model_server.weights.matrix import Part
from model_server.weights.products import Product, Products

LAYER = "layers.0.down"
OUTER = f"base_model.model.{LAYER}."


@pytest.mark.parametrize(
    ("rank", "config", "magnitude", "wanted"),
    [
        (1, {"lora_alpha": 4}, None, (37, -11)),
        (4, {"lora_alpha": 16}, None, (37, -11)),
        (4, {"lora_alpha": 16, "use_rslora": True}, None, (73, -23)),
        (1, {"lora_alpha": 1, "use_dora": True}, (1.0, 2.0), (10 / 52**0.5, -4 / 2**0.5)),
    ],
)
def test_two_outputs(
    rank: int, config: dict[str, Any], magnitude: tuple[float, float] | None, wanted: tuple[float, ...], tmp_path: Path
) -> None:
    """W the identity, x (1, 1), A (1 2), B (3 -1)^T: x + s * 3 * (3, -1); with lengths (1, 2) of the sum's rows (4, 6)
    and (-1, -1)."""
    a, b = torch.zeros(rank, 2), torch.zeros(2, rank)
    a[0], b[:, 0] = torch.tensor([1.0, 2.0]), torch.tensor([3.0, -1.0])
    tensors = {OUTER + "lora_A.weight": a, OUTER + "lora_B.weight": b}
    if magnitude is not None:
        tensors[OUTER + "lora_magnitude_vector"] = torch.tensor(magnitude)
    folder = write_adapter(tmp_path, {}, rank=rank, tensors=tensors, **config)
    adapter = read_adapter("a", folder, Products(linear={LAYER: (2, 2)}), ("",))
    product = Product(parts=(Part(LAYER, ((0, 2),), 2),), columns=None, weight=lambda: torch.eye(2))
    with adapter.open() as opened:
        factors = AdapterReader(adapter, opened, torch.float32, torch.device("cpu")).product(product)
    assert factors is not None
    x = torch.ones(1, 2)
    out = x @ torch.eye(2)
    factors.add(x, out)
    assert out[0].tolist() == pytest.approx(wanted)


def test_what_is_kept_of_an_embedding_and_a_head(tmp_path: Path) -> None:
    """No copy of a matrix of the base model, and of a whole matrix as many rows as may differ."""
    outer = "base_model.model."
    tensors = {
        outer + "embed.weight": torch.ones(5000, 4),
        outer + "head.lora_A.weight": torch.ones(2, 4),
        outer + "head.lora_B.weight": torch.ones(5000, 2),
        outer + "head.base_layer.weight": torch.ones(5000, 4),
    }
    folder = write_adapter(tmp_path, {}, rank=2, tensors=tensors)
    targets = Products(linear={"head": (4, 5000)}, head="head", embedding="embed", table=(5000, 4))
    assert read_adapter("a", folder, targets, ("",)).num_kept == 1024 * 4 + 2 * 4 + 5000 * 2


def test_rows_of_embedding_and_head_have_the_same_numbers_in_any_batch() -> None:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    embedding = EmbeddingFactors(a=drawn(50, 16), b=drawn(896, 16))
    head = HeadRows(torch.arange(40), drawn(40, 896), None)
    ids, hidden = torch.arange(33), drawn(33, 896)

    def of(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.zeros(count, 50)
        head.replace(hidden[:count], out, slice(0, count))
        return embedding.of(ids[:count], hidden[:count]), out

    whole = of(33)
    for count in (1, 2, 3, 8):
        assert all(torch.equal(part, all_rows[:count]) for part, all_rows in zip(of(count), whole, strict=True))
