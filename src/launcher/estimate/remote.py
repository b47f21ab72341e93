"""Facts of a model on the hub without its weights: its small JSON files, and sizes."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

from launcher.errors import ArgumentValidation
from launcher.planning.hub import HUB_TIMEOUT_S, errors_in_words
from launcher.planning.model_info import ModelInfo, read
from launcher.planning.weight_files import weights_among

_FILES = ("config.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json")


def fetch(model_id: str, revision: str | None) -> ModelInfo:
    """Asks the hub; nothing is kept. Raises ArgumentValidation or DownloadError, one line each."""
    from huggingface_hub import HfApi, hf_hub_download

    with errors_in_words(model_id, revision):
        listed = HfApi().model_info(model_id, revision=revision, files_metadata=True, timeout=HUB_TIMEOUT_S)
        sizes = {file.rfilename: file.size or 0 for file in listed.siblings or []}
        with tempfile.TemporaryDirectory(prefix="tercet-") as folder:
            for name in _FILES:
                if name in sizes:
                    hf_hub_download(model_id, name, revision=listed.sha, local_dir=folder)
            info = read(Path(folder)) if "config.json" in sizes else None
    if info is None:
        raise ArgumentValidation(f"{model_id} has no config.json that can be read")
    return dataclasses.replace(info, weight_bytes=weights_among(sizes))
