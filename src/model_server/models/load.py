"""From a described checkpoint to a Runner: the native decoder, else transformers, which costs seconds to import."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from model_server.adapters.merge import MergedReader
from model_server.attention.choice import AttentionChoice
from model_server.distributed.layout import Layout
from model_server.distributed.placement import Placement
from model_server.errors import StartupError
from model_server.models.adapters.sites import AdapterSites
from model_server.models.decoder.attention.layers import attention_layers
from model_server.models.decoder.build import build
from model_server.models.decoder.decoder import Decoder
from model_server.models.decoder.products import expert_places
from model_server.models.decoder.spec import Spec
from model_server.models.model import Model
from model_server.runner.runner import Runner
from model_server.weights.leftover import check_leftover, layer_of
from model_server.weights.reader import SafetensorsReader, WeightReader
from wire.text.counting import counted

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]


def load_runner(
    model: Model,
    placement: Placement,
    attention: AttentionChoice,
    *,
    trust_remote_code: bool = False,
    captures: bool = False,
    progress: Progress | None = None,
) -> Runner:
    """Load this rank's part of `model`.

    Args:
        attention: Asked for the backend once the layers are known.
        trust_remote_code: Code of the model's folder may run.
        captures: Steps are to be captured as CUDA graphs if possible.
        progress: Called with (layers done, layers).

    Raises:
        StartupError: One line: what is missing, damaged, not served, too large, or fails its self-check.
    """
    try:
        return _load(
            model, placement, attention, trust_remote_code=trust_remote_code, captures=captures, progress=progress
        )
    except torch.OutOfMemoryError as error:
        remedy = "use more devices (`--num-shard`) or `--quantize`"
        if model.slots is not None:
            remedy = (
                f"lower `--lora-slots` (there are {model.slots.number} slots for adapters) or `--lora-max-rank` "
                f"({model.slots.rank}), or {remedy}"
            )
        raise StartupError(f"{model.name} does not fit the memory of {placement.device}: {remedy}") from error


def _load(
    model: Model,
    placement: Placement,
    attention: AttentionChoice,
    *,
    trust_remote_code: bool,
    captures: bool,
    progress: Progress | None,
) -> Runner:
    if model.spec is not None:
        with torch.inference_mode():
            return _load_native(model, model.spec, placement, attention, progress)
    from model_server.models.hf import choice, loading

    found = loading.find_classes(model, trust_remote_code=trust_remote_code)
    with torch.inference_mode():
        return choice.load_runner(found, placement, attention, captures=captures)


@contextmanager
def _merging(model: Model, spec: Spec, reader: WeightReader) -> Iterator[WeightReader]:
    """Return the reader of the base's weights, perhaps with an adapter merged in."""
    if model.merged is None:
        yield reader
        return
    names = spec.names
    with model.merged.open() as opened:
        tied, experts = (names.embedding, names.head), expert_places(spec)
        yield MergedReader(reader, model.merged, opened, tied=tied, transposed=spec.transposed, experts=experts)


def _allocated(device: torch.device) -> int:
    """Count a GPU's bytes, where kernels keep smaller scales than forms."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _check_leftover(model: Model, spec: Spec, reading: SafetensorsReader, layout: Layout) -> None:
    """Refuse tensors of this stage that were not read."""
    base = spec.names.base
    prefixes = (spec.names.layers, spec.names.layers.removeprefix(base))
    unread = [name for name in reading.unread if not _is_of_other_stage(name, spec, layout, prefixes)]
    known = [*spec.left_over]
    if spec.tied_head:  # a copy of the embedding
        known.append(rf"^({re.escape(base)})?{re.escape(spec.names.head.removeprefix(base))}\.")

    def layer_beyond(name: str) -> int | None:
        index = layer_of(name, prefixes)
        return index if index is not None and index >= spec.num_layers else None

    check_leftover(unread, model.config.model_type, layer_beyond, known=known, warns=layout.world.rank == 0)


def _is_of_other_stage(name: str, spec: Spec, layout: Layout, layers: Sequence[str]) -> bool:
    """Whether another stage reads a tensor; `layers` begins names of layers."""
    if layout.stage.size == 1:
        return False
    index = layer_of(name, layers)
    if index is not None:
        return index < spec.num_layers and index not in layout.layers(spec.num_layers)
    names, base = spec.names, spec.names.base
    inputs, outputs = names.inputs, {names.norm, names.output_projection, names.head}
    own = (inputs if layout.stage.rank == 0 else set()) | (outputs if layout.has_last_stage else set())
    others = (module.removeprefix(base) for module in (inputs | outputs) - own if module is not None)
    return any(name.removeprefix(base).startswith(module + ".") for module in others)


def _load_native(
    model: Model, spec: Spec, placement: Placement, attention: AttentionChoice, progress: Progress | None
) -> Decoder:
    started, before = time.perf_counter(), _allocated(placement.device)
    backend = attention.for_layers(attention_layers(spec))
    reading = SafetensorsReader(
        model.checkpoint.headers,
        dtype=placement.dtype,
        device=placement.device,
        base_prefix=spec.names.base,
        spellings=spec.names.spellings,
    )
    adapters = None
    if model.targets is not None:
        adapters = AdapterSites(
            model.targets, model.adapters, placement.dtype, placement.device, room=model.adapter_room, slots=model.slots
        )
    with ExitStack() as opened:
        weights = opened.enter_context(_merging(model, spec, opened.enter_context(reading)))
        runner = build(spec, weights, placement, backend, progress=progress, scheme=model.scheme, adapters=adapters)
        _check_leftover(model, spec, reading, placement.ranks.layout)
        if model.adapter_room:
            opened.pop_all()  # adapters that come later may have to read the base model's weights
            if model.slots is not None:
                reading.read_to_host()  # the KV cache leaves no room for them on the device
    logger.info(
        "Loaded %s with the native runner: %s, %.1f MiB of weights in %.2f s",
        model.config.model_type,
        counted(spec.num_layers, "layer"),
        (_allocated(placement.device) - before or runner.traits.weight_bytes or 0) / 2**20,
        time.perf_counter() - started,
    )
    if placement.ranks.world.rank == 0:
        for adapter in model.adapters:
            size = adapter.num_kept * placement.dtype.itemsize / 2**20
            logger.info("LoRA adapter `%s`: rank %d, %.1f MiB on all shards together", adapter.name, adapter.rank, size)
    return runner
