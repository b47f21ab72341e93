"""The backends on flash-attn 2 and 3 and on torch's varlen attention: what they hand to doubles of those libraries."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import flash_doubles
from support.attention_scene import BATCHES, HEADS, Scene

from model_server.attention import flash_attn, torch_varlen
from model_server.attention.availability import UnavailableError
from model_server.attention.backend import Alibi, AttentionBackend, AttentionLayer
from model_server.attention.flash_attn import FlashAttnBackend
from model_server.attention.torch_varlen import TorchVarlenBackend

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
BACKENDS: dict[str, AttentionBackend] = {
    "flash-attn 2": FlashAttnBackend(flash_doubles.FLASH_ATTN_2, 2),
    "flash-attn 3": FlashAttnBackend(flash_doubles.FLASH_ATTN_3, 3),
    "torch varlen": TorchVarlenBackend(flash_doubles.torch_varlen_attn),
}
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window of 1": {"window": 1},
    "window": {"window": 8},
    "softcap": {"softcap": 1.5},
    "softcap, window": {"softcap": 1.5, "window": 8},
    "alibi": {"alibi": Alibi(SLOPES)},
    "alibi, window": {"alibi": Alibi(SLOPES), "window": 8},
}
LONG: dict[str, list[tuple[int, int]]] = {
    "many pages": [(1, 256), (1, 257), (1, 700), (1, 1)],
    "chunk over pages": [(70, 600), (1, 513), (7, 7)],
}


def plain(**options: Any) -> AttentionLayer:
    sizes = {"index": 0, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "value_dim": 16, "scale": 0.25}
    return AttentionLayer(**{**sizes, **options})


SERVED = [
    pytest.param(backend, kind, id=f"{name}, {word}")
    for name, backend in BACKENDS.items()
    for word, kind in KINDS.items()
    if backend.refuses(plain(**kind)) is None
]


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("backend", "kind"), SERVED)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_equals_the_definition(backend: AttentionBackend, batch: list[tuple[int, int]], kind: dict[str, Any]) -> None:
    scene = Scene(batch, 4, 2, backend.block_size, torch.bfloat16)
    layer = scene.layer(**kind)
    result = scene.attend(layer, backend)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.double(), scene.expected(layer), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_heads_that_share_keys(backend: AttentionBackend, heads: tuple[int, int]) -> None:
    for batch in (BATCHES["decode, ragged"], BATCHES["everything mixed"]):
        scene = Scene(batch, *heads, backend.block_size, torch.bfloat16)
        layer = scene.layer(7)
        torch.testing.assert_close(scene.attend(layer, backend).double(), scene.expected(layer), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("backend", "kind"), SERVED)
@pytest.mark.parametrize("batch", LONG.values(), ids=LONG)
def test_equals_the_reference_over_many_pages(
    backend: AttentionBackend, batch: list[tuple[int, int]], kind: dict[str, Any]
) -> None:
    scene = Scene(batch, 4, 2, backend.block_size, torch.bfloat16)
    layer = scene.layer(**kind)
    torch.testing.assert_close(scene.attend(layer, backend), scene.attend(layer), rtol=2e-2, atol=2e-2)


def test_what_is_refused() -> None:
    """Nothing that the libraries cannot do is asked of them."""
    refused = {
        (name, kind)
        for name, backend in BACKENDS.items()
        for kind, options in {**KINDS, **ODD}.items()
        if backend.refuses(plain(**options)) is not None
    }
    everything = {(name, kind) for name in BACKENDS for kind in ODD}
    assert refused == everything | {
        ("flash-attn 3", "alibi"),
        ("flash-attn 3", "alibi, window"),
        *(("torch varlen", kind) for kind in ("softcap", "softcap, window", "alibi", "alibi, window")),
    }


ODD: dict[str, dict[str, Any]] = {
    "sinks": {"sinks": torch.zeros(4)},
    "chunk": {"chunk": 8},
    "Falcon's alibi": {"alibi": Alibi(SLOPES, 0.25)},
    "latent": {"value_dim": 8},
    "wide": {"head_dim": 264, "value_dim": 264},
    "crooked": {"head_dim": 20, "value_dim": 20},
}


def test_betas_of_3_return_more() -> None:
    def beta(*arguments: Any, **options: Any) -> Any:
        return flash_doubles.with_kvcache_3(*arguments, **options), torch.zeros(1)

    scene = Scene(BATCHES["prompts"], 4, 2, 16, torch.bfloat16)
    layer = scene.layer()
    result = scene.attend(layer, FlashAttnBackend(SimpleNamespace(flash_attn_with_kvcache=beta), 3))
    assert torch.equal(result, scene.attend(layer, BACKENDS["flash-attn 3"]))


def test_pages() -> None:
    assert {name: backend.block_size for name, backend in BACKENDS.items()} == {
        "flash-attn 2": 256,
        "flash-attn 3": 16,
        "torch varlen": 256,
    }


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, int]]:
    """A GPU of capability `card["is"]`, as far as questions about it go."""
    found = {"is": (9, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: found["is"])
    return found


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Modules that can be imported, by name; `version` is flash_attn's."""
    modules: dict[str, Any] = {"version": "2.8.3.post2"}
    monkeypatch.setattr(flash_attn, "_module", modules.get)
    monkeypatch.setattr(flash_attn.importlib.metadata, "version", lambda name: modules["version"])
    return modules


