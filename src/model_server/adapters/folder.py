"""The folder of a LoRA adapter: its config and tensor headers, checked against the model's layers.

No weights are read here (`Adapter.open`). Adapters often have equal headers and configs, so the last few results are
kept.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from model_server.adapters.config import AdapterConfig, read_config
from model_server.errors import StartupError
from model_server.weights.header import Header, Stored, parse, read_headers
from model_server.weights.hub_cache import snapshot
from model_server.weights.locate import is_blob, stays_inside
from model_server.weights.products import INNER, ExpertParameter, Products
from model_server.weights.reader import FLOATING, Range, SafetensorsReader
from wire.adapters import MAX_NEW_ROWS, AdapterSource, adapter_sources
from wire.lora.merged import ADAPTER_CONFIG

_PREFIX = "base_model.model."
_MOST_NAMED = 8
# Headers that are remembered, and how long each may be: twenty times those of most adapters.
_KEPT, _MOST_KEPT_BYTES = 16, 2**20

# What the tensor of a module is, by the end of its name.
_LINEAR = {
    ".lora_A.weight": "a", ".lora_B.weight": "b", ".lora_B.bias": "bias", ".base_layer.weight": "copy",
    ".lora_magnitude_vector": "magnitude", ".lora_magnitude_vector.weight": "magnitude",
}  # fmt: skip
_TABLE = {
    ".lora_embedding_A": "a", ".lora_embedding_B": "b", ".base_layer.weight": "copy",
    ".lora_magnitude_vector": "magnitude", ".lora_magnitude_vector.weight": "magnitude",
}  # fmt: skip
# PEFT saves a module of `modules_to_save` under the names that it has in training, too, in some versions or with
# `save_embedding_layers`: beside the base model's own, the original, and perhaps the plain name, which it reads itself.
_ROWS = {
    ".token_adapter.trainable_tokens_delta": "rows", ".weight": "whole", ".modules_to_save.weight": "trained",
    ".modules_to_save.default.weight": "trained", ".original_module.weight": "original",
    ".token_adapter.base_layer.weight": "original",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The matrices of one module, by their names in the files."""

    # [rank, in], of an embedding [rank, vocabulary]; of an `ExpertParameter` [experts * rank, in], one expert after
    # another.
    a: str
    # [out, rank], of an embedding [width, rank]; of an `ExpertParameter` [out, rank * experts], the same column of all
    # experts side by side.
    b: str
    rank: int
    scale: float
    # [out] (DoRA): lengths of the rows of the sum, of an embedding of its columns.
    magnitude: str | None = None
    # [out]: added, times `scale`.
    bias: str | None = None
    # The base model's matrix, which PEFT saves beside some adapters.
    copy: str | None = None
    experts: ExpertParameter | None = None

    def of_expert(self, a: Tensor, b: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """Return A [rank, inputs] and B [outputs, rank] of one of `experts`."""
        assert self.experts is not None
        count = self.experts.num_experts
        of_a, of_b = a.view(count, self.rank, -1)[number], b[:, number::count]
        return (of_b.t(), of_a.t()) if self.experts.swapped else (of_a, of_b)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRows:
    """Rows that an embedding or head has instead of the base model's."""

    key: str
    # Of the rows in tensor `key`; None: `key` is a whole matrix, of which a few rows differ.
    ids: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A checked adapter; pairs and rows by the model's names."""

    name: str
    base: str | None
    # The largest of all pairs.
    rank: int
    pairs: Mapping[str, Pair]
    rows: Mapping[str, NewRows]
    headers: Mapping[Path, Header]
    # Tensors that are the base model's, and are not read.
    originals: frozenset[str] = frozenset()

    @property
    def num_kept(self) -> int:
        """Bound the numbers that all ranks keep of its tensors."""
        copies = self.originals | {pair.copy for pair in self.pairs.values()}
        whole = {new.key for new in self.rows.values() if new.ids is None}
        kept = 0
        for header in self.headers.values():
            for key, stored in header.tensors.items():
                rows = min(stored.shape[0], MAX_NEW_ROWS) if key in whole else stored.shape[0]
                kept += 0 if key in copies else rows * math.prod(stored.shape[1:])
        return kept

    def open(self) -> SafetensorsReader:
        """Open a reader of its matrices in float32, on the host."""
        return SafetensorsReader(
            self.headers, dtype=torch.float32, device=torch.device("cpu"), base_prefix=_PREFIX, mapped=False
        )

    def finite_rows(self, opened: SafetensorsReader, key: str, rows: Sequence[Range]) -> Tensor:
        """Read rows of a tensor.

        Raises:
            StartupError: Numbers are not finite.
        """
        tensor = opened.rows(key, rows)
        if not tensor.isfinite().all():
            raise self.error(f"tensor {key:.200} holds numbers that are not finite")
        return tensor

    def named(self, error: StartupError) -> StartupError:
        """Add the adapter's name to an error."""
        return error if str(error).startswith("LoRA adapter") else self.error(str(error))

    def error(self, text: str) -> StartupError:
        """Return an error of one line that begins with its name."""
        return _refusal(self.name, text)


def read_adapter(name: str, directory: Path, targets: Products, base_prefixes: Sequence[str]) -> Adapter:
    """Read and check the adapter in `directory`; a tensor is never skipped.

    Args:
        base_prefixes: Prefixes of module names; the first is the model's own.

    Raises:
        StartupError: One line that begins with the adapter's name.
    """
    try:
        config = read_config(directory)
        headers = read_headers(_files(directory), _parsed)
        names = tuple(path.name for path in headers)
        found = _found(config, targets, names, tuple(headers.values()), tuple(base_prefixes))
    except StartupError as error:
        raise _refusal(name, str(error)) from None
    return Adapter(
        name=name,
        base=config.base,
        rank=max((pair.rank for pair in found.pairs.values()), default=0),
        pairs=found.pairs,
        rows=found.rows,
        headers=headers,
        originals=frozenset(found.originals),
    )


def _refusal(name: str, text: str) -> StartupError:
    return StartupError(f"LoRA adapter `{name}`: " + "".join(c if c.isprintable() else "?" for c in text))


def _files(directory: Path) -> list[Path]:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        if any(directory.glob("*.bin")):
            raise StartupError(
                "adapter_model.bin is pickled; convert it once with `model-server download-weights MODEL "
                f"--lora-adapters {directory} --auto-convert`"
            )
        found = ", ".join(sorted(f.name for f in directory.iterdir())[:_MOST_NAMED])
        raise StartupError(f"no *.safetensors in {directory} (found: {found})")
    for file in files:
        place = Path(os.path.realpath(file))  # of a link to itself the link, where Path.resolve fails
        if not stays_inside(directory, place) and not is_blob(place):
            raise StartupError(f"{file} is a link that leads out of the folder")
    return files


def _parsed(text: bytes, data_start: int, size: int) -> Header:
    """Parse a header, or return the same object for the text of a recent file."""
    return (_kept if len(text) <= _MOST_KEPT_BYTES else parse)(text, data_start, size)


_kept = lru_cache(_KEPT)(parse)


@lru_cache(_KEPT)
def _found(
    config: AdapterConfig,
    targets: Products,
    names: tuple[str, ...],
    headers: tuple[Header, ...],
    base_prefixes: tuple[str, ...],
) -> _Found:
    """Read headers; names are those of their files."""
    return _Found(config, targets, _tensors(names, headers), base_prefixes)


def _tensors(names: Sequence[str], headers: Sequence[Header]) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    for name, header in zip(names, headers, strict=True):
        for key, stored in header.tensors.items():
            if key in found:
                raise StartupError(f"tensor {key:.200} is in more than one file, also in {name}")
            found[key] = stored
    return found


class _Found:
    """What the tensors of a folder are, by module; each must be something."""

    def __init__(
        self, config: AdapterConfig, targets: Products, tensors: Mapping[str, Stored], base_prefixes: Sequence[str]
    ) -> None:
        self._config, self._targets, self._tensors = config, targets, tensors
        self.pairs: dict[str, Pair] = {}
        self.rows: dict[str, NewRows] = {}
        self.originals: set[str] = set()
        by_short_name = targets.by_short_name
        modules: dict[str, dict[str, str]] = {}
        stems: dict[str, str] = {}
        for key in tensors:
            stem, role = self._split(key, base_prefixes, by_short_name)
            prefix = max(filter(stem.startswith, base_prefixes), key=len, default="")
            target = by_short_name[stem.removeprefix(prefix)]
            if stems.setdefault(target, stem) != stem:
                raise StartupError(f"tensor {key:.200}: another name of the same module has tensors too")
            if modules.setdefault(target, {}).setdefault(role, key) != key:
                raise StartupError(f"tensor {key:.200} is the same as {modules[target][role]:.200}, under another name")
        if not modules:
            raise StartupError("there are no tensors in it")
        for target, keys in modules.items():
            self._add(target, stems[target], keys)

    def _split(self, key: str, base_prefixes: Sequence[str], by_short_name: Mapping[str, str]) -> tuple[str, str]:
        """Split a tensor's name into module and kind."""
        name = key.removeprefix(_PREFIX)
        for endings in (_LINEAR, _TABLE, _ROWS):
            for ending, role in endings.items():
                stem = name.removesuffix(ending)
                prefix = max(filter(stem.startswith, base_prefixes), key=len, default="")
                target = by_short_name.get(stem.removeprefix(prefix))
                if stem == name or not key.startswith(_PREFIX) or target is None:
                    continue
                if self._takes(target, endings, role):
                    return stem, role
        raise StartupError(f"tensor {key:.200} belongs to no layer that takes adapters")

    def _takes(self, target: str, endings: Mapping[str, str], role: str) -> bool:
        is_table = target in (self._targets.head, self._targets.embedding)
        if endings is _LINEAR:
            if target.removesuffix(INNER) in self._targets.experts:
                return role in ("a", "b")
            return target in self._targets.linear and (role != "copy" or is_table)
        return target == self._targets.embedding if endings is _TABLE else is_table

    def _add(self, target: str, stem: str, keys: dict[str, str]) -> None:
        if "trained" in keys and "whole" not in keys:
            keys["whole"] = keys.pop("trained")
        for role in {"original", "trained"} & keys.keys():
            self._check(keys[role], self._targets.table)
            self.originals.add(keys.pop(role))
        if "rows" in keys or "whole" in keys:
            self._add_rows(target, stem, keys)
        if set(keys) <= {"rows", "whole"}:
            return
        is_embedding = target == self._targets.embedding
        for role, name in zip("ab", list(_TABLE if is_embedding else _LINEAR)[:2], strict=True):
            if role not in keys:
                other = next(iter(keys.values()))
                raise StartupError(f"tensor {_PREFIX + stem + name:.200} is missing beside {other:.200}")
        if target.removesuffix(INNER) in self._targets.experts:
            self._add_experts(target.removesuffix(INNER), stem.removesuffix(INNER), keys["a"], keys["b"])
            return
        if self._config.uses_dora and "magnitude" not in keys:
            raise StartupError(
                f"tensor {_PREFIX + stem:.200}.lora_magnitude_vector is missing, which `use_dora` asks for"
            )
        rank = self._config.rank_of(stem)
        inputs, outputs = self._targets.table if is_embedding else self._targets.linear[target]
        shapes: dict[str, tuple[int, ...]] = {"a": (rank, inputs), "b": (outputs, rank)}
        shapes |= {"magnitude": (outputs,), "bias": (outputs,), "copy": self._targets.table}
        for role, shape in shapes.items():
            if role in keys:
                self._check(keys[role], shape)
        if "magnitude" in keys and (target in self.rows or "bias" in keys):
            raise StartupError(f"tensor {keys['magnitude']:.200} beside new rows or a bias of its module is not served")
        self.pairs[target] = Pair(
            a=keys["a"],
            b=keys["b"],
            rank=rank,
            scale=self._config.scale_of(stem),
            magnitude=keys.get("magnitude"),
            bias=keys.get("bias"),
            copy=keys.get("copy"),
        )

    def _add_experts(self, module: str, stem: str, a: str, b: str) -> None:
        """Find the parameter by shapes: nesting depends on names."""
        stored = self._tensors[a].shape, self._tensors[b].shape
        parameters = self._targets.experts[module]
        for one in parameters:
            of_a, of_b = (one.outputs, one.inputs) if one.swapped else (one.inputs, one.outputs)
            rank = self._config.rank_of(f"{stem}.{one.name}")
            inner = one.num_experts * rank
            if stored != ((inner, of_a), (of_b, inner)) and one is not parameters[-1]:
                continue
            self._check(a, (inner, of_a))
            self._check(b, (of_b, inner))
            target = f"{module}.{one.name}"
            if target in self.pairs:
                raise StartupError(f"tensor {a:.200}: another name of the same parameter has tensors too")
            scale = self._config.scale_of(f"{stem}.{one.name}")
            self.pairs[target] = Pair(a=a, b=b, rank=rank, scale=scale, experts=one)
            return

    def _add_rows(self, target: str, stem: str, keys: Mapping[str, str]) -> None:
        size, width = self._targets.table
        if "whole" in keys:
            self._check(keys["whole"], (size, width))
            self.rows[target] = NewRows(key=keys["whole"], ids=None)
        if "rows" in keys:
            ids = self._config.token_ids_of(stem)
            if any(token >= size for token in ids):
                raise StartupError(f"`trainable_token_indices` names token {max(ids)}; the model has {size}")
            self._check(keys["rows"], (len(ids), width))
            self.rows[target] = NewRows(key=keys["rows"], ids=ids)
        if "rows" in keys and "whole" in keys:
            raise StartupError(f"tensor {keys['whole']:.200} beside {keys['rows']:.200} is not served")

    def _check(self, key: str, shape: tuple[int, ...]) -> None:
        stored = self._tensors[key]
        if stored.shape != shape:
            raise StartupError(f"tensor {key:.200} has shape {list(stored.shape)}; {list(shape)} is expected")
        if stored.dtype not in FLOATING:
            raise StartupError(f"tensor {key:.200} is stored as {stored.dtype}; floating-point numbers are expected")


def adapter_folders(value: str | None) -> dict[str, Path]:
    """Return the folders of `--lora-adapters` on this machine by name, in order."""
    return {source.name: _folder(source) for source in adapter_sources(value, StartupError)}


def _folder(source: AdapterSource) -> Path:
    if source.is_folder:
        return Path(source.place).expanduser()
    found = snapshot(source.place, source.revision, ADAPTER_CONFIG)
    if found is None:
        raise StartupError(
            f"LoRA adapter `{source.name}`: {source.place} is not in the local hub cache; fetch it there with "
            f"`hf download {source.place}`, or give a folder"
        )
    return found
