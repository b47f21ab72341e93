"""OpenVINO by optimum-intel, from an export that it makes of the model; padded, mean pooling."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any


def load(model: str, dtype: str) -> Callable[[Sequence[str]], Any]:
    import torch
    from optimum.intel import OVModelForFeatureExtraction
    from transformers import AutoTokenizer

    precision = {"bfloat16": "bf16", "float32": "f32"}[dtype]
    settings = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    loaded = OVModelForFeatureExtraction.from_pretrained(model, export=True, ov_config=settings)
    tokenizer = AutoTokenizer.from_pretrained(model)

    def embed(texts: Sequence[str]) -> Any:
        given = tokenizer(list(texts), padding=True, truncation=True, max_length=256, return_tensors="pt")
        hidden = loaded(**given).last_hidden_state
        mask = given["attention_mask"].unsqueeze(-1)
        return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1).numpy()

    return embed
