"""How the C++ operators come to be, and that the server does without."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.linears import make_linear

from model_server.cpp import compile as compiling
from model_server.cpp import library as loading
from model_server.cpp.compile import CompileError, compiled
from model_server.cpp.config import SWITCH
from model_server.cpp.greedy import greedy
from model_server.layers.fused.choice import fused_for
from model_server.layers.fused.torch import TorchFused
from model_server.layers.linear.packed import PackedLinear

CPU = torch.device("cpu")
HAS_COMPILER = any(shutil.which(name) for name in compiling.COMPILERS)


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process."""
    fresh = loading.library.__wrapped__
    monkeypatch.setattr(loading, "library", lambda: fresh())


@pytest.mark.usefixtures("unloaded")
def test_without_a_compiler_torch_computes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(compiling, "COMPILERS", ("no-such-compiler",))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nor is there a library that was made ahead
    assert not loading.usable(CPU, torch.float32)
    assert "no C++ compiler is installed (looked for no-such-compiler)" in caplog.text
    weight, x = torch.randn(64, 32), torch.randn(5, 32)
    linear = make_linear(weight)
    assert not isinstance(linear, PackedLinear)
    torch.testing.assert_close(linear(x), x @ weight.T)
    assert type(fused_for(CPU, torch.float32)) is TorchFused


@pytest.mark.usefixtures("unloaded")
def test_a_user_without_a_home_is_served_by_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(compiling.Path, "home", no_home)
    assert not loading.usable(CPU, torch.float32)
    assert "set HOME or XDG_CACHE_HOME" in caplog.text


@pytest.mark.usefixtures("unloaded")
def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    assert not loading.usable(CPU, torch.float32)


def test_other_types_and_devices_are_not_served() -> None:
    assert not loading.usable(CPU, torch.float16)
    assert not loading.usable(torch.device("cuda"), torch.bfloat16)


def small_source(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    (folder / compiling.MAIN).write_text(text)
    monkeypatch.setattr(compiling, "SOURCES", folder)


def test_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_source(tmp_path / "source", 'extern "C" int answer() { return 42; }\n', monkeypatch)
    cache = tmp_path / "cache"
    if not HAS_COMPILER:
        with pytest.raises(CompileError, match="no C\\+\\+ compiler"):
            compiled(cache)
        return
    first = compiled(cache)
    made = first.stat().st_mtime_ns
    assert compiled(cache) == first
    assert first.stat().st_mtime_ns == made
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    (tmp_path / "source" / compiling.MAIN).write_text('extern "C" int answer() { return 43; }\n')
    assert compiled(cache) != first


@pytest.mark.skipif(not HAS_COMPILER, reason="needs a C++ compiler")
def test_a_library_made_ahead_serves_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an image that compiles while it is built and leaves the compiler out."""
    small_source(tmp_path / "source", 'extern "C" int answer() { return 42; }\n', monkeypatch)
    made = compiled(tmp_path / "cache")
    monkeypatch.setattr(compiling, "COMPILERS", ("no-such-compiler",))
    assert compiled(tmp_path / "cache") == made
    with pytest.raises(CompileError, match=r"no C\+\+ compiler is installed"):
        compiled(tmp_path / "another-cache")
    # What was made of other sources is not this library.
    (tmp_path / "source" / compiling.MAIN).write_text('extern "C" int answer() { return 43; }\n')
    with pytest.raises(CompileError, match=r"no C\+\+ compiler is installed"):
        compiled(tmp_path / "cache")


def fake_compiler(folder: Path, version: str) -> str:
    """Writes its version where the library should go."""
    tool = folder / "fake-c++"
    tool.write_text(
        "#!/bin/sh\n"
        f'if [ "$1" = --version ]; then echo "{version}"; exit; fi\n'
        'while [ "$1" != -o ]; do shift; done\n'
        f'echo "{version}" > "$2"\n'
    )
    tool.chmod(0o700)
    return str(tool)


def test_another_compiler_makes_it_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_source(tmp_path / "source", "", monkeypatch)
    cache = tmp_path / "cache"
    monkeypatch.setattr(compiling, "COMPILERS", (fake_compiler(tmp_path, "one 1.0"),))
    first = compiled(cache)
    assert first.read_text() == "one 1.0\n"
    fake_compiler(tmp_path, "one 2.0")
    second = compiled(cache)
    assert second != first and second.read_text() == "one 2.0\n"
    assert first.exists()
    monkeypatch.setattr(compiling, "COMPILERS", ("no-such-compiler",))
    os.utime(first, ns=(1, 1))
    assert compiled(cache) == second


def test_sources_that_do_not_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_source(tmp_path / "source", "this is no C++\n", monkeypatch)
    with pytest.raises(CompileError, match="failed" if HAS_COMPILER else "no C\\+\\+ compiler"):
        compiled(tmp_path / "cache")
    left = [path.name for path in (tmp_path / "cache").glob("*")] if HAS_COMPILER else []
    assert left in ([], ["compile.lock"])


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(CompileError, match="nobody else can write to"):
        compiled(tmp_path)


def test_a_link_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(CompileError):
        compiled(tmp_path / "link")


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


@pytest.mark.skipif(not HAS_COMPILER, reason="needs a compiler")
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


@pytest.mark.skipif(not HAS_COMPILER, reason="needs a compiler")
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


@pytest.mark.skipif(not HAS_COMPILER, reason="needs a C++ compiler")
def test_an_operator_without_memory_for_its_scratch_raises_and_the_next_call_is_served() -> None:
    ended = subprocess.run([sys.executable, "-c", SHORT_OF_MEMORY], capture_output=True, text=True, timeout=300)
    message = "a C++ operator found no memory for its scratch"
    assert ended.stdout.splitlines() == [message, message, "[1.0]"], ended.stderr
