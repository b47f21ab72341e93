"""What of a run is done, beside the output, so that it can continue."""

# A layer is done when its file is whole and `progress.json` names it: the file is written first, and each of the two
# takes its name when it is complete. With the names are the digests of what a later layer, or the result, is made from:
# a file that is not as the run wrote it ends the start.

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from io import BufferedWriter
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from model_server.errors import StartupError
from model_server.quantize.streams import digest
from wire.model_files import read_object

FOLDER = ".quantize"
_FILE = "progress.json"
_AGAIN = "start from the beginning with --no-resume"


def check_folder(output: Path, *, resume: bool = True) -> None:
    """Refuse a folder with other things than an unfinished run.

    Args:
        resume: Partly written files may be there.
    """
    if (output / FOLDER).is_symlink():
        raise StartupError(f"{output / FOLDER} is a link: remove it, or name another folder")
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


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn failures of writing below `path`, such as a full disk, into StartupError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())
        raise StartupError(f"cannot write {path}: {reason}") from error


def new_file(path: Path) -> BufferedWriter:
    """Open an empty file in place of what is there, such as a link or a pipe."""
    path.unlink(missing_ok=True)
    return open(path, "xb")


class Progress:
    """The state of a run."""

    def __init__(self, output: Path, asked: Mapping[str, Any], num_layers: int) -> None:
        """Read what is done, and lock the folder until `end`.

        Args:
            asked: All on which the result depends.

        Raises:
            StartupError: The folder holds another, damaged or running run, or other things.
        """
        self.folder = output / FOLDER
        key = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
        self._state: dict[str, Any] = {"asked": key, "num_done": 0, "layers": []}
        path = self.folder / _FILE
        if not path.exists():
            check_folder(output)
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._open(path, output, key, num_layers)
        except BaseException:
            self.close()
            raise

    @property
    def num_done(self) -> int:
        return int(self._state["num_done"])

    @property
    def losses(self) -> tuple[float, float]:
        # Summed negative log likelihoods of held-out tokens, before and after, at the end.
        before, after = self._state["losses"]
        return before, after

    def stream(self, layer: int) -> Path:
        """Return the file of what enters a layer."""
        return self.folder / f"stream-{layer % 2}"

    def done(self, layer: int, tensors: Mapping[str, Tensor], losses: tuple[float, float] | None = None) -> None:
        """Keep a layer's result.

        Args:
            losses: Of the last layer.
        """
        path = self.layer(layer)
        draft = path.with_suffix(".draft")
        with writing(self.folder):
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, draft)
            self._state["layers"] = [*self._state["layers"], digest(draft)]
            os.replace(draft, path)
            self._state["num_done"] = layer + 1
            if losses is not None:
                self._state["losses"] = losses
            else:
                self._state["stream"] = digest(self.stream(layer + 1))
        self._save()

    def layer(self, number: int) -> Path:
        """The file of a layer's tensors."""
        return self.folder / f"layer-{number:05d}.safetensors"

    def end(self) -> None:
        """All is written elsewhere."""
        with writing(self.folder):
            shutil.rmtree(self.folder)

    def close(self) -> None:
        """Let other runs into the folder."""
        os.close(self._lock)

    def _open(self, path: Path, output: Path, key: str, num_layers: int) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StartupError(
                f"another run is writing to {output}: wait for its end, or name another folder"
            ) from None
        if path.exists():
            self._state = read_object(path, StartupError)
            if self._state.get("asked") != key:
                raise StartupError(
                    f"{output} holds an unfinished run with another model, other samples or options: repeat those, or "
                    f"{_AGAIN}"
                )
            self._check(num_layers)
        self._save()

    def _check(self, num_layers: int) -> None:
        """Refuse impossible states and changed files."""
        state, path = self._state, self.folder / _FILE
        num_done, layers = state.get("num_done"), state.get("layers")
        is_whole = num_done == num_layers
        if type(num_done) is not int or not 0 <= num_done <= num_layers or not isinstance(layers, list):
            raise StartupError(f"{path} is damaged: {_AGAIN}")
        if len(layers) != num_done or (is_whole and not _are_losses(state.get("losses"))):
            raise StartupError(f"{path} is damaged: {_AGAIN}")
        expected = {self.layer(number): one for number, one in enumerate(layers)}
        if num_done and not is_whole:
            expected[self.stream(num_done)] = state.get("stream")
        for file, wanted in expected.items():
            try:
                found = digest(file)
            except OSError as error:
                raise StartupError(f"cannot read {file}: {error.strerror}; {_AGAIN}") from error
            if found != wanted:
                raise StartupError(f"{file} is not as the unfinished run wrote it: {_AGAIN}")

    def _save(self) -> None:
        draft = self.folder / (_FILE + ".draft")
        with writing(self.folder):
            with new_file(draft) as file:
                file.write(json.dumps(self._state).encode())
            os.replace(draft, self.folder / _FILE)


def _are_losses(found: object) -> bool:
    return isinstance(found, list) and len(found) == 2 and all(type(x) is float for x in found)
