"""The facts of config.json that defaults and checks need, read leniently; and where the model is on disk."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from launcher.errors import ArgumentValidation
from launcher.planning.key_layers import LatentAttention, key_layers_in, latent_in
from launcher.planning.mixers import Mixers, mixers_in
from launcher.planning.weight_files import pretended, tensors_of_codes, type_in, weight_bytes
from wire.cli.spelling import closest
from wire.lora.merged import ADAPTER_CONFIG, base_model
from wire.model_files import read_config, read_text
from wire.pooling.task import Task, find_task
from wire.quantization import gguf
from wire.quantization.config import by_tensors, in_config, said_of, wants_float8_cache
from wire.quantization.methods import method_of, refuse_gguf

logger = logging.getLogger("text_generation_launcher")

DEMO = "demo"
"""The model id that means the embedded model; the children know it too."""
_TYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_LETTERS_PER_EDIT = 4
"""Of a misspelt model id."""


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """Facts of config.json, in TGI's reading of it; None where it does not say."""

    model_type: str | None = None
    max_position_embeddings: int | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    vocab_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    num_layers: int | None = None
    head_dim: int | None = None
    experts_per_token: int = 1
    num_shared_experts: int = 0
    num_experts: int = 1
    has_vision: bool = False
    quantization: Mapping[str, Any] | None = None
    """The `quantization_config` of a checkpoint that is quantized."""
    wants_float8_cache: bool = False
    weight_bytes: int | None = None
    """Size of the weight files, where they are here already."""
    stored_type: str | None = None
    """Type of most of the weights, as safetensors names it: by the files where they are here, else by config.json."""
    stored_itemsize: int = 2
    """Bytes of a plain weight in them."""
    has_tied_head: bool = False
    latent: LatentAttention | None = None
    mixers: Mixers | None = None
    """Of layers with something else than attention; None: there are none."""
    key_layers: tuple[tuple[int, int], ...] | None = None
    """KV heads of each layer that has keys of its own, and their width; None: all layers are alike."""
    num_routed: int = 0
    """Experts among which a router chooses, by any family's name for them."""
    num_dense: int = 0
    """Layers without experts, of a model that has some."""
    shared_size: int = 0
    """Width of the experts that all tokens read."""
    has_shared_gate: bool = False
    """What these give is weighted."""
    task: Task = "generate"
    """By its files."""
    text: ModelInfo | None = None
    """Of the text model, where config.json has a part for it. Defaults, which are TGI's, do not depend on it."""

    @property
    def quantize(self) -> str | None:
        """The method of a checkpoint that is quantized, `unknown` where it does not say."""
        return None if self.quantization is None else method_of(self.quantization)

    def summary(self) -> str:
        """For people: what is known of the model's kind and size."""
        parts = [self.model_type or "unknown type"]
        if self.num_layers:
            parts.append(f"{self.num_layers} layers")
        if self.num_heads:
            parts.append(f"{self.num_heads} heads ({self.num_kv_heads} KV)")
        if self.max_position_embeddings:
            parts.append(f"{self.max_position_embeddings} positions")
        if self.weight_bytes is not None:
            parts.append(f"{shown_bytes(self.weight_bytes)} of weights")
        return ", ".join(parts)


def shown_bytes(count: int) -> str:
    """For people."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def is_local(model_id: str) -> bool:
    """Whether the id can only be a path: the demo model, by its spelling, or because it exists."""
    if gguf.names_file(model_id):
        return gguf.in_repository(model_id) is None
    return model_id == DEMO or model_id.startswith(("/", "./", "../", "~")) or Path(model_id).exists()


def directory(model_id: str, revision: str | None, environ: Mapping[str, str]) -> Path | None:
    """Return the model's folder, or its snapshot in the hub cache if there is one."""
    if model_id == DEMO:
        from wire import demo_model

        return demo_model.path()
    if gguf.names_file(model_id):
        return gguf.found_folder(model_id, revision, hub_cache(environ))
    if is_local(model_id):
        return Path(os.path.expanduser(model_id))  # Path's own raises where there is no such user
    repository = hub_cache(environ) / f"models--{model_id.replace('/', '--')}"
    try:
        commit = read_text(repository / "refs" / (revision or "main"), ValueError).strip()
    except ValueError:
        commit = revision or ""
    snapshot = repository / "snapshots" / commit
    return snapshot if commit and snapshot.is_dir() else None


def model_directory(model_id: str, revision: str | None, environ: Mapping[str, str]) -> Path | None:
    """Return the model's folder; for an adapter that of its base model.

    Raises:
        ArgumentValidation: The adapter names no usable base.
    """
    found = directory(model_id, revision, environ)
    base = None if found is None else base_model(found, ArgumentValidation, is_local=is_local(model_id))
    return found if base is None else directory(base.model_id, base.revision, environ)


