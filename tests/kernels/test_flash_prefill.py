"""Prompts by flash-attn 4 beside our decode kernel, by a double of that library; and the library's real signature."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import logging
from typing import Any

import pytest
import torch
from support.attention_scene import BATCHES, Scene
from support.flash_doubles import varlen_func_4
from torch import Tensor

pytest.importorskip("triton")

from support.triton_interpreter import mend

from model_server.attention.flash_prefill import FlashPrefill
from model_server.attention.triton_paged import TritonBackend

mend()

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the double computes on the CPU")
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 8},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}


@pytest.fixture(autouse=True)
def short_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter needs seconds for hundreds of queries."""
    monkeypatch.setattr("model_server.attention.flash_prefill._TRIALS", ((3, 5), (20,)))


class Counted:
    """The double, with the number of queries of each call."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, q: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, None]:
        self.calls.append(len(q))
        return varlen_func_4(q, *arguments, **options)


MIXED = {
    "prompts": [(5, 5), (20, 40)],
    "single queries first": [(1, 9), (1, 30), (4, 20), (17, 17)],
    "single queries last": [(4, 20), (1, 9)],
    "single queries between": [(4, 20), (1, 9), (3, 3)],
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("batch", MIXED.values(), ids=MIXED)
def test_a_mixed_step(batch: list[tuple[int, int]], kind: dict[str, Any]) -> None:
    scene = Scene(batch, 4, 2, 16, torch.bfloat16)
    layer, library = scene.layer(**kind), Counted()
    backend = TritonBackend(prefill=FlashPrefill(library, 9))
    torch.testing.assert_close(scene.attend(layer, backend).double(), scene.expected(layer), rtol=1e-2, atol=1e-2)
    queries = [length for length, _ in batch if length > 1]
    if batch is not MIXED["single queries between"]:
        assert library.calls[-1] == sum(queries)
        scene.attend(layer, backend)
        assert len(library.calls) == 4, "tried once, in two steps"
    else:
        assert library.calls == []


def test_a_decode_step_is_ours() -> None:
    scene, library = Scene(BATCHES["decode, ragged"], 4, 2, 16, torch.bfloat16), Counted()
    scene.attend(scene.layer(), TritonBackend(prefill=FlashPrefill(library, 9)))
    assert library.calls == []


@pytest.mark.parametrize(
    ("dtype", "dim", "major", "served"),
    [
        (torch.bfloat16, 128, 10, True), (torch.float16, 256, 10, True), (torch.bfloat16, 192, 9, True),
        (torch.bfloat16, 192, 10, False), (torch.bfloat16, 20, 9, False), (torch.float32, 64, 9, False),
        (torch.float8_e4m3fn, 64, 9, False), (torch.bfloat16, (192, 128), 10, True),
        (torch.bfloat16, (192, 128), 9, True), (torch.float32, (192, 128), 9, False),
        (torch.bfloat16, (128, 64), 9, False),
    ],
)  # fmt: skip
def test_what_it_serves(dtype: torch.dtype, dim: int | tuple[int, int], major: int, served: bool) -> None:
    """dim: of keys and values, if they differ."""
    key_dim, value_dim = (dim, dim) if isinstance(dim, int) else dim
    scene = Scene([(2, 2)], 2, 1, 16, dtype, value_dim, dim=key_dim)
    prefill = FlashPrefill(lambda q, k, v, **options: varlen_func_4(q, k, v, **options), major)
    assert prefill.serves(scene.layer(), scene.cache, TritonBackend()) is served


@pytest.mark.parametrize("fault", ["raises", "lies", "no number"])
def test_a_library_that_fails_its_trial_is_left_alone(caplog: pytest.LogCaptureFixture, fault: str) -> None:
    def function(q: Tensor, *arguments: Any, **options: Any) -> Tensor:
        if fault == "raises":
            raise AssertionError
        return torch.zeros_like(q) if fault == "lies" else torch.full_like(q, torch.nan)

    scene = Scene(MIXED["prompts"], 4, 2, 16, torch.bfloat16)
    layer, backend = scene.layer(), TritonBackend(prefill=FlashPrefill(function, 9))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            result = scene.attend(layer, backend)
    torch.testing.assert_close(result.double(), scene.expected(layer), rtol=1e-2, atol=1e-2)
    assert len(caplog.records) == 1 and "flash-attn 4" in caplog.text


def test_the_installed_wheel_has_every_argument_that_is_given() -> None:
    """By its source: importing it needs a GPU's libraries."""
    files = importlib.metadata.files("flash-attn-4") or []
    (path,) = [file for file in files if str(file) == "flash_attn/cute/interface.py"]
    functions = {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
    arguments = functions["flash_attn_varlen_func"].args
    assert [argument.arg for argument in arguments.args[:3]] == ["q", "k", "v"]
    given = inspect.signature(varlen_func_4).parameters
    assert given.keys() <= {argument.arg for argument in arguments.args}
