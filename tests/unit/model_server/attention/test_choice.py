"""Words for attention backends, and what takes the place of one that cannot serve."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from model_server.attention import choice
from model_server.attention.availability import UnavailableError
from model_server.attention.backend import AttentionBackend, AttentionLayer
from model_server.attention.choice import OWN_NAMES, TGI_NAMES, AttentionChoice, Offer
from model_server.attention.reference import ReferenceBackend
from model_server.errors import StartupError

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
HALF = torch.bfloat16


def layer(index: int = 0, **options: Any) -> AttentionLayer:
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "value_dim": 16, "scale": 0.25}
    return AttentionLayer(index=index, **{**sizes, **options})


PLAIN = (layer(0), layer(1))
CAPPED = (layer(0), layer(1, softcap=30.0))
LATENT = (layer(0, num_kv_heads=1, head_dim=24),)


def offer(name: str, block_size: int, refuses: Callable[[AttentionLayer], str | None]) -> Any:
    backend: Any = SimpleNamespace(name=name, tgi_name="paged", block_size=block_size)
    return lambda device, dtype: Offer(backend, refuses)


def absent(reason: str) -> Any:
    def make(device: torch.device, dtype: torch.dtype) -> Offer:
        raise UnavailableError(reason)

    return make


@pytest.fixture
def offers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine with a card: triton without softcap, flash_attn with pages of 256 without latent attention."""
    found = {
        "triton": offer("triton", 16, lambda one: "has no soft cap" if one.softcap else None),
        "flash_attn": offer(
            "flash_attn", 256, lambda one: None if one.value_dim == one.head_dim else "wants both alike"
        ),
        "torch_varlen": absent("torch is too old"),
        "cpp": absent("it computes on a CPU, not on cuda"),
        "reference": choice._OFFERS["reference"],
    }
    monkeypatch.setattr(choice, "_OFFERS", found)
    return found


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


@pytest.fixture
def without_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(choice._OFFERS, "cpp", absent("this build has no C++ operators"))


@pytest.mark.usefixtures("without_cpp")
def test_unset_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    backend = AttentionChoice(None, CPU).for_layers()
    assert (backend.name, backend.tgi_name, backend.block_size) == ("reference", "paged", 16)
    assert not caplog.records


@pytest.mark.usefixtures("without_cpp")
@pytest.mark.parametrize("word", TGI_NAMES)
def test_tgis_words_mean_the_best_present(word: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert AttentionChoice(word, CPU).for_layers().name == "reference"
    assert [r.getMessage() for r in caplog.records] == [
        f"Attention `{word}` is served by the `reference` backend on cpu"
    ]


def test_unknown_word() -> None:
    with pytest.raises(StartupError, match="--attention sparse is unknown; choose one of reference, triton"):
        AttentionChoice("sparse", CPU)


def test_reference_is_always_there() -> None:
    for layers in (PLAIN, CAPPED, LATENT):
        assert AttentionChoice("reference", CPU, torch.float32).for_layers(layers).name == "reference"


def test_the_reference_takes_lengths_from_a_card() -> None:
    """Where drafts are checked before the host knows how many tokens rows have."""
    for device, exact in ((CUDA, False), (CPU, True)):
        backend = AttentionChoice("reference", device, HALF).for_layers(PLAIN)
        assert isinstance(backend, ReferenceBackend) and backend.exact is exact


@pytest.mark.parametrize("word", ["flash_attn", "torch_varlen"])
def test_a_named_backend_is_kept_to(word: str) -> None:
    with pytest.raises(StartupError, match=f"--attention {word} cannot be used: it computes on a CUDA device"):
        AttentionChoice(word, CPU, HALF)


def test_triton_without_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "refusal", lambda device: "Triton is not installed")
    with pytest.raises(StartupError, match="--attention triton cannot be used: it needs Triton"):
        AttentionChoice("triton", CPU, HALF)


def test_cpp_is_for_cpus() -> None:
    with pytest.raises(StartupError, match="--attention cpp cannot be used: it computes on a CPU, not on cuda"):
        AttentionChoice("cpp", CUDA, HALF)


@pytest.mark.usefixtures("offers")
def test_the_default_on_a_card(caplog: pytest.LogCaptureFixture) -> None:
    assert AttentionChoice(None, CUDA, HALF).for_layers(PLAIN).name == "triton"
    assert AttentionChoice("flashinfer", CUDA, HALF).for_layers(PLAIN).name == "triton"
    assert AttentionChoice("flash_attn", CUDA, HALF).for_layers(PLAIN).block_size == 256
    assert not warnings(caplog)


@pytest.mark.usefixtures("offers")
def test_what_cannot_serve_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    assert AttentionChoice(None, CUDA, HALF).for_layers(CAPPED).name == "flash_attn"
    assert warnings(caplog) == [
        "Attention is computed by the `flash_attn` backend: "
        "`triton` cannot serve layer 1 of this model: `triton` has no soft cap"
    ]


@pytest.mark.usefixtures("offers")
def test_what_cannot_serve_and_was_named_is_refused() -> None:
    expected = "--attention triton cannot serve layer 1 of this model: `triton` has no soft cap; leave it unset"
    with pytest.raises(StartupError, match=expected):
        AttentionChoice("triton", CUDA, HALF).for_layers(CAPPED)


@pytest.mark.usefixtures("offers")
@pytest.mark.parametrize("word", ["flash_attn", "torch_varlen"])
def test_who_keeps_the_models_type_and_was_named_is_refused(word: str) -> None:
    expected = f"--attention {word} keeps its cache in the model's type; leave --kv-cache-dtype out or use triton"
    with pytest.raises(StartupError) as caught:
        AttentionChoice(word, CUDA, HALF, torch.float8_e5m2)
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("cache", "capability", "name"),
    [
        (torch.float8_e4m3fn, (9, 0), "triton"),
        (torch.float8_e4m3fn, (8, 0), "reference"),
        (torch.float8_e5m2, (8, 0), "triton"),
    ],
)
def test_who_reads_a_cache_in_float8(
    cache: torch.dtype, capability: tuple[int, int], name: str, offers: dict[str, Any], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert AttentionChoice(None, CUDA, HALF, cache).for_layers(PLAIN).name == name
    if name == "reference":
        assert "no `flash_attn` (it keeps its cache in the model's type)" in warnings(caplog)[0]
        with pytest.raises(StartupError, match=r"--attention triton cannot be used: it reads .* capability 8\.9"):
            AttentionChoice("triton", CUDA, HALF, cache)
    offers["triton"] = absent("it needs Triton")
    assert AttentionChoice(None, CUDA, HALF, cache).for_layers(PLAIN).name == "reference", "no flash_attn"


def test_the_last_resort_is_told(offers: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    offers["triton"] = absent("it needs Triton")
    assert AttentionChoice("paged", CUDA, HALF).for_layers(LATENT).name == "reference"
    assert warnings(caplog) == [
        "Attention is computed by the `reference` backend, which is slow: no `triton` (it needs Triton); "
        "`flash_attn` cannot serve layer 0 of this model: `flash_attn` wants both alike; "
        "no `torch_varlen` (torch is too old)"
    ]


def test_every_name_has_an_offer() -> None:
    assert set(choice._OFFERS) == set(OWN_NAMES)
    assert {name for names in choice.PREFERENCE.values() for name in names} <= set(OWN_NAMES)
    backend: AttentionBackend = choice._OFFERS["reference"](CPU, torch.float32).backend
    assert backend.name == "reference"
