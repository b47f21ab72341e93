"""Which configs name heads, and which model `--model-id` then means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from wire.speculation.heads import ServedModel, SpeculatorKind, check_length, heads_in, served_model


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"medusa_num_heads": 3, "base_model_name_or_path": "org/base"}, (SpeculatorKind.MEDUSA, "org/base", 3)),
        ({"model_type": "mlp_speculator", "n_predict": 4}, (SpeculatorKind.MLP, None, 4)),
        ({"model_type": "llama", "n_predict": 4}, None),
        ({"model_type": "llama", "base_model_name_or_path": "org/base"}, None),
    ],
)
def test_kinds(fields: dict[str, Any], expected: tuple[SpeculatorKind, str | None, int] | None) -> None:
    found = heads_in(fields, ValueError)
    assert (None if found is None else (found.kind, found.base, found.number)) == expected


def test_lengths() -> None:
    medusa = heads_in({"medusa_num_heads": 3}, ValueError)
    mlp = heads_in({"model_type": "mlp_speculator", "n_predict": 40}, ValueError)
    assert medusa is not None and mlp is not None
    assert [check_length(medusa, asked, ValueError) for asked in (None, 0, 2, 3)] == [3, 0, 2, 3]
    assert check_length(mlp, None, ValueError) == 15
    words = "Speculate is set to `4` but this medusa models only has `3` heads, please make them match"
    with pytest.raises(ValueError, match=f"^{words}$"):
        check_length(medusa, 4, ValueError)
    with pytest.raises(ValueError, match="this mlp_speculator models only has `40` heads"):
        check_length(mlp, 41, ValueError)


def folder(path: Path, **fields: Any) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"medusa_num_heads": 2, **fields}))
    return path


def test_the_base_is_served(tmp_path: Path) -> None:
    heads = folder(tmp_path / "heads", base_model_name_or_path="org/base")
    assert served_model(str(heads), "v2", heads, None, ValueError) == ServedModel("org/base", "main", str(heads))
    assert served_model("org/heads", "v2", heads, None, ValueError) == ServedModel("org/base", "main", "org/heads@v2")
    assert served_model("org/heads", None, heads, None, ValueError) == ServedModel("org/base", "main", "org/heads")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    for found in (tmp_path / "model", tmp_path / "nothing", None):
        assert served_model("org/model", None, found, "org/drafts", ValueError) is None
    with pytest.raises(ValueError, match=r"org/heads holds heads already: .* leave out `--speculator`"):
        served_model("org/heads", None, heads, "org/drafts", ValueError)


@pytest.mark.parametrize(
    "base", ["/etc", "../base", "./base", "~/base", "a/b/c", "org/../base", "", "org/base\n", "-x/y"]
)
def test_what_comes_from_the_hub_names_no_folder(base: str, tmp_path: Path) -> None:
    heads = folder(tmp_path / "heads", base_model_name_or_path=base)
    words = "is not the id of a repository" if base else "names no `base_model_name_or_path`.*--speculator org/heads"
    with pytest.raises(ValueError, match=words):
        served_model("org/heads", None, heads, None, ValueError)


def test_what_comes_from_the_hub_names_no_folder_that_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = folder(tmp_path / "heads", base_model_name_or_path="org/base")
    (tmp_path / "org" / "base").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="'org/base' is not the id of a repository"):
        served_model("org/heads", None, heads, None, ValueError)


def test_a_folder_may_name_a_folder(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    heads = folder(tmp_path / "heads", base_model_name_or_path=str(base))
    assert served_model(str(heads), None, heads, None, ValueError) == ServedModel(str(base), None, str(heads))


@pytest.mark.parametrize("number", [0, -1, "4", True, 5000])
def test_numbers_that_cannot_be(number: Any) -> None:
    with pytest.raises(ValueError, match=r"`medusa_num_heads` is .*; it must be a number of heads"):
        heads_in({"medusa_num_heads": number}, ValueError)
