"""From a model's files to what is done with hidden states; refuses before weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model_server.errors import StartupError
from wire.model_files import length_limit, read_optional_object, read_tokenizer
from wire.pooling.files import Module, SentenceFiles
from wire.pooling.task import ENCODERS, FoundTask, PoolingName, architecture_of

# The older flags of a Pooling module and the newer words for the same.
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
MODES = tuple(_FLAGS.values())
_BY_OPTION: Mapping[PoolingName, str] = {"cls": "cls", "mean": "mean", "last-token": "lasttoken", "splade": "splade"}


@dataclass(frozen=True, kw_only=True)
class PoolingPlan:
    """What is done with hidden states."""

    task: FoundTask
    # Of concatenated vectors; `splade` alone: sparse; empty: a head scores texts.
    modes: tuple[str, ...]
    # A prompt's tokens count.
    include_prompt: bool = True
    # Behind the pooling.
    modules: tuple[Module, ...] = ()
    splade: Mapping[str, Any] | None = None
    # Tokens for a relevant and an irrelevant text; None: another head.
    answers: tuple[int, int | None] | None = None
    # Of a text, if the files say it.
    max_length: int | None = None
    # Where the pooling comes from.
    reason: str = ""

    @property
    def is_sparse(self) -> bool:
        return self.modes == ("splade",)

    @property
    def name(self) -> str:
        """Return TEI's name in /info."""
        tei = {"lasttoken": "last_token"}
        return "+".join(tei.get(mode, mode) for mode in self.modes)


def make_plan(
    task: FoundTask, files: SentenceFiles, config: Mapping[str, Any], asked: PoolingName | None, name: str, folder: Path
) -> PoolingPlan:
    """Plan from files and `--pooling`."""
    length = files.max_length
    if length is None and files.modules:
        length = _tokenizer_length(files.modules[0])
    if task.task != "embed":
        if asked is not None:
            raise StartupError(f"--pooling {asked}: this server's task is {task.task} ({task.reason}); leave it out")
        return PoolingPlan(task=task, modes=(), max_length=length, answers=_answers(files, config, name, folder))
    behind = tuple(m for m in files.modules if m.kind in ("Dense", "LayerNorm", "Normalize"))
    pooling = files.module("Pooling", "SpladePooling")
    if asked is not None:
        return PoolingPlan(
            task=task, modes=(_BY_OPTION[asked],), modules=behind, max_length=length, reason="--pooling", splade={}
        )
    if pooling is not None and pooling.kind == "SpladePooling":
        return PoolingPlan(
            task=task, modes=("splade",), max_length=length, splade=pooling.config, reason="modules.json"
        )
    if pooling is not None:
        return PoolingPlan(
            task=task,
            modes=_modes(pooling.config),
            include_prompt=pooling.config.get("include_prompt", True) is not False,
            modules=behind,
            max_length=length,
            reason=f"{pooling.folder.name}/config.json",
        )
    if "bert" in str(config.get("model_type")) and not architecture_of(config).endswith("ForMaskedLM"):
        return PoolingPlan(task=task, modes=("cls",), max_length=length, reason="a guess: no file says it")
    raise StartupError(f"no file of {name} says how its embeddings are pooled: give --pooling cls, mean or last-token")


def _modes(config: Mapping[str, Any]) -> tuple[str, ...]:
    value = config.get("pooling_mode")
    if value is None:
        modes = tuple(mode for flag, mode in _FLAGS.items() if config.get(flag) is True)
    else:
        modes = tuple(value) if isinstance(value, list) else (value,)
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown or not modes:
        raise StartupError(
            f"the config of the module Pooling asks for {unknown[0] if unknown else 'nothing'!r:.60}; "
            f"served: {', '.join(MODES)}"
        )
    return modes


def _answers(files: SentenceFiles, config: Mapping[str, Any], name: str, folder: Path) -> tuple[int, int | None] | None:
    module = files.module("LogitScore")
    if module is not None:
        yes, no = module.config.get("true_token_id"), module.config.get("false_token_id")
        if not isinstance(yes, int) or not isinstance(no, int | None):
            raise StartupError(f"{module.folder}/config.json: `true_token_id` must be a token id")
        return yes, no
    if architecture_of(config).endswith("ForSequenceClassification") or config.get("model_type") in ENCODERS:
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(read_tokenizer(folder / "tokenizer.json", StartupError))
    yes, no = (tokenizer.token_to_id(word) for word in ("yes", "no"))
    if yes is None or no is None:
        raise StartupError(f"--task rerank: {name} has no single tokens for `yes` and `no`")
    return yes, no


def _tokenizer_length(transformer: Module) -> int | None:
    """Return the length that sentence-transformers falls back to."""
    fields = read_optional_object(transformer.folder / "tokenizer_config.json", StartupError)
    return length_limit(fields.get("model_max_length"))
