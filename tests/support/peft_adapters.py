"""Adapters that PEFT makes, and the logits that it computes with them: the reference for those that are served."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NEAR_TIE = 1e-4
"""Tokens that score so nearly alike may change places; relative to the largest logit."""


def peft_adapter(model_path: Path, directory: Path, seed: int, **config: Any) -> Path:
    """Write a random adapter of the checkpoint, with `config` for `LoraConfig`; default: all linear layers, rank 4."""
    from peft import LoraConfig, get_peft_model

    chosen = {"target_modules": "all-linear", "r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"} | config
    with warnings.catch_warnings(action="ignore"):  # PEFT reads what transformers has deprecated
        model = get_peft_model(_base(model_path), LoraConfig(**chosen))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "trainable_tokens_delta" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
            elif "modules_to_save" in name:
                parameter[3:9].copy_(torch.randn(parameter[3:9].shape, generator=generator) * 0.2)
    with warnings.catch_warnings(action="ignore"):
        model.save_pretrained(str(directory))
    return directory


def peft_logits(model_path: Path, adapter: Path | None, sequences: Sequence[Tensor]) -> list[Tensor]:
    """Logits [length, vocab] of each sequence, each in a forward of its own; None: of the base model."""
    model = _base(model_path) if adapter is None else peft_model(model_path, adapter)
    with torch.inference_mode():
        return [model(input_ids=ids[None]).logits[0].float() for ids in sequences]


def assert_tokens_of_peft(model: Path, adapter: Path | None, prompt: list[int], tokens: list[int]) -> None:
    """`tokens` are what greedy decoding gives after `prompt`."""
    logits = peft_logits(model, adapter, [torch.tensor(prompt + tokens)])[0]
    for at, token in enumerate(tokens):
        scores = logits[len(prompt) + at - 1]
        assert float(scores.max() - scores[token]) <= NEAR_TIE * float(scores.abs().max()), f"{adapter}, token {at}"


def peft_model(model_path: Path, adapter: Path) -> Any:
    """The checkpoint with an adapter, as PEFT loads it."""
    from peft import PeftModel

    with warnings.catch_warnings(action="ignore"):
        return PeftModel.from_pretrained(_base(model_path), str(adapter))


def fill_slots(runner: Any, count: int) -> None:
    """The first adapters into the slots of their numbers, where the runner has slots."""
    slots = runner.adapters.slots
    assert slots is None or [slots.acquire(number, lambda: range(count)) for number in range(count)] == [*range(count)]


def _base(path: Path) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    sees = "vision_config" in json.loads((path / "config.json").read_text())
    load: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    return load.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
