"""Adapters that come and go while the model serves: numbers, memory, requests that are still running."""

from __future__ import annotations

import gc
import os
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from parity.protocol import assert_equal_logits, prompts, run_protocol
from support.adapters import write_adapter
from support.loading import load
from support.peft_adapters import peft_adapter, peft_logits
from support.tiny_models import tiny_checkpoint

from model_server.adapters.folder import read_adapter
from model_server.adapters.reader import AdapterReader
from model_server.adapters.rows import BASE
from model_server.errors import StartupError
from model_server.features.adapters.load import adapter_of, with_adapters
from model_server.features.adapters.residents import Residence, Residents
from model_server.models.model import describe
from model_server.weights.checkpoint import examine
from model_server.weights.products import Products
from wire.lora.merged import ADAPTER_CONFIG

SEQUENCES = prompts(512)
HEAD = {"lm_head": (64, 512)}


def residents_of(runner: Any, model: Path, root: Path, number: int = 4) -> Residents:
    described = with_adapters(describe(examine(model)), {}, room=number)
    return Residents(runner.adapters, range(number), root, lambda name, path: adapter_of(described, name, path), 4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("base"), variant="biases_tied", with_tokenizer=False)


@pytest.mark.parametrize(
    "config",
    [
        {"use_dora": True, "target_modules": ["embed_tokens", "o_proj"]},
        pytest.param({"modules_to_save": ["lm_head"]}, marks=pytest.mark.parity),
    ],
)
def test_what_comes_later_is_what_is_loaded_with_the_model(model: Path, config: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("peft")
    adapter = peft_adapter(model, tmp_path / "a", 1, **config)
    runner = load(model, adapter_room=4)
    before = run_protocol(runner, SEQUENCES, 4)
    residents = residents_of(runner, model, tmp_path)
    size = residents.load(7, "a", "a")
    found = residents.find(7)
    assert found is not None and size.rank == 4 and 0 < size.num_bytes <= residents.check("a", "a").num_bytes * 2
    wanted = [peft_logits(model, a, [s])[0] for a, s in zip((adapter, None, adapter), SEQUENCES, strict=True)]
    numbers = (found.number, BASE, found.number)
    assert_equal_logits(run_protocol(runner, SEQUENCES, 4, adapters=numbers), wanted)
    residents.drop(7)
    assert residents.find(7) is None
    assert_equal_logits(run_protocol(runner, SEQUENCES, 4, adapters=numbers), wanted)  # a request holds it still
    del found
    gc.collect()
    assert residents.num_free == 4
    gone = run_protocol(runner, SEQUENCES, 4, adapters=numbers)
    assert all(torch.equal(a, b) for a, b in zip(gone, before, strict=True))


@pytest.mark.parametrize("change", ["cut short", "written again"])
def test_files_that_are_written_while_they_are_read(
    change: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mapped file that is cut short would end the process."""
    runner = load(model, adapter_room=1)
    residents = residents_of(runner, model, tmp_path, number=1)
    write_adapter(tmp_path / "a", HEAD)
    file = tmp_path / "a" / "adapter_model.safetensors"
    written = file.read_bytes()
    os.utime(file, (0, 0))  # clocks of files are coarse
    read = AdapterReader.product

    def write_and_read(*asked: Any) -> Any:
        with file.open("wb") as opened:
            opened.write(b"" if change == "cut short" else written)
        return read(*asked)

    with monkeypatch.context() as patched:
        patched.setattr(AdapterReader, "product", write_and_read)
        with pytest.raises(
            StartupError, match=r"^LoRA adapter `x`: .*\.safetensors has changed while it was read: try again"
        ):
            residents.load(1, "x", "a")
    file.write_bytes(written)
    assert residents.load(1, "x", "a").rank and residents.num_free == 0


def test_refusals(model: Path, tmp_path: Path) -> None:
    residents = residents_of(load(model, adapter_room=1), model, tmp_path, number=1)
    write_adapter(tmp_path / "a", HEAD)
    (tmp_path / "link").symlink_to("/etc")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(StartupError, match=r"LoRA adapter `x`: no adapter_config.json in"):
        residents.check("x", "loop")
    for path in ("..", "/etc", "a/../../b", "link"):
        with pytest.raises(StartupError, match=r"LoRA adapter `x`: .* leads out of --lora-root"):
            residents.load(1, "x", path)
    with pytest.raises(StartupError, match=r"LoRA adapter `x`: no adapter_config.json in"):
        residents.check("x", "nothing")
    (tmp_path / "wrong").mkdir()
    (tmp_path / "wrong" / ADAPTER_CONFIG).write_text("{")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ADAPTER_CONFIG).symlink_to("/etc/hostname")
    for path in ("nothing", "loop", "wrong", "out"):
        with pytest.raises(StartupError) as refused:
            residents.check("x", path)
        assert str(tmp_path) not in str(refused.value) and "/etc" not in str(refused.value)
    residents.load(1, "x", "a")
    with pytest.raises(StartupError, match=r"the load id 1 is taken"):
        residents.load(1, "x", "a")
    with pytest.raises(StartupError, match=r"adapters are in use; try again later"):
        residents.load(2, "x", "a")
    residents.clear()
    assert residents.num_free == 1
    residents.load(3, "x", "a")
    residents.drop(99)


def test_adapters_with_the_same_shapes_have_digests_of_their_own(tmp_path: Path) -> None:
    """In a group of nodes, whose ranks read folders of their own: another scale at the check, other numbers at the
    load, when they are read. The file may have another name."""

    def digests(name: str, **fields: Any) -> tuple[bytes, bytes]:
        folder = write_adapter(tmp_path / name / "a", HEAD, **fields)
        (folder / "adapter_model.safetensors").rename(folder / f"{name}.safetensors")
        targets = Products(linear={"lm_head": (64, 512)}, head="lm_head", table=(512, 64))
        read = partial(read_adapter, targets=targets, base_prefixes=("model.",))
        residents = Residents(FakeSites(), range(1), tmp_path / name, read, 4, digests=True)
        return residents.check("a", "a").digest, residents.load(1, "a", "a").digest

    check, load = digests("here")
    assert digests("there") == (check, load) and check and load != check
    other_numbers, other_scale = digests("numbers", seed=1), digests("scale", lora_alpha=9)
    assert other_numbers[0] == check and other_numbers[1] != load
    assert other_scale[0] != check and other_scale[1] != load


@pytest.mark.parametrize(
    ("dtype", "key", "value"),
    [(torch.float16, "lora_A", 1e5), (torch.float16, "lora_B", 4e4), (torch.bfloat16, "lora_B", 3e38)],
)
def test_numbers_that_would_not_be_finite_in_the_models_type(
    dtype: torch.dtype, key: str, value: float, model: Path, tmp_path: Path
) -> None:
    """Rounded, or with the scale (2 here): times 0 they would be none, in rows that have other adapters, too."""
    shape = (4, 64) if key == "lora_A" else (512, 4)
    large = {f"base_model.model.lm_head.{key}.weight": torch.full(shape, value)}
    write_adapter(tmp_path / "a", HEAD, tensors=large)
    residents = residents_of(load(model, dtype=dtype, adapter_room=1), model, tmp_path, number=1)
    refusal = rf"^LoRA adapter `x`: .*{key}.* is too large for the model's type, {dtype}:"
    with pytest.raises(StartupError, match=refusal):
        residents.load(1, "x", "a")
    assert residents.num_free == 1


class FakeSites:
    """Remembers which adapter has which number."""

    def __init__(self) -> None:
        self.at: dict[int, str] = {}

    def check(self, adapter: Any) -> None:
        pass

    def read(self, adapter: Any) -> Any:
        return type("Loaded", (), {"name": adapter.name, "nbytes": 1})()

    def put(self, number: int, loaded: Any) -> None:
        assert number not in self.at, "two adapters with one number"
        self.at[number] = loaded.name

    def remove(self, number: int) -> None:
        del self.at[number]


@pytest.mark.parametrize("seed", range(5))
def test_any_order(seed: int, tmp_path: Path) -> None:
    """A request that holds an adapter has it to its end, and every number comes back."""
    random, sites = Random(seed), FakeSites()
    adapter = type("Checked", (), {"headers": {}, "rank": 1})

    def read(name: str, path: Path) -> Any:
        found = adapter()
        found.name = name
        return found

    residents = Residents(sites, range(10, 16), tmp_path, read, 2)
    held: list[tuple[Residence, str]] = []
    for load_id in range(1, 300):
        choice = random.random()
        if choice < 0.4:
            name = f"a{load_id}"
            try:
                residents.load(load_id, name, "x")
            except StartupError:
                assert residents.num_free == 0
        elif choice < 0.6:
            residents.drop(random.randrange(max(1, load_id - 20), load_id + 1))
        elif choice < 0.9:
            found = residents.find(random.randrange(max(1, load_id - 20), load_id + 1))
            if found is not None:
                held.append((found, sites.at[found.number]))
        elif held:
            held.pop(random.randrange(len(held)))
        found = None
        assert all(sites.at[residence.number] == name for residence, name in held)
    residents.clear()
    held.clear()
    gc.collect()
    assert not sites.at and residents.num_free == 6


def checked(name: str, path: Path) -> Any:
    return type("Checked", (), {"name": name, "headers": {}, "rank": 1})()


def test_a_load_that_fails_at_its_end_keeps_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sites = FakeSites()
    residents = Residents(sites, range(1), tmp_path, checked, 2)

    def put(number: int, loaded: Any) -> None:
        sites.at[number] = loaded.name
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(sites, "put", put)
        with pytest.raises(MemoryError):
            residents.load(1, "a", "x")
    assert residents.num_free == 1 and not sites.at and residents.find(1) is None
    residents.load(1, "a", "x")
    assert residents.find(1) is not None


def test_a_load_of_an_earlier_router_ends_with_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new one clears all while it is read, and begins with the same load ids."""
    sites = FakeSites()
    residents = Residents(sites, range(2), tmp_path, checked, 2)
    with monkeypatch.context() as patch:
        patch.setattr(sites, "read", lambda adapter: residents.clear() or FakeSites.read(sites, adapter))
        with pytest.raises(StartupError, match=r"LoRA adapter `a`: another router has connected meanwhile"):
            residents.load(1, "a", "x")
    residents.load(1, "b", "x")
    assert list(sites.at.values()) == ["b"] and residents.num_free == 1
