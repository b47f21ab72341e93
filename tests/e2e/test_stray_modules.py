"""Python files that lie about: in the folder in which the launcher is started, and on the import path."""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from support.launched import Family
from support.running_server import RunningServer, running_server
from support.tiny_models import tiny_checkpoint
from support.tokenizer_kinds import KINDS

pytestmark = pytest.mark.e2e

INSTALLED = ("grpc", "huggingface_hub", "jinja2", "llguidance", "numpy", "orjson", "safetensors", "tokenizers", "torch",
             "transformers", "uvicorn", "uvloop")  # fmt: skip
OURS = ("launcher", "model_server", "router", "tercet", "wire")
AT_START = ("sitecustomize", "usercustomize")


def _answer(server: RunningServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a template, whose tokenizer is still to be converted, and with files that Python would import."""
    folder = tiny_checkpoint("llama", tmp_path_factory.mktemp("model"), with_tokenizer=False)
    config = (folder / "config.json").read_bytes()
    KINDS["gpt2"](folder)
    (folder / "config.json").write_bytes(config)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{{ messages[0].content }}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for name in {*sys.stdlib_module_names, *INSTALLED, *OURS, *AT_START}:
        (folder / f"{name}.py").write_text(f"open({str(folder / 'ran')!r}, 'a').write({name + ' '!r})\n")
    return folder


@pytest.mark.long
def test_nothing_in_a_models_folder_is_run(model: Path) -> None:
    """The download step, a conversion, a shard, the router and its workers, started there."""
    launcher = (sys.executable, "-P", "-m", "launcher")  # as the installed command does it
    with running_server(".", "--max-total-tokens", "32", command=launcher, cwd=model) as server:
        assert "No tokenizer.json: making one of vocab.json and merges.txt" in server.log()
        grammar = {"type": "regex", "value": "[ab]+"}
        _answer(server, "/generate", {"inputs": "the", "parameters": {"grammar": grammar, "max_new_tokens": 4}})
        _answer(server, "/v1/chat/completions", {"messages": [{"role": "user", "content": "the"}], "max_tokens": 4})
        children = Family(server)
        for module in ("router.grammar.worker", "router.template.worker"):
            assert [process.cwd() for process in children.find("-m", module)] == ["/"]
        assert not (model / "ran").exists(), (model / "ran").read_text()
