"""A checkpoint as a transformers model: class, code, weights. Imports transformers late."""

from __future__ import annotations

import dataclasses
import warnings
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import nn

from model_server.distributed.placement import Placement
from model_server.errors import StartupError
from model_server.models.config import CROSSING, ModelConfig
from model_server.models.hf.merge import merge
from model_server.models.hf.quantized import Exchange, forget_config
from model_server.models.hf.translation_plans import count_own_heads, plan_of
from model_server.models.model import Model
from model_server.weights.leftover import check_leftover, natural_order
from model_server.weights.library_names import StoredNames
from model_server.weights.reader import FLOATING
from wire.model_files import POSITIONS, check_small_file

# Types all of whose parts read text.
_OF_TEXT = ("blt",)
# Types whose ranks give other logits than one does, by transformers' own plan.
_WRONG_PLANS = ("step3p5",)
# Types whose whole needs a library for its towers (timm): their text model alone is loaded.
_BY_TEXT_CLASS = ("gemma3n",)
_TOWERS_OF_TEXT_CLASS = (r"^model\.(vision_tower|audio_tower|embed_vision|embed_audio)\.",)
# Types whose whole reads nothing without a picture -> the language model within.
_PARTS = {"kosmos-2": "text_model"}
# Types that transformers computes only with something else beside the text -> what.
_READ_ALSO = {
    "kyutai_speech_to_text": "tokens of sound beside each of text",
    "udop": "the place of every word on a page",
    "voxtral_realtime": "sound beside each token",
}
NO_TEXT = {
    "gemma4_assistant": "it guesses tokens for gemma4, whose keys and values it reads",
    "gemma4_unified_assistant": "it guesses tokens for gemma4_unified, whose keys and values it reads",
    "musicgen": "it makes sound",
    "musicgen_melody": "it makes sound",
    "pi0": "it makes the movements of a robot",
}
"""Types whose result is no text -> what it is."""
_NOT_BY_TOKENS = {"diffusion_gemma": "it writes a block of text by repeated corrections, not token by token"}
_READ_BY_LIBRARY = ("config.json", "generation_config.json", "adapter_config.json", "model.safetensors.index.json")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HfModel:
    """A model that transformers knows; `model_class` is None for the repository's own code."""

    described: Model
    config: Any
    auto_class: Any
    model_class: Any
    trust_remote_code: bool

    @property
    def model_type(self) -> str:
        return self.described.config.model_type

    @property
    def text_config(self) -> Any:
        """Return the decoder's config."""
        return self.config.get_text_config(decoder=True)

    @property
    def reads_text_alone(self) -> bool:
        """Whether it has towers that are not served."""
        if self.model_type in _BY_TEXT_CLASS:
            return True
        return self.model_type not in CROSSING and not self.is_encoder_decoder and bool(_towers(self.config))

    @property
    def is_encoder_decoder(self) -> bool:
        return bool(getattr(self.config, "is_encoder_decoder", False))


def find_classes(model: Model, *, trust_remote_code: bool) -> HfModel:
    """Find config and model classes; the repository's code runs only with `trust_remote_code`.

    Raises:
        StartupError: The type is unknown, needs code that may not run, or generates no text.
    """
    quiet()
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    fields, directory = model.config, model.checkpoint.directory
    model_type = fields.model_type
    if model_type not in CONFIG_MAPPING:
        if not isinstance(fields.get("auto_map"), dict):
            raise StartupError(f"Unsupported model type {model_type}: neither Tercet nor transformers knows it")
        if not trust_remote_code:
            raise StartupError(
                f"model type {model_type} needs code from its repository, which does not run unless you trust it: "
                "read it, then add --trust-remote-code"
            )
    for name in _READ_BY_LIBRARY:
        check_small_file(directory / name, StartupError)
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # anything may come from a config class
        raise StartupError(f"cannot read the config of {model_type}: {one_line(error)}") from error
    if model_type in NO_TEXT or model_type in _NOT_BY_TOKENS:
        reason = NO_TEXT.get(model_type) or _NOT_BY_TOKENS[model_type]
        raise StartupError(f"model type {model_type} cannot be served: {reason}")
    if model_type in _BY_TEXT_CLASS:
        config = config.get_text_config(decoder=True)
    auto_class, model_class = _classes(config, fields, trust_remote_code)
    wanted = getattr(model_class, "main_input_name", "input_ids")
    also = _READ_ALSO.get(model_type) or (None if wanted == "input_ids" else f"`{wanted}`")
    if also is not None and model_type not in _PARTS:
        raise StartupError(
            f"model type {model_type} generates nothing from text alone: it reads {also}, which is not served"
        )
    return HfModel(
        described=model,
        config=config,
        auto_class=auto_class,
        model_class=model_class,
        trust_remote_code=trust_remote_code,
    )


