"""What adapters in slots add to one product."""

from __future__ import annotations

import torch

from model_server.adapters.factors import joined
from model_server.adapters.product_slots import ProductSlots, SlotSizes
from model_server.adapters.rows import UniformRows
from model_server.weights.matrix import Part

CPU = torch.device("cpu")


def test_nothing_is_left_of_an_adapter_with_large_numbers() -> None:
    """Not even a product that is not finite, which times 0 would be none."""
    sizes = SlotSizes(number=1, rank=8)
    slots = ProductSlots([Part("q", ((0, 6),), 6)], {"q"}, 4, sizes, torch.float32, CPU, affine=False)
    rows = UniformRows(0, CPU)
    x, base = torch.full((2, 4), 10.0), torch.randn(2, 6)
    small = joined([(torch.randn(2, 4), torch.randn(6, 2), 0)])
    wanted = base.clone()
    small.add(x, wanted)
    for after, result in ((None, base), (small, wanted)):
        slots.write(0, joined([(torch.full((8, 4), 3e38), torch.ones(6, 8), 0)]))
        slots.write(0, after)
        out = base.clone()
        slots.add(rows, x, out)
        torch.testing.assert_close(out, result)
