"""From `--speculator` to a fitting drafter."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from model_server.attention.choice import AttentionChoice
from model_server.config import ServeConfig
from model_server.distributed.placement import Placement
from model_server.engine.steps.maker import StepMaker
from model_server.errors import StartupError
from model_server.features.drafts.device.model_speculator import DeviceModelSpeculator
from model_server.features.drafts.device.speculator import DeviceSpeculator
from model_server.features.drafts.drafters.draft_model import DraftModel
from model_server.features.drafts.drafters.drafter import DraftedRunner, Drafter
from model_server.features.drafts.drafters.eagle_loading import load_eagle
from model_server.features.drafts.drafters.heads import Guesser, Heads
from model_server.features.drafts.drafters.layer_drafter import LayerDrafter
from model_server.features.drafts.drafters.medusa import load_medusa
from model_server.features.drafts.drafters.mlp_speculator import SpeculatorShape, load_mlp_speculator
from model_server.features.drafts.drafters.mtp import load_mtp
from model_server.features.drafts.speculator import Speculator
from model_server.features.drafts.steps import drafts_by
from model_server.models.decoder.decoder import Decoder
from model_server.models.decoder.loader import Loader
from model_server.models.decoder.spec import Spec
from model_server.models.load import load_runner
from model_server.models.model import Model, describe
from model_server.runner.runner import Runner, RunnerTraits
from model_server.text.tokenizer import Tokenizer
from model_server.weights.checkpoint import examine
from model_server.weights.header import read_headers
from model_server.weights.leftover import check_leftover
from model_server.weights.locate import resolve, weight_files
from model_server.weights.reader import SafetensorsReader
from wire.model_files import read_object
from wire.speculation.heads import EAGLE3_TENSORS, MEDUSA_WEIGHTS, SpeculatorKind, heads_in, is_eagle3
from wire.speculation.heads import Heads as NamedHeads
from wire.speculation.options import given, is_mtp, speculator_source

logger = logging.getLogger(__name__)

# How Info calls what drafts without `--speculator`.
LOOKUP = "lookup"
# Characters of a token that are shown.
_SHOWN = 40


@dataclass(frozen=True, slots=True)
class FoundSpeculator:
    """The files that `--speculator` names."""

    value: str
    # Of MTP layers the model's own.
    folder: Path
    fields: dict[str, Any]
    # Of Medusa and MLP speculators; without them, `is_eagle` or `is_mtp` it is an ordinary model.
    heads: NamedHeads | None = None
    is_eagle: bool = False
    is_mtp: bool = False

    @property
    def kind(self) -> str:
        """Return the word of Info."""
        if self.heads is not None:
            return "medusa" if self.heads.kind is SpeculatorKind.MEDUSA else "mlp_speculator"
        return "mtp" if self.is_mtp else "eagle3" if self.is_eagle else "draft_model"


def check_window_rows(max_rows: int | None, num_drafted: int, device: torch.device) -> None:
    """Refuse a `--speculate-max-rows` that bounds nothing."""
    if max_rows is None:
        return
    if not num_drafted:
        raise StartupError(
            f"--speculate-max-rows {max_rows}: nothing is drafted; give `--speculate N`, or leave it out"
        )
    if device.type == "cpu":
        raise StartupError(f"--speculate-max-rows {max_rows} is for GPUs, and this shard has none; leave it out")


def can_draft(traits: RunnerTraits, speculator: str | None, speculate: int | None, max_rows: int | None) -> bool:
    """Whether these options have drafts made, with a warning if they cannot."""
    if not speculate and speculator is None:
        return False
    if traits.continues_from_blocks:
        return True
    why = "this model keeps a state for each request, which cannot go back behind a wrong draft"
    if max_rows is not None:
        raise StartupError(f"--speculate-max-rows {max_rows}: nothing is drafted, as {why}; leave it out")
    logger.warning("%s: no effect, as %s", given(speculator, speculate), why)
    return False


def load_drafts(
    config: ServeConfig,
    found: FoundSpeculator | None,
    model: Model,
    runner: Runner,
    vocab_size: int,
    placement: Placement,
) -> tuple[Runner, StepMaker]:
    """Load what `found` names, or draft by lookup; return the model with it."""
    most, max_rows = config.num_drafted, config.most_window_rows
    device, alone = placement.device, placement.ranks.world.size == 1
    if found is None:
        return runner, drafts_by(lookup_speculator(runner.traits, most, max_rows, device, alone=alone))
    choice = AttentionChoice(config.attention, device, placement.dtype, placement.cache_dtype)
    drafter = load_drafter(found, most, model, runner, vocab_size, placement, choice)
    block_size = runner.traits.block_size
    speculator = DeviceModelSpeculator(most, max_rows, device, block_size, drafter, alone=alone)
    return DraftedRunner(runner, drafter), drafts_by(speculator)


def lookup_speculator(
    traits: RunnerTraits, num_drafted: int, max_rows: int, device: torch.device, *, alone: bool
) -> Speculator:
    """Make what drafts from text.

    Args:
        num_drafted: The longest draft.
        max_rows: Token rows of a step with drafts, on a GPU.
        alone: There are no other ranks.
    """
    if device.type == "cpu":
        return Speculator(num_drafted)
    return DeviceSpeculator(num_drafted, max_rows, device, traits.block_size, alone=alone)


def find_speculator(value: str, tokenizer: Tokenizer, model_folder: Path) -> FoundSpeculator:
    """Find a drafter's files.

    Raises:
        StartupError: A draft model's tokenizer gives an id another text.
    """
    if is_mtp(value):
        return FoundSpeculator(value, model_folder, {}, is_mtp=True)
    place, revision = speculator_source(value, StartupError)
    try:
        folder = resolve(place, revision)
        fields = read_object(folder / "config.json", StartupError)
        heads = heads_in(fields, StartupError)
        is_eagle = heads is None and (is_eagle3(fields) or _has_tensors_of_eagle(folder))
        if heads is None and not is_eagle:
            _refuse_unknown(value, fields)
            _check_tokenizer(value, tokenizer, Tokenizer.load(folder))
    except StartupError as error:
        raise _named(value, error) from None
    return FoundSpeculator(value, folder, fields, heads, is_eagle)


def load_drafter(
    found: FoundSpeculator,
    number: int,
    model: Model,
    base: Runner,
    vocab_size: int,
    placement: Placement,
    attention: AttentionChoice,
) -> Drafter:
    """Load what drafts for `model`, at most `number` tokens below `vocab_size`."""
    try:
        with torch.inference_mode():
            if found.heads is None and not found.is_eagle and not found.is_mtp:
                return _load_draft_model(found, base, vocab_size, placement, attention)
            if model.spec is None or not isinstance(base, Decoder):
                raise StartupError(
                    f"heads draft only for models of the native runner, not for {model.config.model_type}: leave it out"
                )
            if found.is_mtp:
                return _load_mtp(model, model.spec, base, placement)
            if found.heads is None:
                return _load_eagle(found, model.spec, base, placement, attention)
            return _load_heads(found, found.heads, number, model.spec, base, placement)
    except StartupError as error:
        raise _named(found.value, error) from None


def _load_draft_model(
    found: FoundSpeculator, base: Runner, vocab_size: int, placement: Placement, attention: AttentionChoice
) -> DraftModel:
    runner = load_runner(describe(examine(found.folder), name=found.value), placement, attention)
    traits = runner.traits
    if not traits.continues_from_blocks or traits.decoder_prefix is not None:
        raise StartupError("it keeps a state that cannot go back behind a wrong draft")
    if runner.vocab_size < vocab_size:
        raise StartupError(f"its {runner.vocab_size} logits are fewer than the {vocab_size} ids of the tokenizer")
    if traits.block_size != base.traits.block_size:
        raise StartupError(
            f"its attention needs KV blocks of {traits.block_size} tokens, the model's {base.traits.block_size}"
        )
    return DraftModel(runner, base)


def _load_heads(
    found: FoundSpeculator, heads: NamedHeads, number: int, spec: Spec, base: Decoder, placement: Placement
) -> Drafter:
    load = _medusa if heads.kind is SpeculatorKind.MEDUSA else _mlp_speculator
    reading = SafetensorsReader(
        read_headers(_files(found.folder, heads.kind)), dtype=placement.dtype, device=placement.device, base_prefix=""
    )
    with reading as reader:
        loader = Loader(reader, placement.device, placement.ranks.tensor)
        made = Heads(load(found, number, spec, base, loader), number, _width(spec), loader)
        # Heads may be more than the tokens that are drafted.
        unread = [name for name in reading.unread if not any(int(n) >= number for n in re.findall(r"\d+", name)[:1])]
        check_leftover(unread, heads.kind.value, lambda name: None)
    if placement.ranks.world.rank == 0:
        logger.info("Drafts by %s, %d heads, %.1f MiB of weights", heads.kind.value, number, made.weight_bytes / 2**20)
    return made


def _load_eagle(
    found: FoundSpeculator, spec: Spec, base: Decoder, placement: Placement, attention: AttentionChoice
) -> LayerDrafter:
    reading = SafetensorsReader(
        read_headers(weight_files(found.folder)), dtype=placement.dtype, device=placement.device
    )
    with reading as reader:
        made = load_eagle(found.fields, reader, spec, base, placement, attention)
        # Which of the base model's tokens are the drafter's, the other way round.
        check_leftover(reading.unread, "EAGLE-3", lambda name: None, known=(r"^t2d$",))
    if placement.ranks.world.rank == 0:
        logger.info("Drafts by EAGLE-3, %.1f MiB of weights", made.weight_bytes / 2**20)
    return made


def _load_mtp(model: Model, spec: Spec, base: Decoder, placement: Placement) -> LayerDrafter:
    reading = SafetensorsReader(
        model.checkpoint.headers, dtype=placement.dtype, device=placement.device, base_prefix=spec.names.base
    )
    with reading as reader:
        made = load_mtp(reader, spec, model.scheme, base, placement)
        own = f"{spec.names.layers}.{spec.num_layers}."
        unread = [name for name in reading.unread if name.startswith((own, own.removeprefix(spec.names.base)))]
        check_leftover(unread, "multi-token prediction", lambda name: None, known=spec.left_over)
    if placement.ranks.world.rank == 0:
        logger.info("Drafts by multi-token prediction, %.1f MiB of weights", made.weight_bytes / 2**20)
    return made


def _has_tensors_of_eagle(folder: Path) -> bool:
    try:
        headers = read_headers(weight_files(folder))
    except StartupError:
        return False  # what is wrong is said when it is loaded
    return {name for header in headers.values() for name in header.tensors} >= EAGLE3_TENSORS


def _files(folder: Path, kind: SpeculatorKind) -> list[Path]:
    if kind is SpeculatorKind.MLP:
        return weight_files(folder)
    if (folder / MEDUSA_WEIGHTS).is_file():
        return [folder / MEDUSA_WEIGHTS]
    pickled = Path(MEDUSA_WEIGHTS).with_suffix(".pt").name
    if (folder / pickled).is_file():
        raise StartupError(
            f"{folder} holds {pickled}, which is pickled, and no {MEDUSA_WEIGHTS}: save its tensors once with "
            "safetensors.torch.save_file"
        )
    raise StartupError(f"{folder} has no {MEDUSA_WEIGHTS}")


def _medusa(found: FoundSpeculator, number: int, spec: Spec, base: Decoder, loader: Loader) -> Guesser:
    num_layers = _size(found, "medusa_num_layers", 1)
    assert base.output is not None and base.output.head is not None
    name = f"0.{num_layers}.weight"
    vocab_size = _vocab_size(loader, name, spec) if loader.has(name) else spec.vocab_size
    return load_medusa(loader, number, num_layers, _width(spec), vocab_size, base.output.head)


def _mlp_speculator(found: FoundSpeculator, number: int, spec: Spec, base: Decoder, loader: Loader) -> Guesser:
    shape = SpeculatorShape(
        number=_size(found, "n_predict"),
        inner=_size(found, "inner_dim", 0) or _width(spec),
        hidden_size=_width(spec),
        vocab_size=_vocab_size(loader, "speculator.head.0.weight", spec),
        tied=found.fields.get("tie_weights") is True,
        scales_input=found.fields.get("scale_input") is True,
    )
    return load_mlp_speculator(loader, number, shape)


def _width(spec: Spec) -> int:
    """Return the width of what the model's head reads."""
    return spec.hidden_size if spec.embedding_size is None else spec.embedding_size


