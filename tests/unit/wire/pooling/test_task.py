"""Which task a model's files stand for, and what sentence-transformers' files say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from wire.pooling.files import read
from wire.pooling.task import AskedTask, Task, find_task

POOLING = [{"type": "sentence_transformers.models.Transformer", "path": ""}, {"type": "x.Pooling", "path": "1_Pooling"}]
SCORE = [{"type": "a.Transformer", "path": ""}, {"type": "a.LogitScore", "path": "1_LogitScore"}]


def written(folder: Path, config: dict[str, Any], **files: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("config", "files", "asked", "task"),
    [
        ({"model_type": "llama"}, {}, "auto", "generate"),
        ({"model_type": "llama"}, {}, "embed", "embed"),
        ({"model_type": "bert"}, {}, "auto", "embed"),
        ({"model_type": "bert"}, {}, "generate", "generate"),
        ({"model_type": "qwen3"}, {"modules": POOLING}, "auto", "embed"),
        ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, {"modules": SCORE}, "auto", "rerank"),
        ({"model_type": "qwen3"}, {"config_sentence_transformers": {"prompts": {"a": "b"}}}, "auto", "embed"),
        (
            {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "num_labels": 1},
            {},
            "auto",
            "rerank",
        ),
        (
            {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "id2label": {"0": "a"}},
            {},
            "auto",
            "rerank",
        ),
        ({"model_type": "bert", "architectures": ["BertForSequenceClassification"]}, {}, "auto", "classify"),
        ({"model_type": "new", "architectures": ["NewForTokenClassification"]}, {}, "auto", "embed"),
    ],
)
def test_task(tmp_path: Path, config: dict[str, Any], files: dict[str, Any], asked: AskedTask, task: Task) -> None:
    assert find_task(written(tmp_path, config, **files), asked, ValueError).task == task


@pytest.mark.parametrize(
    ("config", "files", "said"),
    [
        (
            {"architectures": ["BertForTokenClassification"], "id2label": {"0": "a"}},
            {},
            "labels of single tokens are not served",
        ),
        ({}, {"modules": [{"type": "a.Transformer", "path": ""}, {"type": "a.CLIPModel", "path": ""}]}, "CLIPModel"),
        ({}, {"modules": [{"type": "a.Pooling", "path": ""}]}, "the first module must be a Transformer"),
        ({}, {"modules": [{"type": "a.Transformer", "path": "../.."}]}, "leaves the model's folder"),
        ({}, {"modules": [{"type": "a.Transformer", "path": "a\0b"}]}, "leaves the model's folder"),
        ({}, {"modules": {"a": 1}}, "does not hold a JSON array"),
        ({}, {"modules": POOLING, "config_sentence_transformers": {"prompts": [1]}}, "`prompts` must be an object"),
    ],
)
def test_what_is_not_served_is_refused(
    tmp_path: Path, config: dict[str, Any], files: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        find_task(written(tmp_path, {"model_type": "bert", **config}, **files), "auto", ValueError)


def test_files(tmp_path: Path) -> None:
    written(
        tmp_path,
        {"model_type": "bert"},
        modules=POOLING,
        sentence_bert_config={"max_seq_length": 256, "do_lower_case": True},
        config_sentence_transformers={"prompts": {"query": "q: "}, "default_prompt_name": "query"},
        tokenizer_config={"add_eos_token": True, "eos_token": {"content": "</s>"}, "model_input_names": ["input_ids"]},
    )
    files = read(tmp_path, {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, ValueError)
    assert (files.max_length, files.lower_case, files.prompts) == (256, True, {"query": "q: "})
    assert (files.default_prompt_name, files.appended, files.typed) == ("query", "</s>", False)
    assert files.activation == "Identity" and [module.kind for module in files.modules] == ["Transformer", "Pooling"]
