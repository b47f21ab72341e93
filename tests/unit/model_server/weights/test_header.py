"""The header of a safetensors file: what is refused, and that it is refused from the header alone."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from model_server.errors import StartupError
from model_server.weights.header import MAX_HEADER_BYTES, read_header

GOOD = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


def write(path: Path, header: object, data: bytes = bytes(16)) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def with_field(**changes: Any) -> dict[str, Any]:
    return {"a": {**GOOD, **changes}}


def two(first: list[int], second: list[int]) -> dict[str, Any]:
    half = {"dtype": "F32", "shape": [2]}
    return {"a": {**half, "data_offsets": first}, "b": {**half, "data_offsets": second}}


FAULTS: dict[str, tuple[object, str]] = {
    "not JSON": (b"{", "not valid JSON"),
    "a list": ([], "not a JSON object"),
    "deep": (b"[" * 100_000, "not valid JSON"),
    "digits without end": (b'{"a": ' + b"9" * 10_000 + b"}", "not valid JSON"),
    "NaN": (b'{"a": NaN}', "the header holds NaN"),
    "same name twice": (b'{"a": %b, "a": %b}' % ((json.dumps(GOOD).encode(),) * 2), "names 'a' twice"),
    "same field twice": (b'{"a": {"dtype": "F32", "dtype": "F16"}}', "names 'dtype' twice"),
    "entry no object": ({"a": 3}, "something that is not an object"),
    "metadata no texts": ({"__metadata__": {"a": 1}, "a": GOOD}, "metadata"),
    "unknown type": (with_field(dtype="F33"), "unknown type 'F33'"),
    "type no text": (with_field(dtype=["F32"]), "unknown type"),
    "no type": ({"a": {"shape": [4], "data_offsets": [0, 16]}}, "unknown type None"),
    "negative shape": (with_field(shape=[-2, -2]), "impossible shape"),
    "NaN-like shape": (with_field(shape=[4.0]), "impossible shape"),
    "bool shape": (with_field(shape=[True, 4]), "impossible shape"),
    "absurd size": (with_field(shape=[2**63]), "impossible shape"),
    "absurd product": (with_field(shape=[2**40, 2**40]), "does not take 16 bytes"),
    "product that wraps": (with_field(shape=[2**62, 4, 1]), "does not take 16 bytes"),
    "many dimensions": (with_field(shape=[1] * 1000), "impossible shape"),
    "shape does not fit": (with_field(shape=[2, 3]), "does not take 16 bytes"),
    "offsets swapped": (with_field(data_offsets=[16, 0]), "impossible offsets"),
    "offsets negative": (with_field(data_offsets=[-16, 0]), "impossible offsets"),
    "three offsets": (with_field(data_offsets=[0, 8, 16]), "impossible offsets"),
    "beyond the end": (with_field(data_offsets=[0, 32], shape=[2, 4]), "cut short: .* instead of"),
    "hole": (two([0, 8], [12, 20]), "is after a hole"),
    "overlap": (two([0, 8], [4, 12]), "overlaps another"),
    "same place": (two([0, 8], [0, 8]), "overlaps another"),
    "bytes left over": (with_field(data_offsets=[0, 8], shape=[2]), "longer than its tensors"),
}


@pytest.mark.parametrize(("header", "message"), FAULTS.values(), ids=FAULTS)
def test_faults(tmp_path: Path, header: object, message: str) -> None:
    path = write(tmp_path / "bad.safetensors", header)
    with pytest.raises(StartupError, match=message) as caught:
        read_header(path)
    assert str(caught.value).startswith(f"{path} is damaged or incomplete: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_length_that_lies(tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes((2**63).to_bytes(8, "little") + b"{}")
    with pytest.raises(StartupError, match="claims 9223372036854775808 bytes, the file has 10"):
        read_header(path)
    with path.open("wb") as file:
        file.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
        file.truncate(2 * MAX_HEADER_BYTES)
    with pytest.raises(StartupError, match="more than 32 MiB"):
        read_header(path)


@pytest.mark.parametrize("size", [0, 7])
def test_no_header(tmp_path: Path, size: int) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(bytes(size))
    with pytest.raises(StartupError, match=f"a file of {size} bytes has no header"):
        read_header(path)


def test_pipes_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(StartupError, match="not a regular file"):
        read_header(tmp_path / "pipe.safetensors")


def test_what_the_library_writes(tmp_path: Path) -> None:
    tensors = {
        "matrix": torch.zeros(3, 5, dtype=torch.bfloat16),
        "scalar": torch.tensor(1),
        "empty": torch.zeros(0, 4),
        "flags": torch.zeros(3, dtype=torch.bool),
        "codes": torch.zeros(2, 2, dtype=torch.float8_e4m3fn),
    }
    save_file(tensors, tmp_path / "good.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "good.safetensors")
    assert {name: entry.shape for name, entry in header.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    assert header.tensors["matrix"].dtype == "BF16"
    assert header.metadata == {"format": "pt"}
