"""What of a config and of tensor names belongs to the text model; tests/parity compares logits."""

from __future__ import annotations

from typing import Any

import pytest

from model_server.errors import StartupError
from model_server.models.config import ModelConfig
from model_server.models.decoder.spec import Names
from model_server.models.families import spec_of
from model_server.models.families.base import UnknownFamilyError
from model_server.models.families.vision import text_config, text_names

TEXT = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}


def config(model_type: str, **fields: Any) -> ModelConfig:
    return ModelConfig({"model_type": model_type, **fields})


def test_other_types_are_as_they_are() -> None:
    plain = config("llama", text_config={"hidden_size": 3})
    assert text_config(plain) is plain


def test_sizes_that_public_files_leave_out() -> None:
    """LLaVA 1.5 names only the vocabulary, Gemma 3 4B neither heads nor vocabulary."""
    llava = spec_of(config("llava", text_config={"model_type": "llama", "vocab_size": 32064}))
    assert (llava.hidden_size, llava.num_layers, llava.num_kv_heads, llava.vocab_size) == (4096, 32, 32, 32064)
    sizes = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    gemma = spec_of(config("gemma3", text_config={"model_type": "gemma3_text", **sizes}))
    assert (gemma.hidden_size, gemma.num_heads, gemma.num_kv_heads, gemma.head_dim) == (2560, 8, 4, 256)
    assert gemma.vocab_size == 262208


@pytest.mark.parametrize("kind", [{"type": "mrope"}, {"rope_type": "mrope"}, {"rope_type": "default"}])
def test_positions_in_sections_are_plain_for_text(kind: dict[str, str]) -> None:
    block = {**kind, "mrope_section": [2, 3, 3], "mrope_interleaved": True}
    spec = spec_of(config("qwen3_vl", text_config={"model_type": "qwen3_vl_text", **TEXT, "rope_scaling": block}))
    assert {rope.kind for rope in spec.ropes if rope is not None} == {"default"}


def test_text_model_that_is_not_native() -> None:
    with pytest.raises(UnknownFamilyError, match="Unsupported model type llava"):
        spec_of(config("llava", text_config={"model_type": "rwkv"}))


def test_no_window_in_qwen3_vl_whatever_its_text_says() -> None:
    """transformers' modelling of it has none."""
    text = {"model_type": "qwen3_vl_text", **TEXT, "use_sliding_window": True, "max_window_layers": 0}
    assert not any(spec_of(config("qwen3_vl", text_config={**text, "sliding_window": 3})).windows)


@pytest.mark.parametrize("rope", [{}, {"rope_parameters": {"rope_type": "default"}}])
@pytest.mark.parametrize("scaling", [{}, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}])
def test_base_of_omni_rotations_that_the_file_does_not_say(rope: dict[str, Any], scaling: dict[str, Any]) -> None:
    """`rope_scaling` replaces `rope_parameters`, with the base in it."""
    both = {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}} if scaling else rope
    for block in (rope, both):
        text = {"model_type": "qwen2_5_omni_text", **TEXT, **block, **scaling}
        spec = spec_of(config("qwen2_5_omni_thinker", text_config=text))
        assert {one.theta for one in spec.ropes if one is not None} == {1e6}


@pytest.mark.parametrize("model_type", ["gemma3", "shieldgemma2"])
def test_logits_of_gemma3_that_reads_images_have_no_cap(model_type: str) -> None:
    """In transformers' modelling, which has one for the text model alone."""
    text = {"model_type": "gemma3_text", **TEXT, "final_logit_softcapping": 3.0}
    assert spec_of(config(model_type, text_config=text)).logits_softcap is None
    assert spec_of(ModelConfig(text)).logits_softcap == 3.0


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl"])
def test_the_smallest_number_of_qwen2_vls_norms(model_type: str) -> None:
    """Where the file does not say it; of Qwen 2 it is another one."""
    assert spec_of(config(model_type, text_config=TEXT)).norm_eps == 1e-5
    assert spec_of(config(model_type, **TEXT)).norm_eps == 1e-5
    assert spec_of(config(model_type, text_config={**TEXT, "rms_norm_eps": 1e-6})).norm_eps == 1e-6
    assert spec_of(config("qwen2", **TEXT)).norm_eps == 1e-6


def test_text_config_that_is_no_object() -> None:
    with pytest.raises(StartupError, match=r"`text_config` must be an object, got \[1\]"):
        spec_of(config("llava", text_config=[1]))


@pytest.mark.parametrize(
    ("base", "head"),
    [
        ("model.language_model.", "lm_head"),
        ("language_model.model.", "language_model.lm_head"),
        ("model.text_model.", "lm_head"),
        ("model.", "lm_head"),
    ],
)
def test_names_follow_the_files(base: str, head: str) -> None:
    names = text_names(Names(), ["vision_tower.embed_tokens.weight", base + "embed_tokens.weight", head + ".weight"])
    assert (names.base, names.embedding, names.layers) == (base, base + "embed_tokens", base + "layers")
    assert (names.norm, names.head) == (base + "norm", head)


def test_files_without_an_embedding() -> None:
    with pytest.raises(StartupError, match=r"weight model\.language_model\.embed_tokens\.weight does not exist"):
        text_names(Names(), ["vision_tower.embed_tokens.weight"])


def test_prompts_of_paligemma_see_both_ways_whatever_its_text_says() -> None:
    """Newer files spell out what transformers sets itself; a plain model of that kind generates no text."""
    text = {"model_type": "gemma", **TEXT, "use_bidirectional_attention": True}
    assert spec_of(config("paligemma", text_config=text)).hidden_size == 64
    with pytest.raises(StartupError, match="use_bidirectional_attention"):
        spec_of(ModelConfig(text))


@pytest.mark.parametrize("fields", [{"is_causal": False}, {"use_bidirectional_attention": True}])
@pytest.mark.parametrize("is_outer", [False, True])
def test_text_that_sees_ahead_is_refused_wherever_the_file_says_it(fields: dict[str, bool], is_outer: bool) -> None:
    text = {"model_type": "gemma3_text", **TEXT}
    with pytest.raises(StartupError, match=f"`{next(iter(fields))}` is .* generates no text"):
        spec_of(config("gemma3", text_config=text if is_outer else text | fields, **(fields if is_outer else {})))
