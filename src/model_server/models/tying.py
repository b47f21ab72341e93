"""Whether the head is the embedding: tensors decide, whatever config.json says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from model_server.errors import StartupError
from model_server.models.config import ModelConfig
from model_server.models.decoder.spec import Spec
from model_server.weights.checkpoint import Checkpoint
from model_server.weights.reader import FLOATING, SafetensorsReader

_FIELD = "tie_word_embeddings"
# Rows of a vocabulary that are compared at a time.
_ROWS = 4096


def with_stored_head(spec: Spec, checkpoint: Checkpoint, config: ModelConfig) -> tuple[Spec, str | None]:
    """Tie the head if the files hold none, or a copy; return a remark for the operator, too.

    Raises:
        StartupError: There is no head or no embedding, but config.json says so.
    """
    names = spec.names
    modules = (names.head, names.embedding)
    ours = tuple(start + module.removeprefix(names.base) + "." for module in modules for start in ("", names.base))
    headers = {
        path: header
        for path, header in checkpoint.headers.items()
        if any(name.startswith(ours) for name in header.tensors)
    }
    with SafetensorsReader(headers, dtype=torch.float32, device=torch.device("cpu"), base_prefix=names.base) as reader:
        head, embedding = (_tensors(reader, module, names.base) for module in modules)
        if not head:
            other = next((name for header in checkpoint.headers.values() for name in header.tensors), "")
            return replace(spec, tied_head=True), _without_head(spec, config, "" if embedding else other)
        if not embedding and not spec.tied_head:
            raise StartupError(
                f"the files hold {names.head} but no {names.embedding}, which config.json does not tie to it: give the "
                f"files that hold the embedding, or set `{_FIELD}` to true"
            )
        if not embedding or _are_equal(reader, head, embedding):
            return replace(spec, tied_head=True), None
    warning = None
    if spec.tied_head:
        warning = (
            f"config.json ties the head to the embedding, but the files hold another one: {names.head} is used as it "
            "is stored"
        )
    return replace(spec, tied_head=False), warning


def _tensors(reader: SafetensorsReader, module: str, base: str) -> Mapping[str, str]:
    """Return the stored names of a module's matrix, by their ends."""
    starts = (module + ".", module.removeprefix(base) + ".", base + module.removeprefix(base) + ".")
    found = {name.removeprefix(start): name for start in starts for name in reader.unread if name.startswith(start)}
    found.pop("bias", None)
    return found


def _without_head(spec: Spec, config: ModelConfig, other: str) -> str | None:
    """other: the name of a tensor where the files do not hold the embedding either."""
    text = config.get("text_config")
    said = [config.get(_FIELD), text.get(_FIELD) if isinstance(text, Mapping) else None]
    if True in said:
        return None
    if False in said and other:
        raise StartupError(
            f"the files hold neither {spec.names.embedding} nor {spec.names.head}: their tensors are those of another "
            f"model, or have other names, such as {other:.200}"
        )
    if False in said:
        raise StartupError(
            f"config.json says that the head is not the embedding (`{_FIELD}` is false), but the files hold no "
            f"{spec.names.head}: set it to true, or give the files that hold the head"
        )
    if spec.tied_head:
        return None
    return f"The files hold no {spec.names.head}: the embedding is the head, which config.json does not say"


def _are_equal(reader: SafetensorsReader, first: Mapping[str, str], second: Mapping[str, str]) -> bool:
    if first.keys() != second.keys():
        return False
    pairs = [(first[end], second[end]) for end in first]
    if any(reader.shape(one) != reader.shape(other) for one, other in pairs):
        return False
    return all(_have_equal_rows(reader, one, other) for one, other in pairs)


def _have_equal_rows(reader: SafetensorsReader, one: str, other: str) -> bool:
    shape, types = reader.shape(one), {reader.stored(one), reader.stored(other)}
    if len(types) > 1 and not types <= set(FLOATING):
        return False
    if not shape:
        return torch.equal(reader.raw(one), reader.raw(other))
    starts = range(0, shape[0], _ROWS)
    return all(torch.equal(*_rows(reader, types, (one, other), (at, min(at + _ROWS, shape[0])))) for at in starts)


def _rows(
    reader: SafetensorsReader, types: set[str], names: tuple[str, str], span: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Read rows as stored, or as numbers of one type."""
    one, other = (reader.raw(name, span) if len(types) == 1 else reader.rows(name, [span]) for name in names)
    return one, other
