"""How each server is started on a checkpoint, with all cores and no prefix cache."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.peers.checkpoints import FOLDER, checkpoint
from benchmarks.peers.quantized import BITS, GGUF_TYPES, GROUP, arithmetic, quantize_flag, stored, weights_of
from benchmarks.peers.setup import ROOT

START_LIMIT_S = 300.0
# Room for 32 requests of 512 + 16 tokens, with each server's rounding.
CACHE_TOKENS = 20_480
MAX_LENGTH = 2048


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One server.

    command: argv from what it reads, precision and port; prepare: what it reads, made from a checkpoint once;
    knows_ignore_eos: whether its API takes that field.
    """

    name: str
    api: str
    precisions: tuple[str, ...]
    installed: Callable[[], bool]
    command: Callable[[Path, str, int], list[str]]
    prepare: Callable[[str, str], Path] = lambda shape, precision: checkpoint(shape)
    environ: Callable[[], Mapping[str, str]] = dict
    ready_path: str = "/health"
    knows_ignore_eos: bool = True
    version: Callable[[], str] = lambda: ""


class RunningPeer:
    """A started server; raises RuntimeError with the end of its log if it does not come up."""

    def __init__(self, peer: Peer, shape: str, precision: str, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log = FOLDER.parent / "peers" / f"{peer.name}-{shape}-{precision}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        command = peer.command(peer.prepare(shape, precision), precision, port)
        started = time.perf_counter()
        with self.log.open("wb") as log:
            self.process = psutil.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "HF_HUB_OFFLINE": "1", **peer.environ()},
            )  # fmt: skip
        try:
            self._wait(self.url + peer.ready_path)
        except BaseException:
            self.stop()
            raise
        self.start_s = time.perf_counter() - started

    def cpu_seconds(self) -> float:
        """Of the server and all its children."""
        total = 0.0
        for process in [self.process, *self.process.children(recursive=True)]:
            times = process.cpu_times()
            total += times.user + times.system
        return total

    def stop(self) -> None:
        children: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):  # it may have ended by itself
            children = self.process.children(recursive=True)
            self.process.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs([self.process, *children], timeout=20)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=20)

    def _wait(self, url: str) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                with urllib.request.urlopen(url, timeout=5) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                time.sleep(0.2)
        raise RuntimeError(f"{url} does not answer; the log ends with:\n{self.log.read_text(errors='replace')[-2000:]}")


def _has(name: str, *path: str) -> Callable[[], bool]:
    return lambda: ROOT.joinpath(name, *path).exists()


