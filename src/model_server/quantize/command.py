"""`model-server quantize MODEL_ID OUTPUT_DIR`, with one layer at a time in memory."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import shutil
import time
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from model_server.config import threads_are_set
from model_server.device import resolve_device, resolve_dtype, tune
from model_server.errors import StartupError
from model_server.models.config import ModelConfig
from model_server.models.families.vision import text_config
from model_server.models.model import Model, describe
from model_server.quantize import output
from model_server.quantize.config import QuantizeConfig
from model_server.quantize.layers import Layer, LayerByLayer, Watch
from model_server.quantize.progress import FOLDER, Progress, check_folder, writing
from model_server.quantize.samples import Samples, from_file, kept, written
from model_server.quantize.solver import Rounded, Rounding, rounded
from model_server.quantize.streams import Streams
from model_server.text.tokenizer import Tokenizer
from model_server.weights.checkpoint import Checkpoint, examine
from model_server.weights.locate import resolve
from model_server.weights.reader import SafetensorsReader
from wire.text.counting import counted

logger = logging.getLogger(__name__)

_END_BYTES = 1 << 20


def run(config: QuantizeConfig) -> None:
    """Quantize; errors are one line."""
    how = Rounding(bits=config.bits, group=config.groupsize, damping=config.percdamp, by_activation=config.act_order)
    checkpoint = examine(resolve(config.model_id, config.revision))
    model = describe(checkpoint, name=config.model_id)
    _check(config, model)
    copies = output.copies(checkpoint.directory)
    device = resolve_device(0, 1)
    assert model.spec is not None
    if model.spec.mlps:  # on a CPU the experts are products of their own
        device = torch.device("cpu")
    tune(device, 1, checkpoint.file_bytes, keep_threads=threads_are_set())
    dtype = resolve_dtype(None, device, checkpoint.stored_in, needs_bfloat16=checkpoint.needs_bfloat16)
    with torch.inference_mode(), contextlib.ExitStack() as stack:
        names = model.spec.names
        reader = SafetensorsReader(
            checkpoint.headers, dtype=dtype, device=device, base_prefix=names.base, spellings=names.spellings
        )
        layers = LayerByLayer(model.spec, stack.enter_context(reader))
        samples = _samples(config, checkpoint, layers)
        asked = _asked(how, checkpoint, samples, dtype)
        progress = stack.enter_context(contextlib.closing(Progress(config.output_dir, asked, model.spec.num_layers)))
        Quantizer(layers, samples, how, progress, _names(checkpoint, model)).run()
        before, after = (_perplexity(loss, samples) for loss in progress.losses)
        held_out = counted(len(samples.held_out), "sample")
        logger.info("Perplexity on %s that took no part: %.3f before, %.3f after", held_out, before, after)
        output.write(checkpoint, config.output_dir, progress, how, copies)
        progress.end()
    if config.upload_to_model_id is not None:
        output.upload(config.output_dir, config.upload_to_model_id)
    logger.info("Done: serve it with --model-id %s", config.output_dir)


class Quantizer:
    """The run over all layers."""

    def __init__(
        self,
        layers: LayerByLayer,
        samples: Samples,
        how: Rounding,
        progress: Progress,
        stored_names: dict[str, str],
    ) -> None:
        self._layers, self._samples, self._how, self._progress = layers, samples, how, progress
        # By the name that layers ask for.
        self._stored_names = stored_names
        self._num_layers = layers.spec.num_layers
        count, self._num_held_out = len(samples.calibration), len(samples.held_out)
        self._counts = (count, self._num_held_out, self._num_held_out)
        self._began_at = time.monotonic()

    def run(self) -> None:
        first = self._progress.num_done
        if first:
            logger.info("%s of %d are done already", counted(first, "layer"), self._num_layers)
        for index in range(first, self._num_layers):
            began_at = time.monotonic()
            results = self._layer(index)
            done = time.monotonic()
            left = (done - self._began_at) / (index + 1 - first) * (self._num_layers - index - 1)
            worst = max((one.error for one in results.values()), default=0.0)
            logger.info(
                "Layer %d of %d: %s, relative error of the outputs at most %.2g, %.0f s; about %.0f min left",
                index + 1, self._num_layers, f"{len(results)} matrices", worst, done - began_at,
                left / 60,
            )  # fmt: skip

    def _layer(self, index: int) -> dict[str, Rounded]:
        entering = None if index == 0 else self._streams(index)
        is_last = index == self._num_layers - 1
        leaving = None if is_last else self._streams(index + 1, is_new=True)
        watch = self._watched(index, entering, leaving)
        results, replaced = self._solve(watch)
        layer = self._layers.build(index, replaced=replaced, with_head=is_last)
        losses = None
        if leaving is not None:
            for group, number in self._all("calibration", "held_out"):
                leaving.put(group, number, layer(self._given(entering, group, number)))
        else:
            plain = self._layers.build(index, with_head=True)
            losses = (self._loss(plain, entering, "plain"), self._loss(layer, entering, "held_out"))
        tensors: dict[str, Tensor] = {}
        for name, one in results.items():
            tensors |= output.tensors_of(self._stored_names[name].removesuffix(".weight"), one, self._how.bits)
        self._progress.done(index, tensors, losses)
        return results

    def _watched(self, index: int, entering: Streams | None, leaving: Streams | None) -> Watch:
        """Run a layer over the calibration, and on over held-out samples."""
        watch = Watch(self._layers.device)
        layer = self._layers.build(index, watch=watch)
        watch.is_on = True
        for group, number in self._all("calibration"):
            layer(self._given(entering, group, number))
        watch.is_on = False
        if leaving is not None:
            for group, number in self._all("plain"):
                leaving.put(group, number, layer(self._given(entering, group, number)))
        if watch.stacked:
            some = ", ".join(sorted(watch.stacked)[:3])
            logger.warning("%s stay as they are: gptq has no form for tensors that hold all experts", some)
        return watch

    def _solve(self, watch: Watch) -> tuple[dict[str, Rounded], dict[str, Tensor]]:
        """Round the layer's matrices; return them as plain ones by tensor name, too."""
        results: dict[str, Rounded] = {}
        replaced: dict[str, Tensor] = {}
        alone = [name for name, hessian in watch.hessians.items() if not hessian.num_samples]
        if alone:
            logger.warning("no sample reached %s: rounded without calibration", ", ".join(alone[:3]))
        for hessian, names in watch.shared():
            weights = {}
            for name in names:
                weight = self._layers.stored(self._stored_names[name])
                if name in watch.transposed:
                    weight = weight.t()
                if reason := unsuitable(weight, self._how):
                    logger.warning("%s stays as it is: %s", name, reason)
                    continue
                weights[name] = weight
            if weights:
                results |= rounded(weights, hessian.matrix, self._how)
        for name, one in results.items():
            value = one.dequantize()
            replaced[self._stored_names[name]] = replaced[f"{name}.weight"] = (
                value.t() if name in watch.transposed else value
            )
        return results, replaced

    def _streams(self, index: int, *, is_new: bool = False) -> Streams:
        length = self._samples.calibration.shape[1]
        path = self._progress.stream(index)
        with writing(path):
            return Streams(path, self._counts, length, self._layers.spec.hidden_size, self._layers.dtype, is_new=is_new)

    def _given(self, entering: Streams | None, group: str, number: int) -> Tensor:
        if entering is not None:
            return entering.get(group, number)
        return (self._samples.calibration if group == "calibration" else self._samples.held_out)[number]

    def _all(self, *groups: str) -> list[tuple[str, int]]:
        counts = dict(zip(("calibration", "held_out", "plain"), self._counts, strict=True))
        return [(group, number) for group in groups for number in range(counts[group])]

    def _loss(self, layer: Layer, entering: Streams | None, group: str) -> float:
        """Sum the loss of held-out tokens."""
        total = 0.0
        for number in range(self._num_held_out):
            logits = layer(self._given(entering, group, number))[:-1].float()
            wanted = self._samples.held_out[number, 1:].to(logits.device)
            total += float(torch.nn.functional.cross_entropy(logits, wanted, reduction="sum"))
        return total


