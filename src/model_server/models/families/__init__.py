"""The native decoder's families: model_type to how its config becomes a Spec.

To add one: a function by the most similar families, an entry in FAMILIES, a line in the parity test.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from model_server.errors import StartupError
from model_server.models.config import ModelConfig
from model_server.models.decoder.spec import Spec
from model_server.models.families import alibi, cohere, corrected, deepseek, gemma, gpt, llama, llama4, moe
from model_server.models.families.base import UnknownFamilyError
from model_server.models.families.encoders import ENCODERS
from model_server.models.families.hybrid import jamba, kimi, lfm2, mamba, mamba2, minimax, nemotron, olmo, qwen
from model_server.models.families.vision import TEXT_TYPES, text_config

FAMILIES: dict[str, Callable[[ModelConfig], Spec]] = {
    "RefinedWeb": alibi.falcon,
    "RefinedWebModel": alibi.falcon,
    "baichuan": llama.baichuan,
    "bamba": mamba2.bamba,
    "bloom": alibi.bloom,
    "cohere": cohere.cohere,
    "cohere2": cohere.cohere2,
    "dbrx": moe.dbrx,
    "deepseek_v2": deepseek.deepseek_v2,
    "deepseek_v3": deepseek.deepseek_v3,
    "deepseek_v32": deepseek.deepseek_v32,
    "falcon": alibi.falcon,
    "falcon_h1": mamba2.falcon_h1,
    "falcon_mamba": mamba.falcon_mamba,
    "gemma": gemma.gemma,
    "gemma2": gemma.gemma2,
    "gemma3_text": gemma.gemma3_text,
    "gemma4_text": gemma.gemma4_text,
    "gemma4_unified_text": gemma.gemma4_unified_text,
    "glm": llama.glm,
    "glm4": llama.glm4,
    "glm4_moe": corrected.glm4_moe,
    "glm4_moe_lite": deepseek.glm4_moe_lite,
    "glm_moe_dsa": deepseek.glm_moe_dsa,
    "granitemoehybrid": mamba2.granitemoehybrid,
    "gpt2": gpt.gpt2,
    "gpt_bigcode": gpt.gpt_bigcode,
    "gpt_neox": gpt.gpt_neox,
    "gpt_oss": moe.gpt_oss,
    "gptj": gpt.gptj,
    "granite": llama.granite,
    "granitemoe": moe.granitemoe,
    "hy_v3": corrected.hy_v3,
    "jamba": jamba.jamba,
    "kimi_linear": kimi.kimi_linear,
    "lfm2": lfm2.lfm2,
    "lfm2_moe": lfm2.lfm2_moe,
    "llama": llama.llama,
    "llama4_text": llama4.llama4_text,
    "mamba": mamba.mamba,
    "mamba2": mamba.mamba2,
    "minimax": minimax.minimax,
    "minimax_m2": corrected.minimax_m2,
    "ministral3": llama.ministral3,
    "mistral": llama.mistral,
    "mistral4": deepseek.mistral4,
    "mixtral": moe.mixtral,
    "mpt": alibi.mpt,
    "nemotron_h": nemotron.nemotron_h,
    "olmo2": llama.olmo2,
    "olmo_hybrid": olmo.olmo_hybrid,
    "opt": gpt.opt,
    "phi": gpt.phi,
    "phi3": llama.phi3,
    "phimoe": moe.phimoe,
    "qwen2": llama.qwen2,
    "qwen2_moe": moe.qwen2_moe,
    "qwen3": llama.qwen3,
    "qwen3_5_moe_text": qwen.qwen3_5_moe_text,
    "qwen3_5_text": qwen.qwen3_5_text,
    "qwen3_moe": moe.qwen3_moe,
    "qwen3_next": qwen.qwen3_next,
    "smollm3": llama.smollm3,
    "stablelm": gpt.stablelm,
    "starcoder2": gpt.starcoder2,
}


# What belongs to heads, which hidden states do not need; those that score texts are read apart.
OF_HEADS = (
    r"(^|\.)pooler\.",
    r"^(cls|classifier|pre_classifier|score|head|decoder|lm_head|dense|qa_outputs)\.",
    r"^(predictions|lm_predictions|mask_predictions|sop_classifier)\.",
    r"^(generator_predictions|generator_lm_head|discriminator_predictions)\.",
    r"^vocab_",
    r"embeddings\.token_type_ids$",
)


# Fields of models that do not generate text -> their values in those that do.
_BIDIRECTIONAL = {"use_bidirectional_attention": False, "is_causal": True}


def spec_of(config: ModelConfig) -> Spec:
    """Return a checkpoint's Spec, of a vision model its text model's.

    Raises:
        UnknownFamilyError: The type is unknown; the text names those that are.
    """
    text = text_config(config)
    for one in (config, text):
        _check_is_causal(one)
    family = FAMILIES.get(text.model_type)
    if family is None:
        served = ", ".join(sorted({*FAMILIES, *TEXT_TYPES}))
        raise UnknownFamilyError(f"Unsupported model type {config.model_type}; this version serves {served}")
    return family(text)


def _check_is_causal(config: ModelConfig) -> None:
    """Refuse models whose tokens see ahead."""
    for name, causal in _BIDIRECTIONAL.items():
        value = config.get(name)
        if value is not None and value is not causal and value != "vision":  # tokens of images alone
            raise StartupError(
                f"config.json: `{name}` is {str(value).lower()}: tokens of this model see those behind them, and it "
                "generates no text; for embeddings use --task embed"
            )


def pooled_spec_of(config: ModelConfig, stored: Collection[str]) -> Spec:
    """Return the Spec of an encoder, or a decoder without its head.

    Raises:
        UnknownFamilyError: The type is unknown, or not in this form.
    """
    encoder = ENCODERS.get(config.model_type)
    if encoder is not None:
        spec = encoder(config, stored)
        if spec is None:
            raise UnknownFamilyError(f"the native {config.model_type} does not serve this form of it")
        return replace(spec, left_over=(*spec.left_over, *OF_HEADS))
    bidirectional = config.flag("use_bidirectional_attention", False) or not config.flag("is_causal", True)
    spec = spec_of(config.without(*_BIDIRECTIONAL))
    left_over = (*spec.left_over, *OF_HEADS)
    if bidirectional and any(spec.mixers):
        raise UnknownFamilyError(f"the native {config.model_type} reads tokens in one direction only")
    spec = replace(spec, has_head=False, bidirectional=bidirectional, left_over=left_over)
    if bidirectional and config.model_type == "gemma3_text":
        # Half of the window is before a token, half behind it.
        windows = tuple(None if window is None else window // 2 + 1 for window in spec.windows)
        spec = replace(spec, windows=windows)
    return spec
