"""Hidden states by transformers, for types unknown to the native decoder."""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from model_server.errors import StartupError
from model_server.models.families import OF_HEADS
from model_server.models.hf.loading import one_line, quiet
from model_server.models.model import Model
from model_server.pooling.batch import FlatBatch
from model_server.weights.leftover import check_leftover
from wire.model_files import check_small_file

logger = logging.getLogger(__name__)

# What a checkpoint of another head may lack: it is not computed here.
_UNUSED = ("pooler.",)


class LibraryModel:
    """Computes texts alone: bits depend on no other, nothing is padded."""

    def __init__(self, inner: Any, config: Any, device: torch.device) -> None:
        self._inner = inner
        self._device = device
        self._takes_types = config.model_type in ("albert", "bert", "deberta", "deberta-v2", "electra", "nomic_bert")
        self.hidden_size = int(config.hidden_size)
        self.vocab_size = int(config.vocab_size)
        self.typed = self._takes_types and getattr(config, "type_vocab_size", 0) > 1
        self.weight_bytes = sum(parameter.nbytes for parameter in inner.parameters())
        self.max_positions = _positions(config)

    def set_longest(self, longest: int) -> None:
        """transformers decides by each text."""

    def hidden(self, batch: FlatBatch) -> Tensor:
        rows = []
        for begin, end in pairwise(batch.starts):
            given: dict[str, Tensor] = {"input_ids": batch.input_ids[begin:end].unsqueeze(0)}
            given["attention_mask"] = torch.ones_like(given["input_ids"])
            if batch.token_types is not None:
                given["token_type_ids"] = batch.token_types[begin:end].unsqueeze(0)
            rows.append(self._inner(**given)[0][0])
        return torch.cat(rows)


def load(model: Model, dtype: torch.dtype, device: torch.device, *, trust_remote_code: bool) -> LibraryModel:
    """Load the model, if transformers knows its type."""
    quiet()
    from transformers import AutoConfig, AutoModel
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    directory, model_type = model.checkpoint.directory, model.config.model_type
    if model_type not in CONFIG_MAPPING and not trust_remote_code:
        if model.config.get("auto_map"):
            raise StartupError(
                f"model type {model_type} needs code from its repository, which does not run unless you trust it: "
                "read it, then add --trust-remote-code"
            )
        raise StartupError(f"Unsupported model type {model_type}: neither Tercet nor transformers knows it")
    for name in ("config.json", "model.safetensors.index.json"):
        check_small_file(directory / name, StartupError)
    options = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    try:
        config = AutoConfig.from_pretrained(directory, **options)
        inner, report = AutoModel.from_pretrained(
            directory, config=config, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
        )
    except Exception as error:  # anything may come from a model's class
        raise StartupError(f"transformers cannot load {model_type}: {one_line(error)}") from error
    missing = [name for name in report["missing_keys"] if not name.startswith(_UNUSED)]
    if missing or report.get("mismatched_keys"):
        raise StartupError(f"{directory} lacks weights of {model_type}: {', '.join(sorted(missing)[:3])}")
    check_leftover(report["unexpected_keys"], model_type, lambda name: None, known=OF_HEADS)
    logger.info("Loaded %s with transformers, which computes one text at a time", model_type)
    return LibraryModel(inner.eval().to(device), config, device)


def _positions(config: Any) -> int | None:
    """Return the longest text of learned positions, if bounded."""
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        return None
    # Behind the id of the padding, as RoBERTa counts.
    return positions - 2 if config.model_type in ("mpnet", "roberta", "xlm-roberta", "camembert") else positions