@pytest.mark.parametrize("module", [flash_attn, torch_varlen])
def test_absent_where_it_cannot_run(module: Any, card: dict[str, tuple[int, int]]) -> None:
    with pytest.raises(UnavailableError, match="it computes on a CUDA device, not on cpu"):
        module.available(CPU, torch.bfloat16)
    with pytest.raises(UnavailableError, match="float16 and bfloat16, not in float32"):
        module.available(CUDA, torch.float32)
    card["is"] = (7, 5)
    with pytest.raises(UnavailableError, match=r"capability 8\.0 or later"):
        module.available(CUDA, torch.float16)


def test_version_3_is_for_hopper(card: dict[str, tuple[int, int]], installed: dict[str, Any]) -> None:
    with pytest.raises(UnavailableError, match="not installed"):
        flash_attn.available(CUDA, torch.bfloat16)
    installed["flash_attn"] = flash_doubles.FLASH_ATTN_2
    assert flash_attn.available(CUDA, torch.bfloat16).block_size == 256
    installed["flash_attn_3.flash_attn_interface"] = flash_doubles.FLASH_ATTN_3
    assert flash_attn.available(CUDA, torch.bfloat16).block_size == 16
    card["is"] = (8, 9)
    assert flash_attn.available(CUDA, torch.bfloat16).block_size == 256


def test_an_old_version_2(card: dict[str, tuple[int, int]], installed: dict[str, Any]) -> None:
    installed |= {"flash_attn": flash_doubles.FLASH_ATTN_2, "version": "2.6.3"}
    with pytest.raises(UnavailableError, match=r"2\.6\.3 is too old"):
        flash_attn.available(CUDA, torch.bfloat16)


def test_a_module_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled for another torch: said, not raised as it is."""

    def broken(name: str) -> None:
        raise ImportError("undefined symbol: _ZN3c104cuda\nmore")

    monkeypatch.setattr(flash_attn.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(flash_attn.importlib, "import_module", broken)
    with pytest.raises(UnavailableError, match=r"flash_attn cannot be loaded: undefined symbol: _ZN3c104cuda$"):
        flash_attn._module("flash_attn")


def test_torchs_own_by_its_signature(card: dict[str, tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    def without_pages(query: Any, key: Any, value: Any, cu_seq_q: Any, *, scale: Any = None) -> None:
        pass

    module = SimpleNamespace(varlen_attn=without_pages)
    monkeypatch.setattr(torch_varlen.importlib, "import_module", lambda name: module)
    with pytest.raises(UnavailableError, match="lacks window_size, enable_gqa, seqused_k, block_table"):
        torch_varlen.available(CUDA, torch.bfloat16)
    module.varlen_attn = flash_doubles.torch_varlen_attn
    assert torch_varlen.available(CUDA, torch.bfloat16).name == "torch_varlen"


def test_the_double_has_torchs_signature() -> None:
    """What the installed torch asks for by name and order, if it reads pages."""
    import inspect

    varlen = pytest.importorskip("torch.nn.attention.varlen")
    real = inspect.signature(varlen.varlen_attn).parameters
    if "block_table" not in real:
        pytest.skip("this torch reads no pages")
    assert list(inspect.signature(flash_doubles.torch_varlen_attn).parameters) == list(real)
