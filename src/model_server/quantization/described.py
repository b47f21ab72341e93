"""What a checkpoint says of its quantization, in configs or by tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from model_server.errors import StartupError
from model_server.weights.checkpoint import Checkpoint
from wire.quantization.config import by_tensors, said_of

# Scalars in files that TGI's own command wrote, and what configs call them.
_SCALARS = {"gptq_bits": "bits", "gptq_groupsize": "group_size", "gptq_sym": "sym"}
_INTEGERS = ("BOOL", "U8", "I8", "I16", "I32", "I64")


def said_of_weights(checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    """Return the best `quantization_config`; None: plain weights."""
    said = said_of(checkpoint.directory, checkpoint.fields, StartupError)
    if said is not None:
        return said
    scalars = {key: value for name, key in _SCALARS.items() if (value := _scalar(checkpoint, name)) is not None}
    if "bits" in scalars:
        if "sym" in scalars:
            scalars["sym"] = scalars["sym"] != 0
        return {"quant_method": "gptq", **scalars}
    return by_tensors({name: t.shape for header in checkpoint.headers.values() for name, t in header.tensors.items()})


def _scalar(checkpoint: Checkpoint, name: str) -> int | None:
    for file, header in checkpoint.headers.items():
        stored = header.tensors.get(name)
        if stored is None or stored.dtype not in _INTEGERS or math.prod(stored.shape) != 1:
            continue
        try:
            with file.open("rb") as opened:
                opened.seek(stored.begin)
                return int.from_bytes(opened.read(stored.end - stored.begin), "little", signed=True)
        except OSError as error:
            raise StartupError(f"cannot read {file}: {error.strerror}") from error
    return None
