"""Model types that transformers' own modelling serves, as the study found them, and how a test loads one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from parity.protocol import CPU, WHOLE, prompts, run_protocol
from safetensors.torch import load_file, save_file
from support.loading import FixedAttention
from support.tiny_types import type_checkpoint
from torch import Tensor

from model_server.attention.reference import ReferenceBackend
from model_server.distributed.group import ProcessGroup
from model_server.distributed.layout import Ranks
from model_server.distributed.placement import Placement
from model_server.models.config import ModelConfig
from model_server.models.hf import choice, loading
from model_server.models.hf.crossing import cross_attention_of
from model_server.models.hf.self_check import alone, translated
from model_server.models.hf.stateful import decoder_prefix
from model_server.models.model import Model
from model_server.runner.runner import Runner
from model_server.weights.checkpoint import examine

# With a state per request until transformers 5.24, over the paged cache since.
_NOW_PAGED = ("gptj", "codegen")
_SINCE_5_24 = Version(version("transformers")) >= Version("5.24")
# Over the paged cache.
PAGED = (
    "afmoe", "apertus", "arcee", "aria_text", "axk1", "beam", "bitnet", "cohere", "cohere2", "cohere2_moe",
    "ctrl", "cwm", "dbrx", "deepseek_v2", "deepseek_v3", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe",
    "flex_olmo", "flint", "gemma", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text",
    "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss",
    "granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared", "helium", "hunyuan_v1_dense",
    "hunyuan_v1_moe", "hy_v3", "hyperclovax", "internlm3", "iquestcoder", "jais2", "jetmoe", "kolibri1", "laguna",
    "longcat_flash", "llama", "llama4_text", "mellum", "mimo_v2_flash", "minicpm3", "minimax_m2", "minimax_m3_vl_text",
    "ministral", "ministral3", "mistral", "mixtral", "modernbert-decoder", "moshi", "nanochat", "nemotron",
    "olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_moe", "seed_oss", "smollm3", "solar_open", "starcoder2", "vaultgemma", "youtu",
    *(_NOW_PAGED if _SINCE_5_24 else ()),
    # The text of models that see or hear, whose text model is no native family.
    "apertus1p5", "aria", "audioflamingo3", "chameleon", "cohere_compass", "cosmos3_edge", "cosmos3_omni",
    "deepseek_ocr2", "emu3", "ernie4_5_vl_moe", "exaone4_5", "fuyu", "gemma4", "gemma4_unified", "glm_ocr",
    "glmasr", "granite_speech", "hunyuan_vl", "hyperclovax_vision_v2", "minimax_m3_vl", "mistral4", "molmo2",
    "gemma3n", "muse_glimmer", "muse_spark", "paddleocr_vl", "qwen2_audio", "qwen3_asr", "step3p7", "voxtral",
)  # fmt: skip
# Encoder-decoders over the paged cache, prompts whole.
TRANSLATING = (
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "florence2", "longt5", "m2m_100", "marian", "mbart",
    "mt5", "pegasus", "pegasus_x", "plbart", "seamless_m4t", "seamless_m4t_v2", "t5", "t5gemma", "umt5",
)  # fmt: skip
# With a state per request.
STATEFUL = (
    "mamba", "mamba2", "falcon_mamba", "rwkv", "jamba", "qwen3_next", "qwen3_5_text", "lfm2",
    "olmo_hybrid", "deepseek_v4", "bloom", "mpt", "falcon",
    "gpt_neo", "xglm", "biogpt", "stablelm", "diffllama", "doge", "hrm_text", "fsmt", "led",
    "hy_v4_vl", "inkling2", "inkling2_loop", "kosmos-2.5", "lfm2_vl", "lfm3_vl", "minicpm_ocr", "minicpmv4_6",
    "minicpmv4_7", "mistral_large4", "mllama", "nemotron_h_omni", "unlimited_ocr",
    "blt", "cpmant", "evolla", "inkling_mm_model", "kosmos-2", "nemo_speechlm", "openai-gpt",
    "prophetnet", "recurrent_gemma",
    *(() if _SINCE_5_24 else _NOW_PAGED),
)  # fmt: skip


# Their towers are of a library that is not among the requirements, or take long -> the type of their text model.
FOREIGN = {"fast_vlm": "qwen2", "gemma3n": "gemma3n_text", "perception_lm": "llama", "vibevoice_asr": "qwen2"}
# What speaks too -> the part that makes text.
THINKERS = {"qwen2_5_omni": "qwen2_5_omni_thinker", "qwen3_omni_moe": "qwen3_omni_moe_thinker"}


@dataclass(frozen=True)
class LibraryCase:
    """A checkpoint, and what transformers gives for each sequence alone: logits [length, vocab] float32.

    prompt_lengths: of an encoder-decoder, whose rows before the last of the prompt are not compared; else zeros.
    """

    path: Path
    model: Any
    sequences: list[Tensor]
    logits: list[Tensor]


def make_case(model_type: str, path: Path, *, eager: bool = True, **overrides: Any) -> LibraryCase:
    """Write a tiny checkpoint of the type and compute the reference with `eager` attention, or what the model takes."""
    built = FOREIGN.get(model_type) or THINKERS.get(model_type, model_type)
    model = type_checkpoint(built, path, eager=eager, **overrides)
    if model_type in FOREIGN:
        _with_foreign_tower(model_type, path)
    if model_type in THINKERS:
        with_talker(model_type, path)
    text_config = model.config.get_text_config(decoder=True)
    # Without the padding token, which some models skip when they count positions.
    padding = getattr(text_config, "pad_token_id", None)
    sequences = prompts(text_config.vocab_size)
    if padding is not None:
        sequences = [s.where(s != padding, s + 1) for s in sequences]
    lengths = [next(step[i] for step in WHOLE if step[i]) for i in range(len(sequences))]
    with torch.inference_mode():
        if getattr(model.config, "is_encoder_decoder", False):
            prefix = decoder_prefix(model)
            translate = _translated_by_steps if model_type == "prophetnet" else translated
            logits = [translate(model, s[:n], prefix, s[n:]) for s, n in zip(sequences, lengths, strict=True)]
        elif model_type == "cpmant" or "reference_sliding_attention" in (
            getattr(text_config, "layer_types", None) or ()
        ):
            logits = [_generated(model, s, n) for s, n in zip(sequences, lengths, strict=True)]
        else:
            cross = cross_attention_of(model)
            blank = [{} if cross is None else cross.arguments(s, ())[0] for s in sequences]
            logits = [alone(_reading(model), s, **one) for s, one in zip(sequences, blank, strict=True)]
    return LibraryCase(path, model, sequences, logits)


def _with_foreign_tower(model_type: str, path: Path) -> None:
    """Make a model of text the text model of another, whose tower the libraries here do not know."""
    file, config = path / "model.safetensors", path / "config.json"
    tensors = {name.replace("model.", "model.language_model.", 1): one for name, one in load_file(file).items()}
    tower = (
        "model.vision_tower.timm_model.stem.weight",
        "model.embed_vision.embedding.weight"
        if model_type == "gemma3n"
        else "model.multi_modal_projector.linear_1.weight",
    )
    save_file(tensors | {name: torch.ones(2) for name in tower}, file)
    fields = {"model_type": model_type, "text_config": json.loads(config.read_text()), "vision_config": {}}
    config.write_text(json.dumps(fields))


def with_talker(model_type: str, path: Path) -> None:
    """Make a model that reads a part of one that speaks, as public files hold it."""
    file, config = path / "model.safetensors", path / "config.json"
    tensors = {f"thinker.{name}": one for name, one in load_file(file).items()}
    speaking = ("talker.model.norm.weight", "token2wav.code2wav_dit_model.proj_out.weight", "code2wav.norm.weight")
    save_file(tensors | {name: torch.ones(2) for name in speaking}, file)
    thinker = json.loads(config.read_text())
    config.write_text(json.dumps({"model_type": model_type, "thinker_config": thinker, "talker_config": {}}))


def _reading(model: Any) -> Any:
    """What computes logits of text: of models whose whole reads nothing without a picture, the language model."""
    if type(model).main_input_name == "input_ids":
        return model
    return next(part for name in ("language_model", "text_model") if (part := getattr(model, name, None)) is not None)


def _generated(model: Any, sequence: Tensor, prompt: int) -> Tensor:
    """Logits with transformers' own cache, token by token behind the prompt, which is another thing to such layers."""
    output = model(input_ids=sequence[None, :prompt], use_cache=True)
    rows = [output.logits[0]]
    first = 0 if model.config.model_type == "cpmant" else prompt  # it takes all tokens, and skips those of its cache
    for end in range(prompt + 1, len(sequence) + 1):
        output = model(input_ids=sequence[None, first:end], cache=output.cache, use_cache=True)
        rows.append(output.logits[0])
        first = first and end
    return torch.cat(rows)


