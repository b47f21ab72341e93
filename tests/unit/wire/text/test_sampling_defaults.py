"""What a file and an option say of sampling, and what is refused in them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from wire.text.sampling_defaults import FIELDS, sampling_defaults

ALL = {
    "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05,
    "presence_penalty": 0.5, "frequency_penalty": -0.5,
}  # fmt: skip


def folder_with(folder: Path, **values: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def read(folder: Path | None, source: str = "auto", override: dict[str, Any] | str | None = None) -> dict[str, float]:
    text = json.dumps(override) if isinstance(override, dict) else override
    return sampling_defaults(source, text, folder, ValueError)


def test_every_field_is_read_and_nothing_else(tmp_path: Path) -> None:
    assert ALL.keys() == FIELDS.keys()
    folder = folder_with(tmp_path, **ALL, do_sample=True, max_new_tokens=9, eos_token_id=2, max_length=20)
    assert read(folder) == ALL
    assert read(folder, "none") == {}
    assert read(tmp_path / "without") == {}
    assert read(folder_with(tmp_path, temperature=None, top_k=None)) == {}


def test_a_folder_instead_of_the_model_s(tmp_path: Path) -> None:
    own, other = folder_with(tmp_path / "own", top_k=5), folder_with(tmp_path / "other", top_p=0.5)
    assert read(own, str(other)) == {"top_p": 0.5}
    for wrong in (str(tmp_path / "nowhere"), str(other / "generation_config.json")):
        with pytest.raises(ValueError, match=r"must be auto, none or a folder with a generation_config\.json"):
            read(own, wrong)
    with pytest.raises(ValueError, match=r"cannot read .*generation_config\.json"):
        read(own, str(tmp_path))


def test_the_override_wins_field_by_field(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, **ALL)
    assert read(folder, override={"temperature": 1, "top_k": None}) == {
        name: value for name, value in (ALL | {"temperature": 1.0}).items() if name != "top_k"
    }
    assert read(folder, "none", {"min_p": 0.1}) == {"min_p": 0.1}
    for wrong in ("no", "3", '["a"]', "[" * 100_000):
        with pytest.raises(ValueError, match="`--override-generation-config` must be a JSON object, such as"):
            read(folder, override=wrong)
    with pytest.raises(ValueError, match="max_new_tokens is unknown; it takes temperature, top_p"):
        read(folder, override={"max_new_tokens": 5})


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("temperature", -0.1), ("temperature", "0.6"), ("temperature", True), ("temperature", 1e39),
        ("temperature", float("nan")), ("top_p", 1.5), ("top_p", -1), ("top_k", 2.5), ("top_k", -2), ("top_k", 2**32),
        ("top_k", [1]), ("min_p", 1.1), ("repetition_penalty", 0), ("repetition_penalty", 1e-60),
        ("presence_penalty", 3), ("frequency_penalty", -2.1),
    ],
)  # fmt: skip
def test_a_value_that_is_not_allowed_ends_the_start(tmp_path: Path, field: str, wrong: Any) -> None:
    with pytest.raises(ValueError, match=rf"generation_config\.json: `{field}` must be .*given .*none`$"):
        read(folder_with(tmp_path, **{field: wrong}))
    assert read(tmp_path, "none") == {}, "which is what the message says to do"
    with pytest.raises(ValueError, match=rf"^`--override-generation-config`: `{field}` must be"):
        read(None, override={field: wrong})


@pytest.mark.parametrize(
    ("field", "value", "means"),
    [("top_k", -1, 0), ("top_k", 0, 0), ("top_k", 50.0, 50), ("temperature", 0, 0.0), ("temperature", 1e-60, 0.0)],
)
def test_values_that_switch_off(tmp_path: Path, field: str, value: Any, means: float) -> None:
    found = read(folder_with(tmp_path, **{field: value}))
    assert found == {field: means} and type(found[field]) is type(means)


def test_what_no_route_has_as_a_default_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        read(folder_with(tmp_path, typical_p=1.0, no_repeat_ngram_size=0, bad_words_ids=None))
        assert not caplog.records
        read(folder_with(tmp_path, typical_p=0.9, no_repeat_ngram_size=3, temperature=1.0))
    assert "typical_p, no_repeat_ngram_size: not applied" in caplog.text
