"""`org/repo-GGUF:Q4_K_M` against folders, a hub cache and a hub on this machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.hub_server import HubServer

from launcher.errors import ArgumentValidation
from launcher.planning.gguf_choice import quantization_in, with_chosen_file

NAMES = [
    "model-Q4_K_M.gguf", "model-Q4_K_S.gguf", "model.Q8_0.gguf", "bf16/model-BF16.gguf", "mmproj-model-F16.gguf",
    "big-Q6_K-00001-of-00002.gguf", "big-Q6_K-00002-of-00002.gguf", "README.md", "model-UD-IQ2_XXS.gguf",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in NAMES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("quantization", "file"),
    [
        ("Q4_K_M", "model-Q4_K_M.gguf"), ("q4_k_m", "model-Q4_K_M.gguf"), ("Q8_0", "model.Q8_0.gguf"),
        ("bf16", "bf16/model-BF16.gguf"), ("IQ2_XXS", "model-UD-IQ2_XXS.gguf"),
    ],
)  # fmt: skip
def test_a_file_of_a_folder(folder: Path, quantization: str, file: str) -> None:
    assert with_chosen_file(f"{folder}:{quantization}", None, {}) == f"{folder}/{file}"


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ("Q5_K_M", r"has no GGUF file of Q5_K_M \(there are BF16, Q6_K, Q4_K_M, Q4_K_S, IQ2_XXS, Q8_0\)"),
        ("F16", "has no GGUF file of F16"),  # that of a tower is no model
    ],
)
def test_no_file_of_a_folder(folder: Path, quantization: str, message: str) -> None:
    with pytest.raises(ArgumentValidation, match=message):
        with_chosen_file(f"{folder}:{quantization}", None, {})


@pytest.mark.parametrize("model_id", ["demo", "org/model", "org/model/x-Q4_0.gguf", "/no/such:Q4_0", "a/b/c:Q4_0"])
def test_other_model_ids_stay_as_they_are(model_id: str) -> None:
    assert with_chosen_file(model_id, None, {}) == model_id


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("https://hub.example/org/name/tree/main", "org/name"), ("hf.co/org/name:Q4_K_M", "org/name:Q4_K_M"),
        ("hf://org/name", "org/name"), ("www.huggingface.co/org/name?x=1", "org/name"),
        ("https://hub.example/org/name/resolve/main/a/b-Q4_0.gguf?download=true", "org/name/a/b-Q4_0.gguf"),
        ("https://hub.example/org/name/blob/v2/b.gguf", "org/name/b.gguf with --revision v2"),
    ],
)  # fmt: skip
def test_an_address_is_no_id(given: str, meant: str) -> None:
    with pytest.raises(ArgumentValidation, match=f"is an address, and no id of a model: give {re.escape(meant)}$"):
        with_chosen_file(given, None, {})


@pytest.mark.parametrize("model_id", ["org/name ", "org/name\r", '"org/name"', "'org/name'"])
def test_what_is_around_a_name_is_no_part_of_it(model_id: str) -> None:
    with pytest.raises(ArgumentValidation, match=r"has spaces or quotes at its ends: give org/name$"):
        with_chosen_file(model_id, None, {})


def test_a_folder_may_have_a_space_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "model ").mkdir()
    assert with_chosen_file(f"{tmp_path}/model ", None, {}) == f"{tmp_path}/model "


@pytest.mark.parametrize("model_id", ["llama3.2:3b", "qwen3:latest"])
def test_names_of_ollama(model_id: str) -> None:
    with pytest.raises(ArgumentValidation, match=r"a name of ollama's library, .* give a model of the hub"):
        with_chosen_file(model_id, None, {})


def test_a_folder_whose_name_has_a_colon(tmp_path: Path) -> None:
    (tmp_path / "model:Q4_0").mkdir()
    assert with_chosen_file(f"{tmp_path}/model:Q4_0", None, {}) == f"{tmp_path}/model:Q4_0"


@pytest.mark.parametrize("name", ["model.gguf", "mmproj-F16.gguf", "Q4_0.safetensors", "model-Q4_K_M-v2.gguf"])
def test_names_without_a_quantization(name: str) -> None:
    assert quantization_in(name) is None


def test_a_repository_that_is_here_is_not_asked_for(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--model-GGUF"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots" / "abc").mkdir(parents=True)
    (repository / "snapshots" / "abc" / "m-Q4_0.gguf").touch()
    environ = {"HF_HUB_CACHE": str(tmp_path), "HF_ENDPOINT": "no URL"}
    assert with_chosen_file("org/model-GGUF:Q4_0", None, environ) == "org/model-GGUF/m-Q4_0.gguf"
    with pytest.raises(ArgumentValidation, match="HF_ENDPOINT"):
        with_chosen_file("org/model-GGUF:Q8_0", None, environ)


def test_estimate_serve_and_pull_ask_the_hub(tmp_path: Path) -> None:
    said = []
    with HubServer() as hub:
        hub.add("org/model-GGUF", {"m-Q4_0.gguf": b"GGUF", "m-Q8_0.gguf": b"GGUF"})
        environ = {**os.environ, **hub.environment(tmp_path)}
        for words in (["estimate"], ["pull"], ["serve", "--port", "0"]):
            done = subprocess.run(
                [sys.executable, "-m", "launcher", *words, "org/model-GGUF:Q5_K_M"], env=environ, timeout=60,
                capture_output=True, text=True,
            )  # fmt: skip
            assert done.returncode == 1
            said.append(done.stderr)
    for text in said:
        assert "org/model-GGUF has no GGUF file of Q5_K_M (there are Q4_0, Q8_0)" in text
