"""Vision tower and projector by transformers: from an image to its rows."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model_server.errors import RequestError, StartupError
from model_server.features.images.families import VisionFamily
from model_server.features.images.image import Encoded, Image
from model_server.models.hf.stateful import StatefulRunner
from model_server.text.tokenizer import Tokenizer
from model_server.weights.leftover import check_leftover
from model_server.weights.library_names import StoredNames
from wire.images.families import FAMILIES

logger = logging.getLogger(__name__)

# What is cut down to almost nothing: tensors of the text model, which the native decoder has.
_TEXT_TENSORS = ("embed_tokens.weight", "lm_head.weight")
# What reads sound, and is left out.
_OF_SOUND = (r"^(model\.)?(audio_tower|embed_audio)\.", r"^(talker|token2wav|code2wav)\.")
_WITHOUT_SOUND = ("gemma4", "gemma4_unified")
"""Types whose models may lack what reads sound."""
_THINKER = "thinker."
"""What the names of the tensors that read and think begin with, in models that speak too."""


class Tower:
    """One image a call, an `image.SeesImages`; used inside `torch.inference_mode`."""

    def __init__(
        self, model: Any, family: VisionFamily, image_token: int, width: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Take transformers' model without text layers."""
        self._model = model
        self.family = family
        self.image_token = image_token
        self.row_bytes = width * dtype.itemsize
        self._device = device
        # Some types have it in the inner model only.
        self._features = getattr(model, "get_image_features", None) or model.model.get_image_features
        self.weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())

    def encode(self, image: Image) -> Encoded:
        features = {name: feature.tensor().to(self._device) for name, feature in image.features.items()}
        found = self._features(**features, return_dict=True)
        # The projector of Llama 4 is outside of what transformers calls its features.
        rows = _rows(
            self._model.multi_modal_projector(found.last_hidden_state)
            if self._model.config.model_type == "llama4"
            else found.pooler_output
        )
        if len(rows) != image.num_embeds:
            raise RequestError(f"an image has {image.num_embeds} tokens, but its tower makes {len(rows)} rows of it")
        deep = torch.stack([_rows(part) for part in found.deepstack_features]) if self.family.is_deep else None
        return Encoded(rows, deep)


def _rows(found: Tensor | Sequence[Tensor]) -> Tensor:
    """Join [num_embeds, hidden] of one tensor or several."""
    parts = [found] if isinstance(found, Tensor) else found
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def load_tower(
    directory: Path,
    name: str,
    family: VisionFamily,
    device: torch.device,
    dtype: torch.dtype,
    stored: Iterable[str] = (),
) -> Tower:
    """Read a checkpoint's vision part, all of `stored` names; imports transformers.

    Raises:
        StartupError: A tensor is missing, of another shape, or has no place.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText

    loader: Any = AutoModelForImageTextToText
    started = time.perf_counter()
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        config = getattr(config, "thinker_config", config)
        _without_text(config)
        tower, info = loader.from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            key_mapping={rf"^{re.escape(_THINKER)}": ""} if config.model_type.endswith("_thinker") else None,
        )
    except Exception as error:
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise StartupError(f"the vision tower of {name} cannot be loaded: {line[:300]}") from error
    quantized = _quantized(tower, info["unexpected_keys"])
    if quantized is not None:
        raise StartupError(f"the vision tower of {name} is quantized ({quantized}); only its text model may be")
    missing = sorted(_not_text(info["missing_keys"]))
    if missing:
        raise StartupError(f"the vision tower of {name} cannot be loaded: weight {missing[0]} does not exist")
    mismatched = sorted(_not_text(key if isinstance(key, str) else key[0] for key in info["mismatched_keys"]))
    if mismatched:
        raise StartupError(f"the vision tower of {name} cannot be loaded: weight {mismatched[0]} has another shape")
    names = StoredNames(tower)
    check_leftover(
        names.without_place(one.removeprefix(_THINKER) for one in stored),
        name,
        lambda name: None,
        known=(*names.left_over, *_OF_SOUND),
    )
    image_token = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
    if type(image_token) is not int:
        raise StartupError(f"config.json of {name} has no `image_token_id`")
    if config.model_type.endswith("_thinker"):
        tower.model.audio_tower = None
    tower = tower.eval().to(device)
    width = config.get_text_config(decoder=True).hidden_size
    if family.is_deep:
        width *= 1 + len(config.vision_config.deepstack_visual_indexes)
    loaded = Tower(tower, family, image_token, width, device, dtype)
    logger.info(
        "Loaded the vision tower of %s, %.1f MiB, in %.2f s",
        name,
        loaded.weight_bytes / 2**20,
        time.perf_counter() - started,
    )
    return loaded


class CrossTower:
    """The tower within a whole model with layers of cross attention, an `image.SeesImages`."""

    def __init__(self, runner: StatefulRunner, family: VisionFamily, tokenizer: Tokenizer) -> None:
        """Take the model's runner; used inside `torch.inference_mode`."""
        assert runner.cross is not None, "only types of `models.config.CROSSING` have images"
        model = runner.model
        self.family = family
        self.image_token = _token_of(model.config.model_type, tokenizer)
        self.row_bytes = model.config.get_text_config(decoder=True).hidden_size * model.dtype.itemsize
        self._cross = runner.cross
        self._device = model.device

    def encode(self, image: Image) -> Encoded:
        found = self._cross.encode({name: one.tensor().to(self._device) for name, one in image.features.items()})
        return Encoded(found.rows, num_tiles=found.num_tiles)


def _token_of(model_type: str, tokenizer: Tokenizer) -> int:
    """Return the image token's id, if the tokenizer has it."""
    text = FAMILIES[model_type].image_token
    found = tokenizer.encode(text, truncate=0, add_special_tokens=False)
    if len(found) != 1:
        raise StartupError(f"the tokenizer of this {model_type} has no token {text}")
    return found[0]


def _without_text(config: Any) -> None:
    """Shrink the text model to a norm and some embedding rows."""
    text = config.get_text_config(decoder=True)
    text.num_hidden_layers = 0
    text.vocab_size = 8
    if getattr(text, "hidden_size_per_layer_input", None):
        text.hidden_size_per_layer_input = 0
    if config.model_type in _WITHOUT_SOUND:
        config.audio_config = None
    for field in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(text, field, None)
    for field in ("layer_types", "cross_attention_layers", "no_rope_layers", "moe_layers", "mlp_only_layers"):
        if getattr(text, field, None) is not None:
            setattr(text, field, [])
    # Quantized checkpoints keep their towers in plain numbers.
    if hasattr(config, "quantization_config"):
        del config.quantization_config


def _quantized(tower: torch.nn.Module, unexpected: Iterable[str]) -> str | None:
    """Return a tensor not stored as plain numbers, if any."""
    matrices = {name for name, module in tower.named_modules() if hasattr(module, "weight") and module.weight.dim() > 1}
    return next((key for key in sorted(unexpected) if key.rpartition(".")[0] in matrices), None)


def _not_text(names: Iterable[str]) -> list[str]:
    return [name for name in names if not name.endswith(_TEXT_TENSORS)]
