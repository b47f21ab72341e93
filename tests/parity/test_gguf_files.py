"""Models of GGUF files against transformers' models of the numbers that the gguf library reads from the same files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parity.protocol import CHUNKS, assert_equal_logits, prompts, run_protocol
from support.gguf_files import ARCHITECTURES, write_gguf
from support.loading import load
from support.tiny_models import tiny_checkpoint
from tokenizers import Tokenizer

from model_server.cpp.library import library
from model_server.models.decoder.decoder import Decoder
from model_server.weights.gguf.prepare import prepare

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}
SIX_AND_ONE = [*["sliding_attention"] * 5, "full_attention", "sliding_attention"]
FOUR_AND_ONE = [*["sliding_attention"] * 3, "full_attention", "sliding_attention"]
SPARSE: dict[str, Any] = {"mlp_only_layers": [], "decoder_sparse_step": 1, "moe_intermediate_size": 256}
DIFFERENT: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 64},
    "gemma3_text": {
        "sliding_window": 8, "query_pre_attn_scalar": 64, "num_hidden_layers": 7, "layer_types": SIX_AND_ONE
    },
    "phi3": {"sliding_window": None},
    "cohere": {"tie_word_embeddings": True},
    "cohere2": {"tie_word_embeddings": True, "sliding_window": 8, "num_hidden_layers": 5, "layer_types": FOUR_AND_ONE},
    "qwen2_moe": {**SPARSE, "norm_topk_prob": False, "shared_expert_intermediate_size": 256},
    "qwen3_moe": {**SPARSE, "norm_topk_prob": True},
    "glm4_moe": {"moe_intermediate_size": 256},
}  # fmt: skip
ALWAYS = (("llama", "Q4_K_M"), ("llama", "Q8_0"), ("gemma3_text", "Q8_0"))
CASES = [("llama", kind) for kind in ("Q8_0", "Q4_0", "Q4_K_M", "F16")]
CASES += [(one, kind) for one in ARCHITECTURES if one != "llama" for kind in ("Q8_0", "Q4_K_M")]


def test_a_file_in_parts_is_the_model_of_the_whole_one(tmp_path: Path) -> None:
    source = tiny_checkpoint("llama", tmp_path / "source", **SIZES)
    whole = load(prepare(write_gguf(source, tmp_path / "a.gguf", "Q8_0"), tmp_path / "cache"))
    first = write_gguf(source, tmp_path / "b.gguf", "Q8_0", most_tensors=6)
    assert first.name == "b-00001-of-00004.gguf"
    parts = load(prepare(first, tmp_path / "cache"))
    sequences = prompts(256)
    expected, found = (run_protocol(runner, sequences, 4, steps=CHUNKS) for runner in (whole, parts))
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


@pytest.mark.parametrize(
    ("model_type", "mixture"),
    [pytest.param(*case, marks=() if case in ALWAYS else pytest.mark.parity) for case in CASES],
)
def test_logits_are_those_of_the_decoded_numbers(model_type: str, mixture: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = tiny_checkpoint(model_type, tmp_path / "source", **{**SIZES, **DIFFERENT.get(model_type, {})})
    file = write_gguf(source, tmp_path / "model.gguf", mixture, tmp_path / "decoded")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "decoded", dtype=torch.float32, attn_implementation="eager")
    sequences = prompts(model.config.vocab_size)
    with torch.inference_mode():
        logits = [model(input_ids=one.unsqueeze(0), use_cache=False).logits[0] for one in sequences]
    folder = prepare(file, tmp_path / "cache")
    runner = load(folder)
    assert_equal_logits(run_protocol(runner, sequences, 4, steps=CHUNKS), logits)
    if model_type == "llama" and library() is not None:  # also where v is stored otherwise than q and k
        assert isinstance(runner, Decoder) and runner._stack is not None
    made, original = (Tokenizer.from_file(str(path / "tokenizer.json")) for path in (folder, source))
    for text in ("Hello world, naïve café 日本語 🙂", "<s>def main() -> None:</s>\n\n  12 345"):
        assert made.encode(text).ids == original.encode(text).ids
        assert made.decode(made.encode(text).ids) == original.decode(original.encode(text).ids)
