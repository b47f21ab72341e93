"""Native families whose experts transformers holds in one tensor, from files with a module for each matrix."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from parity.protocol import assert_equal_logits, prompts, run_protocol
from safetensors.torch import load_file, save_file
from support.loading import load
from support.quantized_folder import quantize_folder
from support.quantized_ways import WAYS
from support.thread_ranks import on_ranks
from support.tiny_models import tiny_checkpoint

from model_server.distributed.group import ProcessGroup
from model_server.distributed.layout import Axis, Layout, Ranks
from model_server.models.decoder.decoder import Decoder

# Type and variant -> what its files have for all experts of a layer, and whether [in, out] and whether alternately.
STACKED = {
    ("gemma4_text", "experts"): ("experts.gate_up_proj", "experts.down_proj", "experts", False, False),
    ("llama4_text", "plain"): (
        "feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj", "feed_forward.experts", True, False,
    ),
    ("gpt_oss", "plain"): ("mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.experts", True, True),
    ("granitemoe", "plain"): (
        "block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight", "block_sparse_moe.experts",
        False, False,
    ),
}  # fmt: skip
SEQUENCES = prompts(256)


def divide(folder: Path, key: tuple[str, str], names: tuple[str, str, str]) -> None:
    """Rewrite the files of a checkpoint with a module for each matrix."""
    up, down, module, is_turned, alternates = STACKED[key]
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith((up, f"{up}_bias", down, f"{down}_bias"))]:
        kind = "bias" if name.endswith("_bias") else "weight"
        prefix = name.removesuffix("_bias").removesuffix(up).removesuffix(down) + module
        for number, one in enumerate(tensors.pop(name)):
            matrix = one.t() if is_turned and kind == "weight" else one
            halves = (matrix[::2], matrix[1::2]) if alternates else matrix.chunk(2)
            parts = dict(zip(names[:2], halves, strict=True)) if up in name else {names[2]: matrix}
            tensors |= {f"{prefix}.{number}.{part}.{kind}": t.contiguous() for part, t in parts.items()}
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize("key", STACKED, ids="-".join)
def test_logits_are_those_of_stacked_files(key: tuple[str, str], tmp_path: Path) -> None:
    folder = tiny_checkpoint(key[0], tmp_path, variant=key[1], with_tokenizer=False)
    expected = run_protocol(load(folder), SEQUENCES, 4)
    divide(folder, key, ("w1", "w3", "w2") if key[0] == "granitemoe" else ("gate_proj", "up_proj", "down_proj"))
    runner = load(folder)
    assert isinstance(runner, Decoder)
    assert_equal_logits(run_protocol(runner, SEQUENCES, 4), expected)

    def of_rank(group: ProcessGroup) -> list[torch.Tensor]:
        with torch.inference_mode():
            layout = Layout(tensor=Axis(group.rank, 2))
            return run_protocol(load(folder, ranks=Ranks(layout, group, group)), SEQUENCES, 4)

    for logits in on_ranks(2, of_rank):
        assert_equal_logits(logits, expected)


@pytest.mark.parametrize(
    ("model_type", "variant", "way"),
    [
        ("gemma4_text", "experts", "fp8 blocks"), ("gemma4_text", "experts", "int4"), ("llama4_text", "plain", "nvfp4"),
    ],
)  # fmt: skip
def test_they_may_be_quantized(model_type: str, variant: str, way: str, tmp_path: Path) -> None:
    """As quantizers write them, which cannot divide a tensor of all experts."""
    folder = tiny_checkpoint(model_type, tmp_path / "source", variant=variant, with_tokenizer=False)
    divide(folder, (model_type, variant), ("gate_proj", "up_proj", "down_proj"))
    stored, decoded = quantize_folder(folder, tmp_path, *WAYS[way]())
    names = load_file(stored / "model.safetensors")
    assert any(".0.gate_proj.weight_" in name for name in names)
    assert_equal_logits(run_protocol(load(stored), SEQUENCES, 4), run_protocol(load(decoded), SEQUENCES, 4))
