"""What of a run is done, in a folder beside the output, so that an interrupted run can continue.

A layer is done when its file is whole and `progress.json` names it: the file is written first, and each of the two
takes its name when it is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from model_server.errors import StartupError
from wire.model_files import read_object

FOLDER = ".quantize"
_FILE = "progress.json"


def check_folder(output: Path, *, resume: bool = True) -> None:
    """Raises StartupError for a folder that holds other things than an unfinished run. resume: one may be there whose
    files are written in part."""
    if output.exists() and not output.is_dir():
        raise StartupError(f"{output} is a file: name a folder for the quantized model")
    is_unfinished = (output / FOLDER / _FILE).exists()
    if (is_unfinished and resume) or not output.exists():
        return
    if all(found.name == FOLDER for found in output.iterdir()):
        return
    if is_unfinished:
        raise StartupError(
            f"{output} holds files beside an unfinished run: finish it by the same command without --no-resume, or "
            "name another folder"
        )
    raise StartupError(f"{output} is not empty: name another folder")


class Progress:
    """num_done: layers that are done. losses: sums of the held-out tokens' negative log likelihoods, before and after,
    once the last layer is done."""

    def __init__(self, output: Path, asked: Mapping[str, Any]) -> None:
        """asked: all on which the result depends. Raises StartupError for an unfinished run of something else, and for
        a folder that holds other things."""
        self.folder = output / FOLDER
        digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
        self._state: dict[str, Any] = {"asked": digest, "num_done": 0}
        path = self.folder / _FILE
        if not path.exists():
            check_folder(output)
        else:
            self._state = read_object(path, StartupError)
            if self._state.get("asked") != digest:
                raise StartupError(
                    f"{output} holds an unfinished run with another model, other samples or options: repeat those, or "
                    "start from the beginning with --no-resume"
                )
        self.folder.mkdir(parents=True, exist_ok=True)
        self._save()

    @property
    def num_done(self) -> int:
        return int(self._state["num_done"])

    @property
    def losses(self) -> tuple[float, float]:
        before, after = self._state["losses"]
        return before, after

    def stream(self, layer: int) -> Path:
        """The file of what enters a layer; the one after it has another."""
        return self.folder / f"stream-{layer % 2}"

    def done(self, layer: int, tensors: Mapping[str, Tensor], losses: tuple[float, float] | None = None) -> None:
        """A layer is done. tensors: that take the places of others, by their names."""
        path = self.layer(layer)
        draft = path.with_suffix(".draft")
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, draft)
        os.replace(draft, path)
        self._state["num_done"] = layer + 1
        if losses is not None:
            self._state["losses"] = losses
        self._save()

    def layer(self, number: int) -> Path:
        """The file of a layer's tensors."""
        return self.folder / f"layer-{number:05d}.safetensors"

    def end(self) -> None:
        """All is written elsewhere."""
        shutil.rmtree(self.folder)

    def _save(self) -> None:
        draft = self.folder / (_FILE + ".draft")
        draft.write_text(json.dumps(self._state))
        os.replace(draft, self.folder / _FILE)