def _package(environment: str, distribution: str) -> Callable[[], str]:
    def version() -> str:
        code = f"import importlib.metadata as m; print(m.version({distribution!r}))"
        return subprocess.run(
            [str(ROOT / environment / "bin" / "python"), "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()

    return version


def _tercet(model: Path, precision: str, port: int) -> list[str]:
    flag = quantize_flag(precision)
    return [sys.executable, "-m", "launcher", "--model-id", str(model), "--dtype", arithmetic(precision), "--hostname",
            "127.0.0.1", "--port", str(port), "--max-batch-total-tokens", str(CACHE_TOKENS), "--max-total-tokens",
            str(MAX_LENGTH), *(["--quantize", flag] if flag else [])]  # fmt: skip


def tercet_files(shape: str, precision: str) -> Path:
    """The checkpoint, or GGUF file, that Tercet reads a precision of a shape from, made at the first call."""
    return _gguf(shape, precision) if precision in GGUF_TYPES else stored(shape, precision)


def _tercet_version() -> str:
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    return described.stdout.strip()


def _transformers(model: Path, precision: str, port: int) -> list[str]:
    return [str(ROOT / "transformers/bin/transformers"), "serve", str(model), "--host", "127.0.0.1", "--port",
            str(port), "--device", "cpu", "--dtype", precision, "--continuous-batching", "--attn-implementation",
            "sdpa", "--cb-max-memory-percent", "0.15"]  # fmt: skip


def _vllm(model: Path, precision: str, port: int) -> list[str]:
    return [str(ROOT / "vllm/bin/python"), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
            "--served-model-name", "model", "--host", "127.0.0.1", "--port", str(port), "--dtype", precision,
            "--max-model-len", str(MAX_LENGTH), "--no-enable-prefix-caching"]  # fmt: skip


def _vllm_environ() -> dict[str, str]:
    """Bound to every core: left to itself it keeps one of two for its HTTP server."""
    preload = [p for p in (Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4"), ROOT / "vllm/lib/libiomp5.so")
               if p.exists()]  # fmt: skip
    last = len(os.sched_getaffinity(0)) - 1
    return {
        "LD_PRELOAD": ":".join(map(str, preload)),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{last}",
        "VLLM_CPU_KVCACHE_SPACE": "2",
    }


_OPENVINO_WEIGHTS = {"int8": ["int8", "--sym"], "int4": ["int4", "--sym", "--group-size", str(GROUP)]}


def _openvino_model(shape: str, precision: str) -> Path:
    """Exported once, plain weights in half precision; the precision of the arithmetic is chosen when it is loaded.
    Of int4 the head is int8, as it is left by default."""
    kind = weights_of(precision)
    weights = _OPENVINO_WEIGHTS.get(kind, ["fp16"])
    folder = FOLDER / (f"{shape}-openvino-{kind}" if kind in BITS else f"{shape}-openvino")
    if not (folder / "openvino_model.xml").exists():
        _convert(
            [str(ROOT / "openvino/bin/optimum-cli"), "export", "openvino", "-m", str(checkpoint(shape)), "--task",
             "text-generation-with-past", "--weight-format", *weights, str(folder)]
        )  # fmt: skip
    return folder


def _openvino(model: Path, precision: str, port: int) -> list[str]:
    server = Path(__file__).parent / "openvino_server.py"
    return [str(ROOT / "openvino/bin/python"), str(server), str(model), arithmetic(precision), str(port)]


_GGUF_TYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "int8": "Q8_0", "int4": "Q4_K_M", **GGUF_TYPES}


def _gguf(shape: str, precision: str) -> Path:
    kind = _GGUF_TYPES[precision]
    file = FOLDER / f"{shape}-{kind}.gguf"
    if file.exists():
        return file
    partial = file.with_suffix(".partial")  # an interrupted conversion must not be taken for a whole file
    if precision in BITS:
        program = ROOT / "llama.cpp/build/bin/llama-quantize"
        if not program.exists():
            raise RuntimeError(f"{program} does not exist: run python -m benchmarks.peers.setup llama.cpp")
        _convert([str(program), str(_gguf(shape, "bfloat16")), str(partial), kind])
    else:
        _convert_to_gguf(shape, partial, kind)
    partial.rename(file)
    return file


def _convert_to_gguf(shape: str, file: Path, kind: str) -> None:
    """llama.cpp's own converter. It refuses tokenizers whose hash it does not know: it is told that ours splits text
    as GPT-2's or Qwen 2's does, which matters to nobody here."""
    source = ROOT / "llama.cpp/source"
    code = (
        f"import sys; sys.path[:0] = [{str(source)!r}, {str(source / 'gguf-py')!r}]\n"
        "from conversion import base\n"
        f"base.TextModel.get_vocab_base_pre = lambda self, tokenizer: {'qwen2' if shape == '0.5B' else 'gpt-2'!r}\n"
        f"sys.argv[1:] = [{str(checkpoint(shape))!r}, '--outtype', {kind!r}, '--outfile', {str(file)!r}]\n"
        "import convert_hf_to_gguf\nconvert_hf_to_gguf.main()\n"
    )
    _convert([str(ROOT / "llama.cpp/bin/python"), "-c", code])


def _convert(command: list[str]) -> None:
    """Raises RuntimeError with the end of what the command wrote."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} exited with {done.returncode}:\n{done.stdout[-2000:]}")


def _llama_cpp(model: Path, precision: str, port: int) -> list[str]:
    threads = str(len(os.sched_getaffinity(0)))
    return [str(ROOT / "llama.cpp/build/bin/llama-server"), "-m", str(model), "--host", "127.0.0.1", "--port",
            str(port), "-t", threads, "-tb", threads, "-np", "32", "-c", str(CACHE_TOKENS), "-cb", "--no-cache-prompt",
            "-b", "2048", "-ub", "512"]  # fmt: skip


PEERS = {
    peer.name: peer
    for peer in (
        Peer(name="tercet", api="tgi", precisions=("bfloat16", "float32", *BITS), installed=lambda: True,
             command=_tercet, prepare=tercet_files, environ=lambda: {"PREFIX_CACHING": "0"}, version=_tercet_version),
        Peer(name="llama.cpp", api="openai", precisions=tuple(_GGUF_TYPES),
             installed=_has("llama.cpp", "build", "bin", "llama-server"), command=_llama_cpp, prepare=_gguf,
             version=lambda: "llama-cpp-python 0.3.36"),
        Peer(name="vllm", api="openai", precisions=("bfloat16", "float32"), installed=_has("vllm", "bin", "python"),
             command=_vllm, environ=_vllm_environ, version=_package("vllm", "vllm-cpu")),
        Peer(name="openvino", api="openai",
             precisions=("bfloat16", "float32", *_OPENVINO_WEIGHTS, "int8-float32", "int4-float32"),
             installed=_has("openvino", "bin", "optimum-cli"), command=_openvino, prepare=_openvino_model,
             version=_package("openvino", "openvino-genai")),
        Peer(name="transformers", api="openai", precisions=("bfloat16", "float32"),
             installed=_has("transformers", "bin", "transformers"), command=_transformers,
             knows_ignore_eos=False, version=_package("transformers", "transformers")),
    )
}  # fmt: skip
