"""Where `--batch-invariant` is honoured, and the one line where it is refused."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support.fake_model import FakeStateRunner
from support.tiny_models import tiny_checkpoint

from model_server.attention import choice
from model_server.attention.backend import AttentionBackend
from model_server.attention.choice import AttentionChoice, Offer
from model_server.config import ServeConfig
from model_server.distributed.layout import Layout
from model_server.errors import StartupError
from model_server.layers.linear import factory
from model_server.layers.linear.decode_gemm import DecodeGemmLinear
from model_server.layers.linear.factory import LinearFactory
from model_server.layers.linear.linear import torch_product
from model_server.models import model as rules
from model_server.models.model import Model, check_batch_invariance, describe
from model_server.quantization.forms import Plain
from model_server.quantization.scheme import Scheme
from model_server.runner.runner import RunnerTraits
from model_server.shard import announce
from model_server.weights.checkpoint import examine

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
HALF = torch.bfloat16


@pytest.fixture(autouse=True)
def kernels_and_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "refusal", lambda device: None)
    monkeypatch.setattr(rules.cpp, "usable", lambda device, dtype: True)


def model(folder: Path, model_type: str = "llama") -> Model:
    return describe(examine(tiny_checkpoint(model_type, folder, with_tokenizer=False)))


def test_where_it_is_honoured(tmp_path: Path) -> None:
    found = model(tmp_path)
    check_batch_invariance(found, GPU, HALF, 1)
    check_batch_invariance(found, GPU, torch.float16, 1)
    check_batch_invariance(found, CPU, torch.float32, 1)


@pytest.mark.parametrize(
    ("device", "dtype", "num_ranks", "reason"),
    [
        (GPU, HALF, 2, "use --num-shard 1"),
        (GPU, torch.float32, 1, "needs --dtype float16 or bfloat16"),
        (CPU, HALF, 1, "needs --dtype float32"),
    ],
)
def test_where_it_is_refused(
    device: torch.device, dtype: torch.dtype, num_ranks: int, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(StartupError, match=f"^--batch-invariant cannot be honoured: .*{reason}"):
        check_batch_invariance(model(tmp_path), device, dtype, num_ranks)


def test_models_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = model(tmp_path / "llama")
    with pytest.raises(StartupError, match="computed by transformers"):
        check_batch_invariance(replace(found, spec=None), GPU, HALF, 1)
    with pytest.raises(StartupError, match="quantized weights"):
        scheme = cast(Scheme, SimpleNamespace(method="gptq"))
        check_batch_invariance(replace(found, scheme=scheme), GPU, HALF, 1)
    with pytest.raises(StartupError, match="experts"):
        check_batch_invariance(model(tmp_path / "mixtral", "mixtral"), GPU, HALF, 1)
    with pytest.raises(StartupError, match="latent attention"):
        check_batch_invariance(model(tmp_path / "deepseek", "deepseek_v2"), GPU, HALF, 1)
    check_batch_invariance(model(tmp_path / "deepseek_too", "deepseek_v2"), CPU, torch.float32, 1)
    monkeypatch.setattr(rules, "refusal", lambda device: "Triton is not installed")
    with pytest.raises(StartupError, match="Triton is not installed"):
        check_batch_invariance(found, GPU, HALF, 1)


def test_only_one_backend_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    module = SimpleNamespace(TritonBackend=lambda **given: made.append(given) or SimpleNamespace(name="triton"))
    monkeypatch.setitem(sys.modules, "model_server.attention.triton_paged", module)
    refused: list[str | None] = [None]
    offer = Offer(cast(AttentionBackend, SimpleNamespace(name="triton")), lambda layer: refused[0])
    monkeypatch.setitem(choice._OFFERS, "triton", lambda device, dtype: offer)
    for word in (None, "triton", "paged"):
        assert AttentionChoice(word, GPU, HALF, batch_invariant=True).for_layers().name == "triton"
    assert made == [{"batch_invariant": True}] * 3
    with pytest.raises(StartupError, match="--attention flash_attn is not batch-invariant"):
        AttentionChoice("flash_attn", GPU, HALF, batch_invariant=True)


def test_every_plain_matrix_gets_the_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones too, which the library would multiply otherwise."""
    monkeypatch.setattr(factory, "_invariant_product", lambda device, dtype: torch_product)
    linears = LinearFactory(CPU, torch.float16, batch_invariant=True)
    made = linears.make(Plain(torch.ones(3, 5, dtype=torch.float16)))
    assert isinstance(made, DecodeGemmLinear)
    assert not isinstance(LinearFactory(CPU, torch.float16).make(Plain(torch.ones(3, 5))), DecodeGemmLinear)


def test_nothing_is_preempted() -> None:
    config = ServeConfig(model_id="m")
    runner = FakeStateRunner()
    runner.traits = RunnerTraits()
    assert announce(config, runner, CPU, torch.float32, Layout()).grows
    invariant = replace(config, batch_invariant=True)
    assert not announce(invariant, runner, CPU, torch.float32, Layout()).grows


def test_the_log_names_the_option(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    choice_made = AttentionChoice(None, CPU, torch.float32, batch_invariant=True)
    choice_made.log(choice_made.for_layers(), caching_asked=False)
    assert "Prefix caching is off: --batch-invariant" in caplog.messages