def _vocab_size(loader: Loader, name: str, spec: Spec) -> int:
    """The rows of a head."""
    rows = loader.reader.shape(name)[0]
    if rows > spec.vocab_size:
        raise StartupError(f"weight {name} has {rows} rows, the model {spec.vocab_size} ids: it is of another model")
    return rows


def _size(found: FoundSpeculator, name: str, default: int | None = None) -> int:
    value = found.fields.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 2**24:
        raise StartupError(f"{found.folder / 'config.json'}: `{name}` is {value!r:.100}")
    return value


def _refuse_unknown(value: str, fields: dict[str, Any]) -> None:
    """Refuse drafters that would be taken for models."""
    for name in fields.get("architectures") or ():
        if isinstance(name, str) and any(word in name.lower() for word in _UNSERVED):
            raise StartupError(
                f"--speculator {value}: drafters of architecture {name[:100]} are not served; use Medusa heads, "
                "EAGLE-3, an MLP speculator, or an ordinary model with the same tokenizer"
            )


_UNSERVED = ("eagle", "dflash", "medusa", "speculator", "mtp", "hydra")


def _check_tokenizer(value: str, tokenizer: Tokenizer, other: Tokenizer) -> None:
    # Converters to GGUF write the spaces of some tokens out.
    ours, theirs = (
        {number: text.replace("▁", " ") for number, text in one.pieces().items()} for one in (tokenizer, other)
    )
    for token_id, text in sorted(ours.items()):
        if theirs.get(token_id) != text:
            found = repr(theirs[token_id][:_SHOWN]) if token_id in theirs else "nothing"
            raise StartupError(
                f"--speculator {value}: its tokenizer gives id {token_id} another text than the model's, {found} for "
                f"{text[:_SHOWN]!r}: choose a draft model with the same tokenizer"
            )


def _named(value: str, error: StartupError) -> StartupError:
    said = str(error)
    named = f"--speculator {value}: "
    if said.startswith("--model-id "):
        said = said.partition(": ")[2]
    return StartupError(said if said.startswith((named, "Speculate is set")) else named + said)