def unsuitable(weight: Tensor, how: Rounding) -> str | None:
    """Say why gptq's words cannot hold a matrix [out, in], if so."""
    per_word = 32 // how.bits
    if any(size % per_word for size in weight.shape):
        return f"its sizes {list(weight.shape)} are no multiples of {per_word}"
    return None


def _check(config: QuantizeConfig, model: Model) -> None:
    if model.scheme.method is not None:
        raise StartupError(f"{config.model_id} is quantized already ({model.scheme.method}): give the plain checkpoint")
    if model.spec is None:
        raise StartupError(
            f"{model.config.model_type} is served by the transformers runner, whose layers cannot be quantized one by "
            "one: serve it as it is, or quantize it on load with --quantize"
        )
    if model.spec.layer_input_width is not None or any(owner is not None for owner in model.spec.kv_from):
        raise StartupError(
            f"{model.config.model_type} has layers that read more than the layer before them, which cannot be "
            "quantized one by one: serve it as it is, or quantize it on load with --quantize"
        )


def _samples(config: QuantizeConfig, checkpoint: Checkpoint, layers: LayerByLayer) -> Samples:
    """Make the samples; written ones are kept for a run that continues."""
    tokenizer = Tokenizer.load(checkpoint.directory)
    folder = config.output_dir / FOLDER
    # Before an unfinished run is removed, and before the samples, which a model may write for hours.
    check_folder(config.output_dir, resume=config.resume)
    if not config.resume and folder.is_dir():
        with writing(folder):
            shutil.rmtree(folder)
    if config.calibration is not None:
        return from_file(
            config.calibration, tokenizer, count=config.num_samples, length=config.sequence_length, seed=config.seed
        )
    path = folder / f"samples-{config.num_samples}-{config.seed}.safetensors"
    begin = text_config(ModelConfig(checkpoint.fields)).get("bos_token_id")
    begin = begin if type(begin) is int else None
    return kept(path, lambda: written(layers.whole(), tokenizer, begin, count=config.num_samples, seed=config.seed))


