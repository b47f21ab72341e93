"""Checkpoints that should not be trusted, through the real launcher; conversion, and memory while loading."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.loading import load
from support.loading_memory import measure
from support.random_checkpoints import write_checkpoint, write_gguf
from support.running_server import free_port
from support.tiny_models import tiny_checkpoint

from model_server.text.tokenizer import Tokenizer

pytestmark = pytest.mark.e2e

REFUSED_S = 60.0
"""It takes 3 to 5 s on a quiet machine."""
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("good"))


@pytest.fixture
def model(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "model"))


def launch(model: Path, folder: Path, *options: str) -> tuple[int, str]:
    """Exit status and standard error of a launcher that cannot serve `model`."""
    command = [sys.executable, "-m", "launcher", "--model-id", str(model), "--hostname", "127.0.0.1"]
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        status = subprocess.run(
            [*command, "--port", str(free_port()), *options],
            stdin=subprocess.DEVNULL, stdout=out, stderr=err, timeout=REFUSED_S, check=False,
        ).returncode  # fmt: skip
    return status, (folder / "err").read_text()


def config(model: Path, **changes: object) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def header_lies(model: Path, trace: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes((2**62).to_bytes(8, "little") + path.read_bytes()[8:])


def shape_is_negative(model: Path, trace: Path) -> None:
    path = model / "model.safetensors"
    data = path.read_bytes()
    changed = data.replace(b'"shape":[64]', b'"shape":[-4]', 1)
    assert changed != data
    path.write_bytes(changed)


def index_leads_outside(model: Path, trace: Path) -> None:
    # Beside a whole file of this name, an index that does not list it is not read.
    (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../../secret.safetensors"}}')


def layers_without_end(model: Path, trace: Path) -> None:
    config(model, num_hidden_layers=2**30)


def tokenizer_is_garbage(model: Path, trace: Path) -> None:
    (model / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": -1}}')


def weights_are_pickled(model: Path, trace: Path) -> None:
    (model / "model.safetensors").unlink()
    torch.save({"a": Trap(trace)}, model / "pytorch_model.bin")


def code_is_trapped(model: Path, trace: Path) -> None:
    names = {"AutoConfig": "configuration_x.Config", "AutoModelForCausalLM": "modeling_x.Model"}
    config(model, model_type="x_unknown", architectures=["Model"], auto_map=names)
    set_traps(model, trace)


def set_traps(model: Path, trace: Path) -> None:
    """Modules that leave a trace when they are imported, under every name that a loader might look for."""
    path = model / "tokenizer_config.json"
    tokenizer = {"tokenizer_class": "Tokenizer", "auto_map": {"AutoTokenizer": ["tokenization_x.Tokenizer", None]}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **tokenizer}))
    for name in ("__init__", "configuration_x", "modeling_x", "tokenization_x", "sitecustomize", "router", "torch"):
        (model / f"{name}.py").write_text(f"open({str(trace)!r}, 'a').write({name!r})\n")


class Trap:
    """Pickled, it runs a command when it is loaded without care."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self._trace}",)


REFUSALS: dict[Callable[[Path, Path], None], tuple[str, ...]] = {
    header_lies: ("model.safetensors is damaged or incomplete: the header claims 4611686018427387904 bytes",),
    shape_is_negative: ("model.safetensors is damaged or incomplete: tensor", "impossible shape [-4]"),
    index_leads_outside: ("model.safetensors.index.json names a file outside its directory",),
    layers_without_end: ("config.json: `num_hidden_layers` is 1073741824",),
    tokenizer_is_garbage: ("tokenizer.json",),
    weights_are_pickled: ("pickled weights", "--auto-convert"),
    code_is_trapped: ("x_unknown",),
}


# The unit tests of weights have them too, without a launcher.
READ_ALONE = (shape_is_negative, index_leads_outside, layers_without_end)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        pytest.param(spoil, said, id=spoil.__name__, marks=pytest.mark.long if spoil in READ_ALONE else ())
        for spoil, said in REFUSALS.items()
    ],
)
def test_refused(model: Path, tmp_path: Path, spoil: Callable[[Path, Path], None], said: tuple[str, ...]) -> None:
    """One line that names the file and the fault, exit status 1, nothing executed."""
    spoil(model, tmp_path / "trace")
    status, errors = launch(model, tmp_path)
    assert status == 1
    assert len(errors.strip().splitlines()) == 1
    for text in said:
        assert text in errors
    assert not (tmp_path / "trace").exists()


def test_code_beside_a_known_type_is_never_run(model: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    config(model, auto_map={"AutoConfig": "configuration_x.Config", "AutoModelForCausalLM": "modeling_x.Model"})
    set_traps(model, trace)
    Tokenizer.load(model)
    load(model)
    assert not trace.exists()


@pytest.mark.long
def test_converted_weights_are_the_same_model(model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    wanted = load_file(model / "model.safetensors")
    torch.save(wanted, model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    run_download(model, tmp_path, 0, "--auto-convert")
    found = load_file(model / "model.safetensors")
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


@pytest.mark.long
def test_a_trap_does_not_spring_while_converting(model: Path, tmp_path: Path) -> None:
    weights_are_pickled(model, tmp_path / "trace")
    for options in ((), ("--auto-convert", "--trust-remote-code")):
        run_download(model, tmp_path, 1, *options)
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(tmp_path / "trace")))
    run_download(model, tmp_path, 1, "--auto-convert")
    assert not (tmp_path / "trace").exists()
    assert not (model / "model.safetensors").exists()


def run_download(model: Path, folder: Path, status: int, *options: str) -> None:
    with (folder / "log").open("wb") as log:
        ended = subprocess.run(
            [sys.executable, "-m", "model_server", "download-weights", str(model), *options],
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, timeout=120, check=False,
        )  # fmt: skip
    assert ended.returncode == status, (folder / "log").read_text()


@pytest.mark.long
@pytest.mark.parametrize("world_size", [1, 2])
def test_memory_while_loading(tmp_path: Path, world_size: int) -> None:
    """At most a fifth more than the rank's own weights; `benchmarks.load_memory` does it with 1 GB."""
    folder = write_checkpoint(tmp_path, 400, dtype="bfloat16")
    growth = measure(folder, rank=world_size - 1, world_size=world_size, dtype="bfloat16")
    assert growth.share > 150e6
    assert growth.ratio <= 1.2
    assert growth.end <= 1.1 * growth.share


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("method", "quantize"),
    [
        ("gptq", None), ("fp8", None), ("nvfp4", None), ("bitsandbytes", None), ("Q6_K", None),
        (None, "eetq"), (None, "fp8"), (None, "bitsandbytes-nf4"),
    ],
)  # fmt: skip
def test_memory_while_loading_quantized(method: str | None, quantize: str | None, tmp_path: Path) -> None:
    """1 GB, matrices of 92 MB in bfloat16: these are never held whole as floating point numbers."""
    inner = 11 * 2048
    if method == "Q6_K":
        folder = write_gguf(tmp_path, 1000, method, inner)
    else:
        folder = write_checkpoint(tmp_path, 1000, dtype="bfloat16", method=method, inner=inner)
    growth = measure(folder, dtype="bfloat16", quantize=quantize)
    assert growth.share > (900e6 if quantize is None else 250e6)
    assert growth.peak - growth.end <= 200 * 2**20
    heaps = 32 * 2**20  # of the C library and of threads: of any model, and more where the machine is busy
    assert growth.end <= 1.1 * growth.share + heaps
