"""AWQ's files whose activations are divided by scales compute what transformers does with the writer's definition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parity.disguises import disguise
from parity.protocol import assert_equal_logits, prompts, run_protocol
from support.loading import load
from support.meeting_ranks import on_ranks
from support.quantized import quantize_folder
from support.tiny_models import VOCAB_SIZE, tiny_checkpoint
from torch import Tensor, nn

from model_server.errors import StartupError

SEQUENCES = prompts(VOCAB_SIZE)
WIDTH = 256  # of the MLPs, four times the width of the states
LAYER = "transformer.h.{}."
# Where the writers have the scales: the layers of each family, and their activations.
ACTIVATIONS = {
    "bloom": (LAYER, "mlp.gelu_impl"),
    "falcon": (LAYER, "mlp.act"),
    "gpt_bigcode": (LAYER, "mlp.act"),
    "gpt_neox": ("gpt_neox.layers.{}.", "mlp.act"),
    "gptj": (LAYER, "mlp.act"),
    "mpt": ("transformer.blocks.{}.", "ffn.act"),
    "phi": ("model.layers.{}.", "mlp.activation_fn"),
    "starcoder2": ("model.layers.{}.", "mlp.act"),
}


class Divided(nn.Module):
    """What stands for an activation in the writers' models."""

    def __init__(self, activation: nn.Module, scales: Tensor) -> None:
        super().__init__()
        self.activation, self.scales = activation, scales

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(x) / self.scales  # type: ignore[no-any-return]


def made(model_type: str, folder: Path) -> tuple[Path, Any, dict[str, Tensor]]:
    """A quantized checkpoint, the same weights in transformers, and the scales by the names of their activations."""
    sizes = {} if model_type in ("bloom", "falcon", "gpt_bigcode", "gptj", "mpt") else {"intermediate_size": WIDTH}
    source = tiny_checkpoint(model_type, folder / "source", with_tokenizer=False, num_hidden_layers=2, **sizes)
    quantized = quantize_folder(source, folder, "awq")
    layers, name = ACTIVATIONS[model_type]
    generator = torch.Generator().manual_seed(0)
    scales = {layers.format(i) + name: torch.rand(WIDTH, generator=generator).add_(0.5).half() for i in range(2)}
    disguise(quantized, lambda config, tensors: tensors.update({f"{at}.scales": s for at, s in scales.items()}))
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "plain", dtype=torch.float32, attn_implementation="eager")
    return quantized, model, scales


QUICK = ("mpt", "starcoder2")


@pytest.mark.parametrize(
    "model_type", [t if t in QUICK else pytest.param(t, marks=pytest.mark.parity) for t in ACTIVATIONS]
)
def test_logits_of_the_writers_definition_on_one_rank_and_on_two(model_type: str, tmp_path: Path) -> None:
    quantized, model, scales = made(model_type, tmp_path)
    for name, values in scales.items():
        model.set_submodule(name, Divided(model.get_submodule(name), values.float()))
    with torch.inference_mode():
        wanted = [model(ids[None]).logits[0] for ids in SEQUENCES]
    assert_equal_logits(run_protocol(load(quantized), SEQUENCES, 4), wanted)
    for found in on_ranks(2, lambda rank: run_protocol(load(quantized, group=rank), SEQUENCES, 4)):
        assert_equal_logits(found, wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda scales: scales[:-1], r"scales has shape \[255\]; the config asks for \[256\]"),
        (lambda scales: scales.int(), "scales"),
    ],
)
def test_scales_that_do_not_fit(change: Any, message: str, tmp_path: Path) -> None:
    quantized, _, scales = made("starcoder2", tmp_path)
    disguise(quantized, lambda config, tensors: tensors.update({f"{at}.scales": change(s) for at, s in scales.items()}))
    with pytest.raises(StartupError, match=message):
        load(quantized)


def test_scales_of_a_gated_activation_are_refused(tmp_path: Path) -> None:
    source = tiny_checkpoint("llama", tmp_path / "source", with_tokenizer=False, intermediate_size=WIDTH)
    quantized = quantize_folder(source, tmp_path, "awq")
    name = "model.layers.0.mlp.act_fn.scales"
    disguise(quantized, lambda config, tensors: tensors.update({name: torch.ones(WIDTH)}))
    with pytest.raises(StartupError, match=rf"weight {name} is in the files, but nothing of llama"):
        load(quantized)
