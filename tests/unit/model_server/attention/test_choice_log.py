"""The record on attention and prefix caching: every row of TGI's table, with our values.

Ours are decided by what the backends can do with the model's layers, not by the size of a head or the model's type:
no row of the table turns prefix caching off, and `paged` keeps it.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from model_server.attention import choice
from model_server.attention.availability import UnavailableError
from model_server.attention.backend import AttentionLayer
from model_server.attention.choice import AttentionChoice, Offer
from model_server.config import ServeConfig
from wire.cli.parsing import parse

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def layers(head_dim: int) -> tuple[AttentionLayer, ...]:
    return (
        AttentionLayer(
            index=0, num_heads=32, num_kv_heads=8, head_dim=head_dim, value_dim=head_dim, scale=1.0,
        ),
    )  # fmt: skip


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine with a card of this capability: triton from 8.0 on."""
    state: dict[str, Any] = {"capability": (9, 0)}

    def triton(device: torch.device, dtype: torch.dtype) -> Offer:
        if device.type != "cuda" or state["capability"] < (8, 0):
            raise UnavailableError("it needs Triton and a GPU of capability 8.0 or later")
        backend: Any = SimpleNamespace(name="triton", tgi_name="paged", block_size=16)
        return Offer(backend, lambda layer: None)

    def absent(device: torch.device, dtype: torch.dtype) -> Offer:
        raise UnavailableError("not installed")

    offers = {"triton": triton, "flash_attn": absent, "torch_varlen": absent, "cpp": absent}
    monkeypatch.setattr(choice, "_OFFERS", choice._OFFERS | offers)
    return state


@pytest.mark.parametrize(
    ("row", "head_dim", "capability", "environ", "expected"),
    [
        ("llama 128", 128, (9, 0), {}, "triton - Prefix caching true"),
        ("llama 128, old card", 128, (7, 5), {}, "reference - Prefix caching true"),
        ("llama 64, no card", 64, None, {}, "reference - Prefix caching true"),
        ("head_dim 80", 80, (9, 0), {}, "triton - Prefix caching true"),
        ("head_dim 80, old card", 80, (7, 5), {}, "reference - Prefix caching true"),
        ("falcon 64", 64, (8, 0), {}, "triton - Prefix caching true"),
        ("falcon 64, old card", 64, (7, 5), {}, "reference - Prefix caching true"),
        ("deepseek_v2 40", 40, (9, 0), {}, "triton - Prefix caching true"),
        ("gemma3 256", 256, (9, 0), {}, "triton - Prefix caching true"),
        ("ATTENTION=paged", 128, (9, 0), {"ATTENTION": "paged"}, "triton - Prefix caching true"),
        ("both set", 128, (9, 0), {"ATTENTION": "paged", "PREFIX_CACHING": "1"}, "triton - Prefix caching true"),
        ("PREFIX_CACHING=0", 128, (9, 0), {"PREFIX_CACHING": "0"}, "triton - Prefix caching 0"),
        ("flashinfer asked", 128, (9, 0), {"ATTENTION": "flashinfer"}, "triton - Prefix caching true"),
        ("reference asked", 128, (9, 0), {"ATTENTION": "reference"}, "reference - Prefix caching true"),
    ],
)
def test_rows_of_tgis_table(
    row: str, head_dim: int, capability: tuple[int, int] | None, environ: dict[str, str], expected: str,
    card: dict[str, Any], caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    config = parse(ServeConfig, ["m"], environ)
    device = CPU if capability is None else CUDA
    card["capability"] = capability or (0, 0)
    attention = AttentionChoice(config.attention, device, torch.bfloat16)
    backend = attention.for_layers(layers(head_dim))
    caplog.set_level(logging.INFO)
    caplog.clear()
    attention.log(backend, caching_asked=config.prefix_caching)
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == f"Using attention {expected}", row
    assert said[1].startswith(f"Attention {backend.name}: ")
    assert ("set by" in said[1]) == (config.attention == backend.name)
    assert (" asks" in said[1]) == (config.attention not in (None, backend.name))
    assert said[2:] == (["Prefix caching is off: PREFIX_CACHING=0"] if not config.prefix_caching else [])


def test_a_model_that_keeps_a_state(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    AttentionChoice(None, CPU).log(None, caching_asked=True)
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "Using attention transformers - Prefix caching 0"
    assert any("cannot be shared" in text for text in said)