def _perplexity(loss: float, samples: Samples) -> float:
    try:
        return math.exp(loss / samples.held_out[:, 1:].numel())
    except OverflowError:
        return math.inf


def _asked(how: Rounding, checkpoint: Checkpoint, samples: Samples, dtype: torch.dtype) -> dict[str, object]:
    """All on which the result depends."""
    ids = torch.cat([samples.calibration, samples.held_out]).numpy().tobytes()
    headers = {
        path.name: [_ends(path), sorted((name, str(one)) for name, one in header.tensors.items())]
        for path, header in checkpoint.headers.items()
    }
    return {
        "how": asdict(how),
        "weights": headers,
        "config": checkpoint.fields,
        "samples": hashlib.sha256(ids).hexdigest(),
        "dtype": str(dtype),
    }


def _ends(path: Path) -> list[object]:
    """Identify a file by size and a digest of its ends."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        found = hashlib.blake2b(file.read(_END_BYTES))
        file.seek(max(0, size - _END_BYTES))
        found.update(file.read(_END_BYTES))
    return [size, found.hexdigest()]


def _names(checkpoint: Checkpoint, model: Model) -> dict[str, str]:
    """Map modules to names in the files, with and without the base prefix."""
    assert model.spec is not None
    base = model.spec.names.base
    found = {}
    for header in checkpoint.headers.values():
        for name in header.tensors:
            if name.endswith(".weight"):
                module = name.removesuffix(".weight")
                other = module.removeprefix(base) if module.startswith(base) else base + module
                found[module] = name
                found.setdefault(other, name)
    return found
