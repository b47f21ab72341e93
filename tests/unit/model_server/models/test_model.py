"""From a folder to a runner everything is read once."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.loading import load
from support.tiny_models import tiny_checkpoint

from model_server.models import families
from model_server.models.config import ModelConfig
from model_server.models.decoder.decoder import Decoder
from model_server.models.decoder.spec import Spec

# An audit hook stays for the life of the process: this one notes what is opened below a folder, while there is one.
_watched: dict[Path, Counter[str]] = {}


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(arguments[0], str | Path):
        for folder, opened in _watched.items():
            if Path(arguments[0]).is_relative_to(folder):
                opened[Path(arguments[0]).name] += 1


sys.addaudithook(_note)


def test_files_are_read_and_the_spec_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_checkpoint("llama", tmp_path, with_tokenizer=False)
    family, built = families.FAMILIES["llama"], []

    def counting(config: ModelConfig) -> Spec:
        built.append(config.model_type)
        return family(config)

    monkeypatch.setitem(families.FAMILIES, "llama", counting)
    opened = _watched[path] = Counter()
    try:
        assert isinstance(load(path), Decoder)
    finally:
        del _watched[path]
    assert opened["config.json"] == 1
    assert opened["model.safetensors"] == 1, "the header; tensors are mapped by the library"
    assert built == ["llama"]