def _classes(config: Any, fields: ModelConfig, trust_remote_code: bool) -> tuple[Any, Any]:
    """Return the auto class, and what it chooses (None: the repository's)."""
    import transformers
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForMultimodalLM,
        AutoModelForSeq2SeqLM,
    )
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        MODEL_FOR_MULTIMODAL_LM_MAPPING,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    )

    hearing: tuple[Any, Any] = (AutoModelForMultimodalLM, MODEL_FOR_MULTIMODAL_LM_MAPPING)
    translators: tuple[Any, Any] = (AutoModelForSeq2SeqLM, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING)
    decoders: tuple[Any, Any] = (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING)
    seeing: tuple[Any, Any] = (AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    if fields.model_type in CROSSING:
        pairs = [seeing]
    elif getattr(config, "is_encoder_decoder", False):
        pairs = [translators, seeing]
    elif config.get_text_config(decoder=True) is not config:  # the class for text is that of a part
        pairs = [translators, seeing, decoders]
    else:
        pairs = [translators, decoders, seeing]
    remote = fields.get("auto_map") if trust_remote_code else None
    for auto_class, mapping in (*pairs, hearing):
        if isinstance(remote, dict) and auto_class.__name__ in remote:
            return auto_class, None
        if type(config) in mapping:
            found = mapping[type(config)]
            return auto_class, found[0] if isinstance(found, list | tuple) else found
    # A mapping does not find the class of a config that has two types (Evolla).
    name = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(fields.model_type)
    if isinstance(name, str):
        own = getattr(transformers, name)
        return own, own
    raise StartupError(f"model type {fields.model_type} is not one that generates text from text")


def load_model(hf: HfModel, placement: Placement, *, attention: str | None) -> Any:
    """Load the model for evaluation, this rank's part by the model's own plan.

    Args:
        attention: A registered attention's name; None: transformers' choice.

    Raises:
        StartupError: Its files do not fit the model; transformers raises its own errors.
    """
    options: dict[str, Any] = {
        "config": hf.config,
        "dtype": placement.dtype,
        "attn_implementation": None if attention is None else attention_of_text(hf.config, attention),
        "trust_remote_code": hf.trust_remote_code,
        "local_files_only": True,
        "use_safetensors": True,
        # So that the report names them; otherwise they are named in a warning, which `quiet` keeps from the log.
        "ignore_mismatched_sizes": True,
        "output_loading_info": True,
    }
    exchange = None
    merged = hf.described.checkpoint.merged
    quantizes_merged = merged is not None and hf.described.scheme.quantize is not None
    if hf.described.scheme.method is not None:
        forget_config(hf.config)
        exchange = Exchange.of(hf.described, getattr(hf.model_class, "base_model_prefix", "") or "model", placement)
        if not quantizes_merged:
            options["quantization_config"] = exchange.config()
    if placement.ranks.tensor.size > 1:
        options |= _sharding(placement.ranks.tensor.size, _own_plan(hf, placement.ranks.tensor.size) or "auto")
    elif placement.device.type != "cpu":
        options["device_map"] = {"": placement.device}
    with warnings.catch_warnings(), nullcontext() if exchange is None else exchange.reading():
        warnings.simplefilter("ignore")  # deprecations inside other people's modelling
        model, report = hf.auto_class.from_pretrained(hf.described.checkpoint.directory, **options)
    if hf.is_encoder_decoder and placement.ranks.tensor.size > 1:
        count_own_heads(model, placement.ranks.tensor.size)
    if mismatched := sorted(report["mismatched_keys"]):
        name, found, wanted = mismatched[0]
        raise StartupError(f"weight {name} has shape {list(found)}; the config asks for {list(wanted)}")
    missing = sorted(report["missing_keys"])
    if missing and exchange is not None and exchange.scheme.quantize is None:
        raise StartupError(
            f"{hf.model_type} is stored as {exchange.scheme.method}, and transformers finds no {missing[0]} in it: "
            "only linear layers are served quantized by the transformers runner"
        )
    if missing:
        raise StartupError(f"the weights of {hf.model_type} lack {len(missing)} tensors, the first is {missing[0]}")
    names = StoredNames(model)
    headers = hf.described.checkpoint.headers.values()
    stored = {name: tensor.dtype for header in headers for name, tensor in header.tensors.items()}
    if unreadable := names.of_numbers(name for name, dtype in stored.items() if dtype not in FLOATING):
        name = min(unreadable, key=natural_order)
        raise StartupError(f"weight {name} is stored as {stored[name]}, in no format that this version serves")
    unread = names.without_place(stored)
    if merged is not None:
        merge(model, merged, hf.described.name)
    if exchange is not None:
        exchange.quantize(model) if quantizes_merged else exchange.fill(model)
        exchange.scheme.report(placement.dtype)
        unread = [name for name in unread if name in exchange.reader.unread]
    check_leftover(
        unread,
        hf.model_type,
        names.layer_beyond,
        known=(*names.left_over, *(_TOWERS_OF_TEXT_CLASS if hf.model_type in _BY_TEXT_CLASS else ())),
        warns=placement.ranks.world.rank == 0,
    )
    if hf.reads_text_alone:
        _empty_towers(hf.config, model)
    if hf.model_type in _PARTS:
        model = getattr(model, _PARTS[hf.model_type])
    return model.eval().requires_grad_(False)


def attention_of_text(config: Any, name: str) -> str | dict[str, str]:
    """Return what gives the text model the attention `name`, and towers, which see both ways, their own."""
    towers = _towers(config)
    if not towers:
        return name
    text = config.get_text_config(decoder=True)
    own = next(key for key in config.sub_configs if getattr(config, key) is text)
    return {"": name, own: name, **dict.fromkeys(towers, "eager")}


def _towers(config: Any) -> dict[str, Any]:
    """Return the parts of a config beside that of the text model, by name; none for a model of text alone."""
    text = config.get_text_config(decoder=True)
    parts = {key: getattr(config, key, None) for key in getattr(config, "sub_configs", ())}
    if config.model_type in _OF_TEXT or not any(part is text for part in parts.values()):
        return {}
    return {key: part for key, part in parts.items() if part is not None and part is not text}


def _empty_towers(config: Any, model: Any) -> None:
    """Free the weights of what reads pictures and sound. The modules stay: some models ask them for their device."""
    types = {part.model_type for part in _towers(config).values()}
    text = config.get_text_config(decoder=True)
    for module in model.modules():
        part = getattr(module, "config", None)
        if part is None or part is text or part is config or part.model_type not in types:
            continue
        for inner in module.modules():
            for name, weight in inner.named_parameters(recurse=False):
                empty = torch.empty(0, dtype=weight.dtype, device=weight.device)
                setattr(inner, name, nn.Parameter(empty, requires_grad=False))


def _own_plan(hf: HfModel, world_size: int) -> dict[str, str] | None:
    """Return our plan for an encoder-decoder; None: transformers may have one."""
    if not hf.is_encoder_decoder or hf.model_class is None:
        return None
    return plan_of(hf.model_class, hf.config, world_size)


def _sharding(world_size: int, plan: Literal["auto"] | dict[str, str]) -> dict[str, Any]:
    from transformers.distributed.configuration_utils import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=world_size, tp_plan=plan)}


