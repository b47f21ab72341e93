"""Which checkpoints the parity tests hold to transformers, and what one of them consists of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from parity.disguises import DISGUISES, disguise
from parity.protocol import prompts
from support.tiny_models import random_model
from torch import Tensor

Key = tuple[str, str]

# Model type, variant. One of every mechanism: these run always.
REPRESENTATIVE: list[Key] = [
    ("llama", "plain"),
    ("llama", "biases_tied"),
    ("llama", "yarn"),
    ("llama", "mha"),
    ("llama", "mqa"),
    ("llama", "odd_vocab_tied"),
    ("mistral", "plain"),
    ("qwen3", "windows"),
    ("granite", "plain"),
    ("phi3", "partial_window"),
    ("smollm3", "plain"),
    ("gemma2", "plain"),
    ("gemma3_text", "plain"),
    ("gemma4_text", "plain"),
    ("gemma4_text", "experts"),
    ("cohere", "qk_norm"),
    ("cohere2", "plain"),
    ("stablelm", "parallel"),
    ("olmo2", "plain"),
    ("gpt2", "plain"),
    ("gpt_neox", "plain"),
    ("gptj", "plain"),
    ("glm4", "plain"),
    ("opt", "post_norm"),
    ("bloom", "no_prefix"),
    ("mpt", "six_heads"),
    ("falcon", "plain"),
    ("baichuan", "alibi"),
    ("mixtral", "plain"),
    ("qwen2_moe", "plain"),
    ("phimoe", "longrope"),
    ("dbrx", "plain"),
    ("gpt_oss", "plain"),
    ("deepseek_v2", "plain"),
    ("deepseek_v3", "plain"),
    ("deepseek_v32", "plain"),
    ("glm_moe_dsa", "shared"),
    ("glm4_moe", "plain"),
    ("minimax_m2", "plain"),
    ("mistral4", "plain"),
    ("llama4_text", "plain"),
    ("lfm2", "plain"),
    ("lfm2_moe", "plain"),
    ("qwen3_next", "plain"),
    ("qwen3_5_text", "plain"),
    ("kimi_linear", "published"),
    ("minimax", "plain"),
    ("jamba", "plain"),
    ("mamba", "plain"),
    ("granitemoehybrid", "plain"),
    ("bamba", "plain"),
    ("falcon_h1", "plain"),
    ("nemotron_h", "plain"),
]
# The rest runs under the marker `parity`.
OTHERS: list[Key] = [
    ("llama", "llama3"),
    ("llama", "linear"),
    ("llama", "longrope"),
    ("llama", "odd_vocab"),
    ("llama", "head_dim"),
    ("mistral", "no_window"),
    ("qwen2", "plain"),
    ("qwen2", "windows"),
    ("qwen3", "plain"),
    ("phi3", "plain"),
    ("phi3", "longrope"),
    ("smollm3", "windows"),
    ("gemma", "plain"),
    ("gemma2", "no_caps"),
    ("gemma4_unified_text", "plain"),
    ("cohere", "plain"),
    ("starcoder2", "plain"),
    ("stablelm", "plain"),
    ("olmo2", "mha"),
    ("phi", "plain"),
    ("phi", "qk_norm"),
    ("glm", "plain"),
    ("gpt2", "scales"),
    ("gpt2", "no_prefix"),
    ("gpt2", "santacoder"),
    ("gpt_bigcode", "plain"),
    ("gpt_bigcode", "mha"),
    ("gpt_neox", "sequential"),
    ("opt", "plain"),
    ("opt", "galactica"),
    ("opt", "no_prefix"),
    ("bloom", "plain"),
    ("bloom", "six_heads"),
    ("mpt", "plain"),
    ("falcon", "one_norm"),
    ("falcon", "mqa"),
    ("falcon", "alibi"),
    ("falcon", "alibi_six_heads"),
    ("RefinedWeb", "plain"),
    ("RefinedWebModel", "plain"),
    ("RefinedWebModel", "alibi"),
    ("baichuan", "plain"),
    ("mixtral", "windows"),
    ("granitemoe", "plain"),
    ("qwen2_moe", "windows"),
    ("qwen3_moe", "plain"),
    ("qwen3_moe", "window"),
    ("phimoe", "plain"),
    ("dbrx", "unscaled"),
    ("deepseek_v2", "greedy"),
    ("deepseek_v3", "halves"),
    ("glm4_moe", "dense_two"),
    ("glm4_moe_lite", "plain"),
    ("deepseek_v32", "biases"),
    ("glm_moe_dsa", "plain"),
    ("hy_v3", "plain"),
    ("ministral3", "plain"),
    ("llama4_text", "top_two"),
    ("lfm2", "wide"),
    ("lfm2_moe", "no_bias"),
    ("qwen3_5_moe_text", "plain"),
    ("kimi_linear", "plain"),
    ("kimi_linear", "dense_two"),
    ("olmo_hybrid", "plain"),
    ("olmo_hybrid", "unrotated"),
    ("olmo_hybrid", "published"),
    ("minimax", "default"),
    ("jamba", "dense"),
    ("mamba", "biases"),
    ("falcon_mamba", "plain"),
    ("mamba2", "plain"),
    ("granitemoehybrid", "dense"),
    ("falcon_h1", "norms"),
    ("falcon_h1", "gates_first"),
    ("nemotron_h", "latent"),
]
CASES = REPRESENTATIVE + OTHERS


def marked(keys: Iterable[Key]) -> list[Any]:
    """Parameters of a test over `keys`: those that are not representative carry the marker."""
    return [
        pytest.param(key, id="-".join(key), marks=() if key in REPRESENTATIVE else pytest.mark.parity) for key in keys
    ]


@dataclass(frozen=True)
class Case:
    """A checkpoint and what each of its prompts must give: logits [length, vocab] float32."""

    path: Path
    sequences: list[Tensor]
    logits: list[Tensor]


class Cases:
    """Cases by key, each made when it is first asked for.

    The reference runs each sequence alone, in full, without a cache, with eager attention.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: dict[Key, Case] = {}

    def __getitem__(self, key: Key) -> Case:
        if key not in self._made:
            self._made[key] = self._make(key)
        return self._made[key]

    def _make(self, key: Key) -> Case:
        import torch

        path = self._root / "-".join(key)
        mask = DISGUISES.get(key)
        model_type, variant = key if mask is None else mask.source
        model = random_model(model_type, variant=variant)
        model.save_pretrained(path, max_shard_size="200KB" if key == ("llama", "mha") else "5GB")
        if mask is not None:
            disguise(path, mask.change)
            if mask.prepare is not None:
                mask.prepare(model)
        sequences = prompts(model.config.vocab_size)
        with torch.inference_mode():
            logits = [model(s.unsqueeze(0), use_cache=False).logits[0].float() for s in sequences]
        return Case(path, sequences, logits)
