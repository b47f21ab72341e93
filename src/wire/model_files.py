"""What all read alike of small files, most of them a model's: regular, of bounded size."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Iterable
from io import BufferedReader
from pathlib import Path
from typing import Any

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "max_sequence_length")
"""Where configs write the longest sequence that their positions allow."""

MAX_BYTES = 64 * 2**20
# The largest public ones have about 35 MB.
MAX_TOKENIZER_BYTES = 128 * 2**20
# Types of weights that are cast to the model's, as safetensors names them; integers and the like are parts of formats.
FLOATS = ("F64", "F32", "F16", "BF16")
# transformers writes "no limit" as int(1e30).
_NO_LIMIT = 10**18
_ABSENT = object()
_THINKER = "thinker_config"
# Objects around a thinker's config that are of the whole model.
_OF_ALL = ("quantization_config", "compression_config")


def most_stored(tensors: Iterable[tuple[str, int]]) -> str | None:
    """Return the one of `FLOATS` with most bytes, if any."""
    sizes = dict.fromkeys(FLOATS, 0)
    for dtype, size in tensors:
        if dtype in sizes:
            sizes[dtype] += size
    most = max(sizes, key=sizes.__getitem__)
    return most if sizes[most] else None


def read_object(path: Path, error: type[Exception]) -> dict[str, Any]:
    """Read the JSON object in `path`.

    Raises:
        error: It is absent, unreadable, too large or no object.
    """
    found = _read(path, error)
    if found is None:
        raise error(f"cannot read {path}: No such file or directory")
    return found


def read_optional_object(path: Path, error: type[Exception]) -> dict[str, Any]:
    """Read an object; absent: empty."""
    return _read(path, error) or {}


def read_config(path: Path, error: type[Exception]) -> dict[str, Any]:
    """Read a model's config.json, by `generating`.

    Raises:
        error: As `read_object`.
    """
    return generating(read_object(path, error))


def read_optional_config(path: Path, error: type[Exception]) -> dict[str, Any]:
    """Read a config.json; absent: empty."""
    return generating(read_optional_object(path, error))


def generating(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of what makes text: of a model that speaks too its thinker, and the fields around."""
    thinker = config.get(_THINKER)
    if not isinstance(thinker, dict):
        return config
    around = {name: value for name, value in config.items() if not isinstance(value, dict) or name in _OF_ALL}
    return {**around, "model_type": f"{config.get('model_type')}_thinker", **thinker}


def read_optional_array(path: Path, error: type[Exception]) -> list[Any]:
    """Read an array; absent: empty."""
    found = _json(path, error)
    if found is _ABSENT:
        return []
    if not isinstance(found, list):
        raise error(f"{path} does not hold a JSON array")
    return found


def read_text(path: Path, error: type[Exception]) -> str:
    """Read a small file's UTF-8 text."""
    found = _bytes(path, error, MAX_BYTES)
    if found is None:
        raise error(f"cannot read {path}: No such file or directory")
    return _decoded(path, found, error)


def read_yaml(path: Path, parse: Callable[[str], Any]) -> Any:
    """Parse a file by one of yaml's functions.

    Raises:
        ValueError: One line that names the file.
    """
    # Imported here: only a start with such a file is worth the time.
    import yaml

    try:
        return parse(read_text(path, ValueError))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}" if mark else ""
        raise ValueError(f"{path}{where} is not YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None


def read_tokenizer(path: Path, error: type[Exception]) -> str:
    """Read a tokenizer.json, which may be larger.

    Raises:
        error: It is absent, unreadable or too large.
    """
    found = _bytes(path, error, MAX_TOKENIZER_BYTES)
    if found is None:
        raise error(f"cannot read {path}: No such file or directory")
    return _decoded(path, found, error)


def check_small_file(path: Path, error: type[Exception]) -> None:
    """Check a file, absent or regular and small, before a library reads it."""
    try:
        with open_regular(path, error) as file:
            _check_size(path, file, error, MAX_BYTES)
    except FileNotFoundError:
        return
    except OSError as cause:
        raise error(f"cannot read {path}: {cause.strerror}") from cause


def open_regular(path: Path, error: type[Exception]) -> BufferedReader:
    """Open a regular file, also by a link.

    Raises:
        OSError: As `open` does.
    """
    # Without O_NONBLOCK opening a pipe without a writer would block.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
    os.close(descriptor)
    if is_directory:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise error(f"{path} is not a regular file")


def _read(path: Path, error: type[Exception]) -> dict[str, Any] | None:
    """Read an object, or None if absent; unreadable is an error."""
    value = _json(path, error)
    if value is _ABSENT:
        return None
    if not isinstance(value, dict):
        raise error(f"{path} does not hold a JSON object")
    return value


def _json(path: Path, error: type[Exception]) -> Any:
    text = _bytes(path, error, MAX_BYTES)
    if text is None:
        return _ABSENT
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as cause:
        raise error(f"{path} is not valid JSON: {' '.join(str(cause).split())}") from cause


def _bytes(path: Path, error: type[Exception], most_bytes: int) -> bytes | None:
    try:
        with open_regular(path, error) as file:
            _check_size(path, file, error, most_bytes)
            found: bytes | None = file.read(most_bytes + 1)
    except FileNotFoundError:
        return None
    except OSError as cause:
        raise error(f"cannot read {path}: {cause.strerror}") from cause
    if found is None:  # the kernel's log: regular by its mode, and a read would block
        raise error(f"{path} is not a regular file")
    if len(found) > most_bytes:  # it has grown since
        raise _too_large(path, error, most_bytes)
    return found


def _check_size(path: Path, file: BufferedReader, error: type[Exception], most_bytes: int) -> None:
    if os.fstat(file.fileno()).st_size > most_bytes:
        raise _too_large(path, error, most_bytes)


def _too_large(path: Path, error: type[Exception], most_bytes: int) -> Exception:
    return error(f"{path} is larger than {most_bytes // 2**20} MiB")


def _decoded(path: Path, found: bytes, error: type[Exception]) -> str:
    try:
        return found.decode()
    except UnicodeDecodeError as cause:
        raise error(f"{path} is not UTF-8 text: {cause.reason} at byte {cause.start}") from None


def token_text(token: Any) -> str | None:
    """A token as configs write it: its text, or an object with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def length_limit(value: Any) -> int | None:
    """A length in tokens; None where the config names no limit."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if 0 < value < _NO_LIMIT else None
