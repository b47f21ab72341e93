"""From `--speculator` to a draft model that fits the model. Whatever does not fit is refused in one line."""

from __future__ import annotations

from pathlib import Path

from model_server.attention.choice import AttentionChoice
from model_server.distributed.placement import Placement
from model_server.errors import StartupError
from model_server.models.load import load_runner
from model_server.models.model import describe
from model_server.runner.runner import Runner
from model_server.speculation.draft_model import DraftModel
from model_server.text.tokenizer import Tokenizer
from model_server.weights.checkpoint import examine
from model_server.weights.locate import resolve
from wire.adapters import speculator_source

# Characters of a token that are shown.
_SHOWN = 40


def check_speculator(value: str, tokenizer: Tokenizer) -> Path:
    """The folder of the draft model, whose tokenizer gives each id the text that the model's gives it.

    Raises StartupError.
    """
    place, revision = speculator_source(value, StartupError)
    try:
        folder = resolve(place, revision)
        _check_tokenizer(value, tokenizer, Tokenizer.load(folder))
    except StartupError as error:
        raise _named(value, error) from None
    return folder


def load_draft_model(
    value: str,
    folder: Path,
    base: Runner,
    vocab_size: int,
    placement: Placement,
    attention: AttentionChoice,
) -> DraftModel:
    """The draft model in `folder` for the model `base`, whose tokenizer has ids below `vocab_size`.

    Raises StartupError.
    """
    try:
        runner = load_runner(describe(examine(folder), name=value), placement, attention)
    except StartupError as error:
        raise _named(value, error) from None
    traits = runner.traits
    if traits.keeps_state or traits.decoder_prefix is not None:
        raise StartupError(f"--speculator {value}: it keeps a state that cannot go back behind a wrong draft")
    if runner.vocab_size < vocab_size:
        raise StartupError(
            f"--speculator {value}: its {runner.vocab_size} logits are fewer than the {vocab_size} ids of the tokenizer"
        )
    if traits.block_size != base.traits.block_size:
        raise StartupError(
            f"--speculator {value}: its attention needs KV blocks of {traits.block_size} tokens, the model's "
            f"{base.traits.block_size}"
        )
    return DraftModel(runner, base)


def _check_tokenizer(value: str, tokenizer: Tokenizer, other: Tokenizer) -> None:
    ours, theirs = tokenizer.pieces(), other.pieces()
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
    return StartupError(said if said.startswith(named) else named + said)