def _translated_by_steps(model: Any, prompt: Tensor, prefix: tuple[int, ...], generated: Tensor) -> Tensor:
    """Like `translated`, with transformers' own cache, token by token."""
    mask = torch.ones_like(prompt)[None]
    encoded, cache, rows = model.get_encoder()(input_ids=prompt[None], attention_mask=mask), None, []
    for token in [*prefix, *generated.tolist()]:
        ids = torch.tensor([[token]])
        output = model(encoder_outputs=encoded, attention_mask=mask, decoder_input_ids=ids, cache=cache, use_cache=True)
        rows.append(output.logits[0])
        cache = output.cache
    return torch.cat(rows)[len(prefix) - 1 :]


def load(path: Path, group: ProcessGroup | None = None, *, trust_remote_code: bool = False) -> Runner:
    """The runner that the choice comes to, in float32 on the CPU; the native decoder is not asked."""
    checkpoint = examine(path)
    model = Model(checkpoint=checkpoint, name="m", config=ModelConfig(checkpoint.fields), spec=None)
    found = loading.find_classes(model, trust_remote_code=trust_remote_code)
    placement = Placement(CPU, torch.float32, Ranks.of(group or ProcessGroup()))
    with torch.inference_mode():
        return choice.load_runner(found, placement, FixedAttention(ReferenceBackend()))


def run_whole(runner: Runner, sequences: Sequence[Tensor], block_size: int = 4) -> list[Tensor]:
    """The protocol with whole prompts; of an encoder-decoder only the rows that its decoder has."""
    logits = run_protocol(runner, list(sequences), block_size, steps=WHOLE)
    if runner.traits.decoder_prefix is not None:
        return [rows[~rows.isnan().any(-1)] for rows in logits]
    return logits
