"""Value heads that a file has in turn by key head."""

from __future__ import annotations

import torch

from model_server.weights.gguf.delta_heads import DeltaHeads

METADATA = {
    "general.architecture": "qwen35", "qwen35.ssm.group_count": 2, "qwen35.ssm.time_step_rank": 6,
    "qwen35.ssm.state_size": 3, "qwen35.ssm.inner_size": 24,
}  # fmt: skip
# Of the file, in transformers' order.
HEADS = [0, 2, 4, 1, 3, 5]


def test_rows_and_columns() -> None:
    heads = DeltaHeads.of(METADATA)
    assert (heads.repeats, heads.value_dim) == (3, 4)
    numbers = torch.arange(6.0)
    assert heads.rows(numbers, "a.linear_attn.dt_bias").tolist() == HEADS
    values = numbers.repeat_interleave(4).view(24, 1)
    wanted = torch.tensor(HEADS).repeat_interleave(4).float()
    assert torch.equal(heads.rows(values, "a.linear_attn.in_proj_z.weight").flatten(), wanted)
    assert torch.equal(heads.rows(values.t(), "a.linear_attn.out_proj.weight").flatten(), wanted)
    mixed = torch.cat((torch.full((12, 1), -1.0), values))
    assert torch.equal(heads.rows(mixed, "a.linear_attn.conv1d.weight").flatten()[12:], wanted)
    assert heads.rows(values, "a.mlp.up_proj.weight") is values
    # Bytes of blocks keep their columns, which are ordered when they are decoded.
    blocks = values.t().to(torch.uint8)
    assert heads.rows(blocks, "a.linear_attn.out_proj.weight") is blocks
    order = heads.columns("a.linear_attn.out_proj.weight")
    assert order is not None
    assert torch.equal(order.apply(blocks).flatten(), wanted)
    assert order.apply(numbers.repeat_interleave(2).view(1, 12), 2)[0, ::2].tolist() == HEADS
    assert heads.columns("a.linear_attn.in_proj_z.weight") is None