def hub_cache(environ: Mapping[str, str]) -> Path:
    """The hub library's own order of variables, so that launcher and children look at the same place."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environ.get(name):
            return _at_home(environ[name])
    if environ.get("HF_HOME"):
        return _at_home(environ["HF_HOME"]) / "hub"
    return _at_home(environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface" / "hub"


def _at_home(path: str) -> Path:
    """Expand `~`, which stays for a user without a home, as in the hub library."""
    return Path(os.path.expanduser(path))


def is_misspelt_demo(model_id: str) -> bool:
    return model_id != DEMO and closest(model_id, [DEMO], letters_per_edit=_LETTERS_PER_EDIT) is not None


def similar_directory(model_id: str) -> str | None:
    """The directory beside `model_id`, spelled as it is, that it was probably meant to be."""
    written, slash, asked = model_id.rstrip("/").rpartition("/")
    others = [name for name in _folders(Path(os.path.expanduser(written + slash))) if name != asked]
    return closest(model_id, [written + slash + name for name in others], letters_per_edit=_LETTERS_PER_EDIT)


def similar_cached(model_id: str, environ: Mapping[str, str]) -> str | None:
    """The model in the hub cache that `model_id` was probably meant to be."""
    others = [name for name in cached_models(environ) if name != model_id]
    return closest(model_id, others, letters_per_edit=_LETTERS_PER_EDIT)


def cached_models(environ: Mapping[str, str]) -> list[str]:
    """Ids of the models in the hub cache, whole or not."""
    names = [name.removeprefix("models--") for name in _folders(hub_cache(environ)) if name.startswith("models--")]
    return [name.replace("--", "/") for name in names]


def _folders(parent: Path) -> list[str]:
    """Names, sorted; none of a folder that cannot be read."""
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir())
    return []


def with_hub_cache(environ: Mapping[str, str], asked: Path | None) -> Mapping[str, str]:
    """Set the hub cache in `environ`: the flag wins over HF_HUB_CACHE, which wins over the flag's variable."""
    if asked is None:
        return environ
    is_flag = asked != Path(environ.get("HUGGINGFACE_HUB_CACHE", ""))
    names = ("HUGGINGFACE_HUB_CACHE", "HF_HUB_CACHE") if is_flag else ("HUGGINGFACE_HUB_CACHE",)
    return {**environ, **dict.fromkeys(names, str(asked))}


def is_made_of_gguf(path: Path) -> bool:
    """Whether a directory is what the download step makes of a GGUF file."""
    return (path / gguf.WEIGHTS).is_file() and (path / "config.json").is_file()


def check_directory(model_id: str, path: Path) -> None:
    """Refuses a local directory that cannot be served. Raises ArgumentValidation."""
    if is_made_of_gguf(path):
        return
    if path.is_file():
        is_weights = path.name.endswith((".safetensors", ".bin", ".pt", ".pth"))
        what = (
            f"the folder of its model, {path.parent}" if is_weights else "a folder, a GGUF file, or the id of a model"
        )
        raise ArgumentValidation(f"{model_id} is a file, and no GGUF file: give {what}")
    if not path.is_dir():
        similar = similar_directory(model_id)
        hint = f"; did you mean {similar}?" if similar else ""
        raise ArgumentValidation(f"{model_id}: no such directory{hint}")
    try:
        found = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise ArgumentValidation(f"{model_id} cannot be read: {error.strerror}") from None
    refuse_gguf(found, model_id, ArgumentValidation)
    if "config.json" not in found:
        _refuse_without_config(model_id, path, found)
    if not any(name.endswith(".safetensors") for name in found):
        if any(name.endswith((".bin", ".pt", ".pth")) for name in found):
            raise ArgumentValidation(
                f"{model_id}: the directory holds pickled weights and no *.safetensors; nothing is "
                f"unpickled here: convert them once with `model-server download-weights {model_id} --auto-convert`"
            )
        raise ArgumentValidation(
            f"{model_id}: the directory has no weights, which are *.safetensors (found: {_some(found)}): download the "
            "whole model"
        )
    for name in found:
        if name.endswith((".safetensors", "tokenizer.json")) and (text := pretended(path / name)):
            raise ArgumentValidation(f"{path / name} is {text}")


