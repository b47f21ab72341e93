"""The syntax of `--lora-adapters`, TGI's and ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from wire.adapters import AdapterSource, adapter_sources


def read(value: str | None) -> list[AdapterSource]:
    return adapter_sources(value, ValueError, taken=("served",))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, []),
        (" , ,", []),
        ("org/a", [AdapterSource("org/a", "org/a")]),
        (" org/a@v2 , b=/x/y ", [AdapterSource("org/a", "org/a", "v2"), AdapterSource("b", "/x/y")]),
        ("mine=org/a@v2", [AdapterSource("mine", "org/a", "v2")]),
        ("b=./y@main", [AdapterSource("b", "./y", "main")]),
        ("/x/poems,../prose", [AdapterSource("poems", "/x/poems"), AdapterSource("prose", "../prose")]),
    ],
)
def test_entries(value: str | None, expected: list[AdapterSource]) -> None:
    assert read(value) == expected


def test_a_folder_is_named_by_its_last_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub" / "poems").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    (source,) = read("sub/poems")
    assert source.is_folder and source.name == "poems"
    assert not read("sub/others")[0].is_folder


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a=b=c", "Invalid LoRA adapter format: a=b=c"),
        ("a@b@c", "Invalid LoRA adapter format: a@b@c"),
        ("=x", "Invalid LoRA adapter format: =x"),
        ("a=", "Invalid LoRA adapter format: a="),
        ("a@", "Invalid LoRA adapter format: a@"),
        ("tgi=/x", "LoRA adapter name `tgi` is a name of the base model"),
        ("served=/x", "LoRA adapter name `served` is a name of the base model"),
        ("a=/x,a=/y", "LoRA adapter name `a` is given twice"),
        ("a/../b=/x", "LoRA adapter name `a/../b`: 1 to 200 letters"),
        ("/a=/x", "LoRA adapter name `/a`: 1 to 200 letters"),
        ("a b=/x", "LoRA adapter name `a b`: 1 to 200 letters"),
        ("a" * 201 + "=/x", "LoRA adapter name `aaa"),
    ],
)
def test_refusals(value: str, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        read(value)
    assert str(caught.value).startswith(text)
