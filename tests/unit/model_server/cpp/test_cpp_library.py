"""How the C++ operators are loaded, and that the server does without."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from support.linears import make_linear

from model_server.cpp import instruction_sets
from model_server.cpp import library as loading
from model_server.cpp.config import CAP, SWITCH
from model_server.cpp.greedy import greedy
from model_server.cpp.instruction_sets import Survey
from model_server.errors import StartupError
from model_server.layers.fused.choice import fused_for
from model_server.layers.fused.torch import TorchFused
from model_server.layers.linear.packed import PackedLinear

CPU = torch.device("cpu")
HAS_OPERATORS = loading.library() is not None


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process."""
    fresh = loading.library.__wrapped__
    monkeypatch.setattr(loading, "library", lambda: fresh())


def found(monkeypatch: pytest.MonkeyPatch, chosen: str | None, *faults: str) -> None:
    monkeypatch.setattr(loading, "survey", lambda cap: Survey((), (), chosen, faults))


@pytest.mark.usefixtures("unloaded")
def test_where_none_were_built_torch_computes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(instruction_sets, "is_served", lambda: True)
    found(monkeypatch, None)
    assert not loading.usable(CPU, torch.float32)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "none were built: install g++" in record.getMessage()
    weight, x = torch.randn(64, 32), torch.randn(5, 32)
    linear = make_linear(weight)
    assert not isinstance(linear, PackedLinear)
    torch.testing.assert_close(linear(x), x @ weight.T)
    assert type(fused_for(CPU, torch.float32)) is TorchFused


@pytest.mark.usefixtures("unloaded")
def test_on_another_architecture_torch_computes_and_that_is_no_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(instruction_sets.platform, "machine", lambda: "aarch64")
    found(monkeypatch, None)
    with caplog.at_level("INFO"):
        assert not loading.usable(CPU, torch.float32)
    (record,) = caplog.records
    assert (
        record.levelname == "INFO" and "they are for Linux on x86-64, this is linux on aarch64" in record.getMessage()
    )


@pytest.mark.skipif(not HAS_OPERATORS, reason="needs the C++ operators")
@pytest.mark.usefixtures("unloaded")
def test_a_better_set_that_cannot_be_used_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found(monkeypatch, "avx2", "avx512 was built from other sources")
    with caplog.at_level("INFO"):
        assert loading.usable(CPU, torch.float32)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "avx512 was built from other sources" in caplog.text
    assert "C++ operators for avx2" in caplog.text


@pytest.mark.usefixtures("unloaded")
def test_an_instruction_set_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CAP, "avx1024")
    with pytest.raises(StartupError, match="TERCET_INSTRUCTION_SET=avx1024 is unknown; choose one of amx, avx512_bf16"):
        loading.usable(CPU, torch.float32)


@pytest.mark.usefixtures("unloaded")
def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    assert not loading.usable(CPU, torch.float32)


def test_other_types_and_devices_are_not_served() -> None:
    assert not loading.usable(CPU, torch.float16)
    assert not loading.usable(torch.device("cuda"), torch.bfloat16)


def test_torch_and_the_operators_share_their_threads() -> None:
    """A second OpenMP runtime would bring a second set of threads."""
    code = (
        "import torch; from model_server.layers.linear.factory import LinearFactory; torch.set_num_threads(2)\n"
        "from model_server.quantization.forms import Plain\n"
        "linear = LinearFactory(torch.device('cpu'), torch.float32).make(Plain(torch.randn(512, 512)))\n"
        "linear(torch.randn(64, 512)); torch.randn(512, 512) @ torch.randn(512, 512)\n"
        "paths = {l.split()[-1] for l in open('/proc/self/maps') if '.so' in l}\n"
        "import os\n"
        "print(len({p for p in paths if os.path.basename(p).startswith(('libgomp', 'libomp', 'libiomp'))}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120, env=os.environ.copy()
    )
    assert done.stdout.strip() == "1"


@pytest.mark.skipif(not HAS_OPERATORS, reason="needs the C++ operators")
def test_what_does_not_fit_is_refused_as_torch_does() -> None:
    """Behind an address nobody looks at sizes."""
    linear = make_linear(torch.randn(64, 32))
    assert isinstance(linear, PackedLinear)
    with pytest.raises(RuntimeError, match=r"a product of \[5, 16\] torch.float32 with a matrix of 32 inputs"):
        linear(torch.randn(5, 16))
    with pytest.raises(RuntimeError, match=r"torch.bfloat16 with a matrix of 32 inputs, torch.float32"):
        linear(torch.randn(5, 32, dtype=torch.bfloat16))
    norm = fused_for(CPU, torch.float32).rms_norm(torch.ones(32), 1e-5)
    with pytest.raises(RuntimeError, match=r"a norm of width 32 over \[5, 40\]"):
        norm(torch.randn(5, 40))


@pytest.mark.skipif(not HAS_OPERATORS, reason="needs the C++ operators")
def test_another_default_type_changes_nothing() -> None:
    """A model's own code may have set one."""
    logits = torch.randn(3, 500)
    expected = [part.clone() for part in greedy(logits)]
    torch.set_default_dtype(torch.bfloat16)
    try:
        ids, peaks, totals = greedy(logits)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(ids, expected[0]) and torch.equal(peaks, expected[1]) and torch.equal(totals, expected[2])


SHORT_OF_MEMORY = """
import ctypes, resource, sys
import torch
from model_server.cpp.library import prepared
from model_server.cpp.structs import AttentionShapeStruct, PagingStruct

torch.set_num_threads(2)
operators = prepared()
wide = 2**22
shape = AttentionShapeStruct(1, 1, wide, wide, wide, 2 * wide, 0, 0, 1.0, 0.0, None, None)
cache, query, out = torch.ones(2, 2 * wide), torch.ones(2, wide), torch.zeros(1, wide)
table = torch.zeros(1, 1, dtype=torch.int32)

def attend(queries):
    lengths, starts = torch.tensor([2], dtype=torch.int32), torch.tensor([0, queries], dtype=torch.int32)
    paging = PagingStruct(table.data_ptr(), lengths.data_ptr(), starts.data_ptr(), 1, 1, 16)
    operators.cpp_attend(0, shape, paging, cache.data_ptr(), query.data_ptr(), wide, out.data_ptr())

def used():
    return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()

(torch.ones(1000, 1000) @ torch.ones(1000, 1000)).sum()  # the threads are there
hard = resource.getrlimit(resource.RLIMIT_AS)[1]
for queries in (2, 1):  # a prompt, a single token
    resource.setrlimit(resource.RLIMIT_AS, (used() + 2**23, hard))
    try:
        attend(queries)
    except MemoryError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
attend(1)
print(out.unique().tolist())
"""


@pytest.mark.skipif(not HAS_OPERATORS, reason="needs the C++ operators")
def test_an_operator_without_memory_for_its_scratch_raises_and_the_next_call_is_served() -> None:
    ended = subprocess.run([sys.executable, "-c", SHORT_OF_MEMORY], capture_output=True, text=True, timeout=300)
    message = "a C++ operator found no memory for its scratch"
    assert ended.stdout.splitlines() == [message, message, "[1.0]"], ended.stderr