def _refuse_without_config(model_id: str, path: Path, found: list[str]) -> NoReturn:
    """Raises ArgumentValidation."""
    if not found:
        raise ArgumentValidation(f"{model_id} is empty: a model is a folder with config.json and *.safetensors")
    if ADAPTER_CONFIG in found:
        raise ArgumentValidation(f"{model_id} holds an adapter and no model: give its base model, and --lora-adapters")
    snapshots = sorted((path / "snapshots").glob("*")) if "snapshots" in found else []
    models = [name for name in found if (path / name / "config.json").is_file()] or [
        name for name in found if name.lower().endswith(gguf.SUFFIX)
    ]
    meant = snapshots[-1] if snapshots else path / models[0] if len(models) == 1 else None
    remedy = f"; did you mean {meant}?" if meant else f" (found: {_some(found)})"
    raise ArgumentValidation(f"{model_id}: the directory has no config.json{remedy}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "nothing"


def read(path: Path | None) -> ModelInfo | None:
    """The facts in `path`/config.json and beside it; None, with one warning, if they cannot be read."""
    if path is None:
        return None
    try:
        config = read_config(path / "config.json", ValueError)
        said = said_of(path, config, ValueError)
        wants_float8 = wants_float8_cache(path, config, ValueError)
    except ValueError as error:
        logger.warning("Could not read the model's config.json, so defaults do not depend on the model: %s", error)
        return None
    size = weight_bytes(path)
    if said is None and size is not None:
        said = by_tensors(tensors_of_codes(path))
    info = from_config(config)
    stored = type_in(path) or info.stored_type
    return dataclasses.replace(
        info,
        task=_task(path),
        quantization=said,
        wants_float8_cache=wants_float8,
        weight_bytes=size,
        stored_type=stored,
        stored_itemsize=info.stored_itemsize if stored is None else _itemsize(stored),
    )


def _task(path: Path) -> Task:
    try:
        return find_task(path, "auto", ValueError).task
    except ValueError:  # which the shard says
        return "generate"


def from_config(config: Mapping[str, Any]) -> ModelInfo:
    """TGI's fall-backs between field names."""
    text = config.get("text_config")
    text = text if isinstance(text, dict) else None
    hidden_size, num_heads = _count(config, "hidden_size", "n_embd"), _count(config, "num_attention_heads")
    head_dim = _count(config, "head_dim")
    if head_dim is None and hidden_size and num_heads and hidden_size % num_heads == 0:
        head_dim = hidden_size // num_heads
    model_type = config.get("model_type")
    if head_dim is None and text is not None:
        head_dim = _count(text, "head_dim") or (256 if model_type == "gemma3" else None)
    return ModelInfo(
        model_type=model_type if isinstance(model_type, str) else None,
        max_position_embeddings=_count(
            config, "max_position_embeddings", "max_seq_len", "n_positions", "model_max_length"
        ),
        hidden_size=hidden_size,
        intermediate_size=_count(config, "intermediate_size"),
        vocab_size=_count(config, "vocab_size"),
        num_heads=num_heads,
        num_kv_heads=_count(config, "num_key_value_heads") or num_heads,
        num_layers=_count(config, "num_hidden_layers") or len(config.get("layers_block_type") or ()) or None,
        head_dim=head_dim,
        experts_per_token=_count(config, "num_experts_per_tok", "num_experts_per_token") or 1,
        num_shared_experts=_count(config, "n_shared_experts", "num_shared_experts") or 0,
        num_experts=_count(config, "num_local_experts") or 1,
        has_vision="vision_config" in config,
        quantization=in_config(config),
        stored_type=_TYPES.get(str(_stored_type(config)).removeprefix("torch.")),
        stored_itemsize=4 if _stored_type(config) == "float32" else 2,
        has_tied_head=config.get("tie_word_embeddings") is True,
        latent=latent_in(config),
        mixers=mixers_in(config),
        key_layers=key_layers_in(config),
        num_routed=_count(config, "num_local_experts", "num_experts", "n_routed_experts") or 0,
        num_dense=_num_dense(config),
        shared_size=_shared_size(config),
        has_shared_gate=bool(_count(config, "shared_expert_intermediate_size")),
        text=None if text is None else _text_info(config, text),
    )


def _text_info(config: Mapping[str, Any], text: Mapping[str, Any]) -> ModelInfo:
    """What the part for the text model does not say, the rest of the config may."""
    rest = {name: value for name, value in config.items() if name != "text_config"}
    own = {name: value for name, value in text.items() if name != "text_config"}
    default = {"head_dim": 256} if config.get("model_type") == "gemma3" else {}
    return from_config(default | rest | own)


def _itemsize(stored_type: str) -> int:
    return {"F64": 8, "F32": 4}.get(stored_type, 2)


def _stored_type(config: Mapping[str, Any]) -> Any:
    return config.get("torch_dtype") or config.get("dtype")


def _num_dense(config: Mapping[str, Any]) -> int:
    named = config.get("mlp_only_layers")
    return _count(config, "first_k_dense_replace") or (len(named) if isinstance(named, list) else 0)


def _shared_size(config: Mapping[str, Any]) -> int:
    each, count = _count(config, "moe_intermediate_size"), _count(config, "n_shared_experts", "num_shared_experts")
    return _count(config, "shared_expert_intermediate_size") or (each or 0) * (count or 0)


def _count(config: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    return None
