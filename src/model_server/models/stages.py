"""Which layers each stage holds, and which models can be divided."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate

from model_server.errors import StartupError
from model_server.models.decoder.attention.mla import Mla
from model_server.models.decoder.spec import Spec
from model_server.models.model import Model, whole_only
from wire.text.counting import counted


def layer_counts(model: Model, num_stages: int, asked: Sequence[int] = ()) -> tuple[int, ...] | None:
    """Return the layers of each stage; None for a single one.

    Args:
        asked: `--stage-layers`; empty: minimize the largest stage's bytes.
    """
    if num_stages == 1:
        if asked:
            raise StartupError("--stage-layers needs --num-stage > 1")
        return None
    if model.spec is None:
        raise whole_only(model.config.model_type, num_stages)
    layers = model.spec.num_layers
    if num_stages > layers:
        raise StartupError(f"--num-stage {num_stages}: the model has only {counted(layers, 'layer')}")
    if not asked:
        sizes, first, last = stored_bytes(model, model.spec)
        starts = [index for index in range(layers) if may_begin(model.spec, index)]
        if num_stages > len(starts):
            raise StartupError(
                f"--num-stage {num_stages}: this model can be divided into {counted(len(starts), 'stage')} at most, "
                "since its other layers read what a layer before them keeps"
            )
        return split(sizes, num_stages, first=first, last=last, starts=starts)
    if len(asked) != num_stages or min(asked) < 1 or sum(asked) != layers:
        raise StartupError(
            f"--stage-layers {','.join(map(str, asked))}: give {num_stages} numbers of at least 1, one for each "
            f"stage, whose sum is the number of layers, {layers}"
        )
    return tuple(asked)


def may_begin(spec: Spec, index: int) -> bool:
    """Whether a stage may begin with layer `index`: no layer from there on reads what one before it keeps."""
    indexer = spec.attention.indexer if isinstance(spec.attention, Mla) else None
    if indexer is not None and not indexer.is_full(index):
        return False
    return all(spec.owner(later) >= index for later in range(index, spec.num_layers))


def split(
    sizes: Sequence[int], num_stages: int, *, first: int = 0, last: int = 0, starts: Collection[int] | None = None
) -> tuple[int, ...]:
    """Cut layers into `num_stages` runs with the smallest maximum, of equal cuts with most layers in front.

    Args:
        first: What the first run holds beside layers.
        last: What the last one does.
        starts: Layers that runs may begin with; None: all.
    """
    count = len(sizes)
    until = [0, *accumulate(sizes)]

    def size(stage: int, begin: int, end: int) -> int:
        return until[end] - until[begin] + first * (stage == 0) + last * (stage == num_stages - 1)

    # best[end]: the largest run of the stages up to this one over the layers before `end`, and their ends.
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    allowed = range(count) if starts is None else starts
    for stage in range(num_stages):
        following = {}
        for end in range(stage + 1, count - (num_stages - stage - 1) + 1):
            ways = [
                (max(most, size(stage, begin, end)), (*ends, end))
                for begin, (most, ends) in best.items()
                if begin < end and begin in allowed
            ]
            if ways:
                following[end] = min(ways, key=lambda way: (way[0], [-e for e in way[1]]))
        best = following
    ends = best[count][1]
    return tuple(end - begin for begin, end in zip((0, *ends), ends, strict=False))


def stored_bytes(model: Model, spec: Spec) -> tuple[list[int], int, int]:
    """Return bytes of each layer, and of the first and last stage beside them; a tied matrix counts twice."""
    names = spec.names
    layers = [0] * spec.num_layers
    first = last = 0
    base = names.base
    prefix = names.layers.removeprefix(base) + "."
    inputs = {name.removeprefix(base) for name in names.inputs}
    embedding = names.embedding.removeprefix(base)
    stored = {
        name.removeprefix(base): tensor.end - tensor.begin
        for header in model.checkpoint.headers.values()
        for name, tensor in header.tensors.items()
    }
    has_head = any(name.startswith(names.head.removeprefix(base) + ".") for name in stored)
    for name, size in stored.items():
        index = name.removeprefix(prefix).partition(".")[0]
        if name.startswith(prefix) and index.isdecimal() and int(index) < len(layers):
            layers[int(index)] += size
        elif any(name == start or name.startswith(start + ".") for start in inputs):
            first += size
            if name.startswith(f"{embedding}.") and (spec.tied_head or not has_head):
                last += size
        else:
            last += size
    return layers, first, last
