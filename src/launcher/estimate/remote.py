"""The facts of a model on the hub without its weights: its small JSON files, and the sizes of the others."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

from launcher.errors import ArgumentValidation, DownloadError
from launcher.planning.model_info import ModelInfo, read
from launcher.planning.weight_files import weights_among

_FILES = ("config.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json")
_TIMEOUT_S = 20.0


def fetch(model_id: str, revision: str | None) -> ModelInfo:
    """Asks the hub; nothing is kept. Raises ArgumentValidation or DownloadError, one line each."""
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        listed = HfApi().model_info(model_id, revision=revision, files_metadata=True, timeout=_TIMEOUT_S)
        sizes = {file.rfilename: file.size or 0 for file in listed.siblings or []}
        with tempfile.TemporaryDirectory(prefix="tercet-") as folder:
            for name in _FILES:
                if name in sizes:
                    hf_hub_download(model_id, name, revision=listed.sha, local_dir=folder)
            info = read(Path(folder)) if "config.json" in sizes else None
    except HFValidationError:
        raise ArgumentValidation(f"{model_id} is neither a directory nor the id of a model (OWNER/NAME)") from None
    except GatedRepoError:
        raise DownloadError(
            f"{model_id} is gated: accept its terms on the hub, then give a token in HF_TOKEN"
        ) from None
    except RevisionNotFoundError:
        raise ArgumentValidation(f"{model_id} has no revision {revision}") from None
    except RepositoryNotFoundError:
        raise ArgumentValidation(
            f"the hub has no model {model_id} for this user: check the name, or give a token in HF_TOKEN"
        ) from None
    except OfflineModeIsEnabled:
        raise DownloadError(
            f"{model_id} is not completely in the local cache, and HF_HUB_OFFLINE is set, so the hub is not used"
        ) from None
    except Exception as error:  # what transports raise differs by version
        lines = str(error).splitlines() or [type(error).__name__]
        raise DownloadError(
            f"the hub cannot be queried for {model_id}: {lines[0]}; check the network with `launcher doctor`, or give "
            "a local directory"
        ) from None
    if info is None:
        raise ArgumentValidation(f"{model_id} has no config.json that can be read")
    return dataclasses.replace(info, weight_bytes=weights_among(sizes))