def check_sharding(hf: HfModel, world_size: int) -> None:
    """Refuse models without a plan for `world_size` ranks."""
    if world_size == 1:
        return
    if hf.described.checkpoint.merged is not None:
        raise StartupError(f"an adapter of {hf.model_type} is merged on one shard only: use --num-shard 1")
    if hf.described.adapter_folders:
        raise StartupError(f"LoRA adapters of {hf.model_type} are served on one shard only: use --num-shard 1")
    config = hf.text_config
    own = _own_plan(hf, world_size)
    plan = getattr(config, "base_model_tp_plan", None) if own is None else own
    if not plan:
        raise StartupError(f"transformers has no tensor-parallel plan for {hf.model_type}: use --num-shard 1")
    if config.model_type in _WRONG_PLANS:
        raise StartupError(f"transformers' tensor-parallel plan for {hf.model_type} is wrong: use --num-shard 1")
    if not any(name.endswith((".k", "k_proj", "qkv_proj", "query_key_value", "Wqkv")) for name in plan):
        return  # attention is replicated, only the rest is divided
    heads = getattr(config, "num_attention_heads", None)
    names = ("num_key_value_heads", "num_attention_heads")
    said = {name: getattr(config, name, None) or heads for name in names}
    said["encoder_attention_heads"] = getattr(config, "encoder_attention_heads", None)
    counts = {name: count for name, count in said.items() if isinstance(count, int)}
    for name, count in counts.items():
        if count % world_size:
            fitting = [n for n in range(1, count + 1) if not any(one % n for one in counts.values())]
            raise StartupError(
                f"{hf.model_type}: `{name}` ({count}) cannot be divided among {world_size} shards; "
                f"use --num-shard {' or '.join(map(str, fitting))}"
            )


def max_positions(config: Any) -> int | None:
    """Return the longest sequence, if the config bounds it."""
    for name in POSITIONS:
        value = getattr(config, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def quiet() -> None:
    """Leave output to our log: no bars, no advice."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
