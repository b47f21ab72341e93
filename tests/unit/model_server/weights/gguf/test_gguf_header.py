"""The header of a GGUF file: read as its own library reads it, and refused where its claims do not fit the file."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy
import pytest

from model_server.errors import StartupError
from model_server.weights.gguf.header import read_gguf

KEY, NUMBER, TENSOR = b"general.x", 4, b"w"


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def entry(name: bytes = TENSOR, shape: tuple[int, ...] = (32, 2), kind: int = 8, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def header(
    values: bytes = b"", num_values: int = 0, entries: bytes = entry(), num_tensors: int = 1, version: int = 3
) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_values) + values + entries


def write(path: Path, content: bytes, data: bytes = bytes(68)) -> Path:
    path.write_bytes(content + bytes(-len(content) % 32) + data)
    return path


FAULTS: dict[str, tuple[bytes, str]] = {
    "not a GGUF file": (b"PK00" + bytes(60), "is not a GGUF file"),
    "cut in the counts": (b"GGUF\x03\0\0\0", "Q"),
    "version 1": (header(version=1), "is of GGUF version 1; 2 and 3 are served"),
    "big-endian": (header(version=3 << 24), "is big-endian, which is not served"),
    "many tensors": (header(num_tensors=2**60), "claims 1152921504606846976 tensors"),
    "long key": (header(struct.pack("<Q", 2**63) + bytes(64), 1), "claims a name of 9223372036854775808 bytes"),
    "long string": (header(text(KEY) + struct.pack("<IQ", 8, 2**27), 1), "claims 134217728 bytes"),
    "long array": (header(text(KEY) + struct.pack("<IIQ", 9, NUMBER, 2**62), 1), "claims an array of"),
    "array past the end": (header(text(KEY) + struct.pack("<IIQ", 9, NUMBER, 2**20), 1), "claims 4194304 bytes"),
    "array of arrays": (header(text(KEY) + struct.pack("<IIQ", 9, 9, 1), 1), "an array of the unknown type 9"),
    "unknown kind": (header(text(KEY) + struct.pack("<I", 99), 1), "metadata of the unknown type 99"),
    "key twice": (header(2 * (text(KEY) + struct.pack("<II", 4, 1)), 2), "names 'general.x' twice"),
    "alignment": (header(text(b"general.alignment") + struct.pack("<II", 4, 0), 1), "the alignment is 0"),
    "dimensions": (header(entries=entry(shape=(32, 1, 1, 1, 1))), "has 5 dimensions"),
    "empty shape": (header(entries=entry(shape=(32, 0))), "impossible shape [0, 32]"),
    "type": (header(entries=entry(kind=40)), "stores w as NVFP4, which is not served; served are F32, F16, BF16, Q4_0"),
    "unknown type": (header(entries=entry(kind=77)), "stores w as type 77, which is not served"),
    "broken block": (header(entries=entry(shape=(33, 2))), "has rows of 33 numbers in blocks of 32"),
    "misaligned": (header(entries=entry(offset=8)), "is not aligned to 32 bytes"),
    "past the end": (header(entries=entry(shape=(32, 3))), "ends at byte"),
    "far past the end": (header(entries=entry(offset=2**63)), "ends at byte"),
    "tensor twice": (header(entries=2 * entry(), num_tensors=2), "names tensor 'w' twice"),
    "overlap": (header(entries=entry() + entry(b"v"), num_tensors=2), "overlaps another"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_lying_header_is_refused_in_one_line(tmp_path: Path, fault: str) -> None:
    content, message = FAULTS[fault]
    path = write(tmp_path / "a.gguf", content)
    if fault == "cut in the counts":
        path.write_bytes(content)
        message = "claims 8 bytes at 8, where 0 are left"
    with pytest.raises(StartupError) as caught:
        read_gguf(path)
    assert message in str(caught.value) and str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_any_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "a.gguf", header(text(KEY) + struct.pack("<II", 4, 1), 1)).read_bytes()
    path = tmp_path / "cut.gguf"
    for length in range(0, len(whole), 3):
        path.write_bytes(whole[:length])
        with pytest.raises(StartupError):
            read_gguf(path)


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(3)
    writer.add_token_list(["a", "ü", "<|x|>"])
    writer.add_token_scores([0.0, -1.5, 2.0])
    writer.add_add_bos_token(False)
    writer.add_tensor("blk.0.attn_q.weight", gguf.quants.quantize(numpy.ones((4, 64)), gguf.GGMLQuantizationType.Q8_0),
                      raw_dtype=gguf.GGMLQuantizationType.Q8_0)  # fmt: skip
    writer.add_tensor("output_norm.weight", numpy.arange(5, dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_gguf(path)
    assert found.metadata["general.architecture"] == "llama"
    assert found.metadata["llama.block_count"] == 3
    assert found.metadata["tokenizer.ggml.tokens"] == ["a", "ü", "<|x|>"]
    assert found.metadata["tokenizer.ggml.scores"] == [0.0, -1.5, 2.0]
    assert found.metadata["tokenizer.ggml.add_bos_token"] is False
    reference = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert found.tensors.keys() == reference.keys()
    for name, stored in found.tensors.items():
        assert stored.dtype == reference[name].tensor_type.name
        assert stored.shape == tuple(int(size) for size in reversed(reference[name].shape))
        assert (stored.begin, stored.end - stored.begin) == (reference[name].data_offset, reference[name].n_bytes)
