"""Lazy reads by rows and columns, and one line for whatever may be wrong with a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from model_server.errors import StartupError
from model_server.weights.header import read_headers
from model_server.weights.reader import SafetensorsReader

CPU = torch.device("cpu")
MATRIX = torch.arange(24, dtype=torch.float32).view(6, 4)


def reader(*files: Path, dtype: torch.dtype = torch.float32) -> SafetensorsReader:
    return SafetensorsReader(read_headers(files), dtype=dtype, device=CPU)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """The matrix in one file, a vector and an integer tensor in another."""
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file({"model.matrix": MATRIX}, first)
    save_file({"vector": torch.arange(6, dtype=torch.bfloat16), "packed": torch.zeros(2, dtype=torch.int32)}, second)
    return first, second


def test_rows_and_columns(files: tuple[Path, Path]) -> None:
    with reader(*files) as r:
        assert r.shape("model.matrix") == (6, 4)
        assert torch.equal(r.rows("model.matrix", [(1, 3)]), MATRIX[1:3])
        assert torch.equal(r.rows("model.matrix", [(4, 6), (0, 1)]), MATRIX[[4, 5, 0]])
        columns = torch.empty(6, 2)
        r.fill(columns, "model.matrix", [(0, 6)], (1, 3))
        assert torch.equal(columns, MATRIX[:, 1:3])
        assert torch.equal(r.rows("vector", [(2, 4)]), torch.tensor([2.0, 3.0]))


def test_values_are_cast_and_owned(files: tuple[Path, Path]) -> None:
    with reader(*files, dtype=torch.bfloat16) as r:
        assert r.rows("model.matrix", [(0, 6)]).dtype == torch.bfloat16
    with reader(*files) as r:
        r.rows("model.matrix", [(0, 6)]).zero_()  # must not write into the mapped file
        assert torch.equal(r.rows("model.matrix", [(0, 6)]), MATRIX)


def test_into_host_memory_from_then_on(files: tuple[Path, Path]) -> None:
    with SafetensorsReader(read_headers(files), dtype=torch.float32, device=torch.device("meta")) as r:
        assert r.rows("vector", [(2, 4)]).is_meta
        r.read_to_host()
        assert r.device == CPU
        assert torch.equal(r.rows("vector", [(2, 4)]), torch.tensor([2.0, 3.0]))


def test_names_with_and_without_the_base_prefix(files: tuple[Path, Path]) -> None:
    with reader(*files) as r:
        assert r.has("matrix")
        assert torch.equal(r.rows("matrix", [(0, 1)]), MATRIX[:1])
        assert r.has("model.vector")
        assert not r.has("other")


def test_missing_tensor(files: tuple[Path, Path]) -> None:
    with reader(*files) as r, pytest.raises(StartupError, match=r"^weight model\.norm does not exist$"):
        r.rows("model.norm", [(0, 1)])


def test_same_name_in_two_files(tmp_path: Path, files: tuple[Path, Path]) -> None:
    other = tmp_path / "c.safetensors"
    save_file({"vector": torch.zeros(1)}, other)
    with pytest.raises(
        StartupError, match=r"^Key vector was found in multiple files: c.safetensors and b.safetensors$"
    ):
        reader(*files, other)


def test_integers_are_refused(files: tuple[Path, Path]) -> None:
    with (
        reader(*files) as r,
        pytest.raises(StartupError, match=r"packed is stored as I32, in no format that this version serves$"),
    ):
        r.rows("packed", [(0, 2)])


def test_codes_are_read_as_they_are_stored(tmp_path: Path) -> None:
    codes = torch.arange(12, dtype=torch.int32).view(3, 4)
    save_file({"codes": codes, "scale": torch.tensor(0.5, dtype=torch.float16)}, tmp_path / "a.safetensors")
    with reader(tmp_path / "a.safetensors") as r:
        assert (r.stored("codes"), r.stored("scale")) == ("I32", "F16")
        for wanted, got in (
            (codes, r.raw("codes")),
            (codes[1:3], r.raw("codes", (1, 3))),
            (codes[0:2, 1:4], r.raw("codes", (0, 2), (1, 4))),
            (torch.tensor(0.5, dtype=torch.float16), r.raw("scale")),
        ):
            assert got.dtype == wanted.dtype and torch.equal(got, wanted)
            got.zero_()  # must not write into the mapped file
        assert torch.equal(r.raw("codes"), codes)
        with pytest.raises(StartupError, match=r"codes has shape \[3, 4\]; the config asks for 4 rows"):
            r.raw("codes", (0, 4))


def test_too_small(files: tuple[Path, Path]) -> None:
    with reader(*files) as r:
        with pytest.raises(StartupError, match=r"matrix has shape \[6, 4\]; the config asks for 7 rows"):
            r.rows("matrix", [(0, 7)])
        with pytest.raises(StartupError, match=r"matrix has shape \[6, 4\]; the config asks for \[6, 5\] at least"):
            r.fill(torch.empty(6, 5), "matrix", [(0, 6)], (0, 5))
        with pytest.raises(StartupError, match=r"vector has shape \[6\]; the config asks for \[6, 1\] at least"):
            r.fill(torch.empty(6, 1), "vector", [(0, 6)], (0, 1))


DAMAGE = {
    "empty": lambda data: b"",
    "cut in the header": lambda data: data[:20],
    "cut in the data": lambda data: data[:-1],
    "header length absurd": lambda data: b"\xff" * 8 + data[8:],
    "header length too small": lambda data: (3).to_bytes(8, "little") + data[8:],
    "header not JSON": lambda data: data[:8] + b"[" + data[9:],
    "offsets swapped": lambda data: data.replace(b"[0,96]", b"[96,0]"),
    "offsets beyond the end": lambda data: data.replace(b"[0,96]", b"[0,99]"),
    "shape does not fit": lambda data: data.replace(b"[6,4]", b"[6,5]"),
    "negative shape": lambda data: data.replace(b"[6,4]", b"[6,-4]".ljust(5)),
    "unknown dtype": lambda data: data.replace(b'"F32"', b'"F33"'),
    "a web page": lambda data: b"<!DOCTYPE html><html><body>Not found</body></html>",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_file(tmp_path: Path, files: tuple[Path, Path], damage: object) -> None:
    assert callable(damage)
    path = tmp_path / "bad.safetensors"
    data = files[0].read_bytes()
    changed = damage(data)
    assert changed != data
    path.write_bytes(changed)
    with pytest.raises(StartupError) as caught:
        reader(path)
    message = str(caught.value)
    assert message.startswith(f"{path} is damaged or incomplete: ")
    assert "\n" not in message


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"^cannot read .*absent\.safetensors: No such file"):
        reader(tmp_path / "absent.safetensors")


def test_parts_of_a_stack_of_matrices(tmp_path: Path) -> None:
    stack = torch.arange(24, dtype=torch.float32).view(2, 3, 4)
    save_file({"stack": stack}, tmp_path / "a.safetensors")
    with reader(tmp_path / "a.safetensors") as r:
        out = torch.empty(2, 2)
        r.fill(out, "stack", [(1, 3)], (2, 4), index=1)
        assert torch.equal(out, stack[1, 1:3, 2:4])
        r.fill(out.t(), "stack", [(0, 1), (2, 3)], (0, 2), index=0)
        assert torch.equal(out.t(), stack[0, [0, 2], 0:2])
        with pytest.raises(StartupError, match=r"^weight stack has shape \[2, 3, 4\]; the config asks for \[3, 3, 4\]"):
            r.fill(torch.empty(3, 4), "stack", [(0, 3)], (0, 4), index=2)


def test_rows_of_another_type(files: tuple[Path, Path]) -> None:
    with reader(*files, dtype=torch.bfloat16) as r:
        assert r.rows("model.matrix", [(0, 1)], torch.float32).dtype == torch.float32


def test_parts_of_a_tensor_are_filled(files: tuple[Path, Path]) -> None:
    """Fused, transposed and reordered matrices: nothing but the given part is written."""
    fused = torch.full((8, 4), -1.0)
    with reader(*files) as r:
        r.fill(fused[1:4], "matrix", [(0, 2), (5, 6)])
        assert torch.equal(fused[1:4], MATRIX[[0, 1, 5]])
        assert (fused[0] == -1).all()
        assert (fused[4:] == -1).all()
        transposed = torch.empty(2, 6, dtype=torch.bfloat16)
        r.fill(transposed.t(), "matrix", [(0, 6)], (1, 3))
        assert torch.equal(transposed.float(), MATRIX[:, 1:3].t())
        with pytest.raises(StartupError, match="asks for 7 rows"):
            r.fill(fused[:1], "matrix", [(6, 7)])


def test_place_gets_whole_units(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces as they go to an accelerator: of two rows each, though a piece has room for three."""
    seen = []

    def swapped(destination: torch.Tensor, source: torch.Tensor) -> None:
        seen.append(len(source))
        destination.copy_(source.flip(0))

    out = torch.empty(6, 4)
    with reader(*files) as r:
        r.fill(out, "matrix", [(0, 6)], place=swapped, unit=2)
        assert seen == [6]
        assert torch.equal(out, MATRIX.flip(0))
        monkeypatch.setattr("model_server.weights.reader.CHUNK_BYTES", 3 * 16)
        monkeypatch.setattr(r, "_device", torch.device("meta"))
        r.fill(out, "matrix", [(0, 6)], place=swapped, unit=2)
    assert seen[1:] == [2, 2, 2]
    assert torch.equal(out, MATRIX[[1, 0, 3, 2, 5, 4]])
