"""A model's task by its files: text, vectors, scores or labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from wire.model_files import read_optional_object
from wire.pooling.files import SentenceFiles, read

Task = Literal["generate", "embed", "rerank", "classify"]
AskedTask = Literal["auto", "generate", "embed", "rerank", "classify"]
PoolingName = Literal["cls", "mean", "splade", "last-token"]
"""TEI's names of `--pooling`."""

POOLED: tuple[Task, ...] = ("embed", "rerank", "classify")

ENCODERS = frozenset(
    {
        "albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "eurobert", "gte",
        "jina_bert", "jina_embeddings_v3", "modernbert", "mpnet", "new", "nomic_bert", "roberta", "xlm-roberta",
    }
)  # fmt: skip
"""Types of models that generate nothing."""


@dataclass(frozen=True, slots=True)
class FoundTask:
    """reason: which file or option says so, for the log."""

    task: Task
    reason: str

    @property
    def is_pooled(self) -> bool:
        return self.task != "generate"


def find_task(folder: Path, asked: AskedTask, error: type[Exception]) -> FoundTask:
    """The task of the model in `folder`. asked: `--task`. Raises `error`, one line."""
    config = read_optional_object(folder / "config.json", error)
    if asked == "generate":
        return FoundTask("generate", "--task")
    if asked == "auto" and not _may_pool(folder, config):
        return FoundTask("generate", "the model's type")  # nothing of sentence-transformers need be read
    return task_of(config, read(folder, config, error), asked, error)


def task_of(config: Mapping[str, Any], files: SentenceFiles, asked: AskedTask, error: type[Exception]) -> FoundTask:
    """The task by config.json and sentence-transformers' files. Raises `error`, one line."""
    if asked != "auto":
        return FoundTask(asked, "--task")
    if files.module("LogitScore") is not None:
        return FoundTask("rerank", "the module LogitScore in modules.json")
    if files.module("Pooling", "SpladePooling") is not None:
        return FoundTask("embed", "the module Pooling in modules.json")
    architecture = architecture_of(config)
    if architecture.endswith("ForSequenceClassification"):
        count = num_labels(config)
        return FoundTask("rerank" if count == 1 else "classify", f"{architecture} with {count} label{'s'[: count > 1]}")
    if architecture.endswith("ForTokenClassification") and config.get("id2label"):
        raise error(f"{architecture}: labels of single tokens are not served")
    if files.is_saved:
        return FoundTask("embed", "config_sentence_transformers.json")
    if config.get("model_type") in ENCODERS:
        return FoundTask("embed", f"the model type {config['model_type']}")
    return FoundTask("generate", "the model's type")


def architecture_of(config: Mapping[str, Any]) -> str:
    """The first of `architectures`, or nothing."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, Sequence) and not isinstance(names, str) and names else ""


def labels(config: Mapping[str, Any]) -> dict[int, str]:
    """`id2label`, or as transformers names labels where the file is silent."""
    found = config.get("id2label")
    if isinstance(found, dict) and found:
        return {int(key): str(value) for key, value in found.items() if str(key).isdigit()}
    count = config.get("num_labels")
    return {i: f"LABEL_{i}" for i in range(count if isinstance(count, int) and 0 < count < 2**20 else 2)}


def num_labels(config: Mapping[str, Any]) -> int:
    return len(labels(config))


def _may_pool(folder: Path, config: Mapping[str, Any]) -> bool:
    architecture = architecture_of(config)
    return (
        (folder / "modules.json").exists()
        or (folder / "config_sentence_transformers.json").exists()
        or config.get("model_type") in ENCODERS
        or architecture.endswith(("ForSequenceClassification", "ForTokenClassification"))
    )
