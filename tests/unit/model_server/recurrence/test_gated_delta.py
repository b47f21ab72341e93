"""The gated delta rule: chunks give what one token after another gives, whatever the decays."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model_server.recurrence import gated_delta
from model_server.recurrence.gated_delta import Tokens

HEADS, KEYS, VALUES = 3, 16, 24


def tokens(count: int, decay: float, by_key: bool = False, seed: int = 0) -> Tokens:
    """decay: the largest, by which a state is multiplied with each token."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(count, HEADS, *shape, generator=generator)

    shape = count, HEADS, KEYS if by_key else 1
    decays = torch.full(shape, decay).log() * (1 + torch.rand(shape, generator=generator))
    return Tokens(noise(KEYS), F.normalize(noise(KEYS), dim=-1), noise(VALUES), decays, noise().sigmoid())


def one_by_one(given: Tokens, state: Tensor) -> Tensor:
    """By definition, in float64."""
    outputs = []
    for query, key, value, decay, strength in zip(*(t.double() for t in given), strict=True):
        state *= decay.exp()[:, :, None]
        known = torch.einsum("hk,hkv->hv", key, state)
        state += torch.einsum("hk,hv->hkv", key, (value - known) * strength[:, None])
        outputs.append(torch.einsum("hk,hkv->hv", query, state))
    return torch.stack(outputs)


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("decay", [1e-30, 0.5, 0.99, 0.99999])
@pytest.mark.parametrize("count", [1, 63, 64, 65, 200])
def test_chunks_and_steps_are_the_rule(count: int, decay: float, by_key: bool) -> None:
    given = tokens(count, decay, by_key)
    first = torch.randn(HEADS, KEYS, VALUES, generator=torch.Generator().manual_seed(1))
    exact = first.double()
    expected = one_by_one(given, exact)
    chunked, stepped = first.clone(), first.clone().unsqueeze(0)
    found = gated_delta.sequence(given, chunked)
    steps = [gated_delta.step(given.part(slice(i, i + 1)), stepped) for i in range(count)]
    for outputs, state in ((found, chunked), (torch.cat(steps), stepped[0])):
        assert float((outputs - expected).abs().max() / expected.abs().max()) < 1e-5
        assert float((state - exact).abs().max() / exact.abs().max()) < 1e-5


def test_rows_do_not_touch_each_other() -> None:
    given = tokens(4, 0.9)
    state = torch.randn(4, HEADS, KEYS, VALUES)
    alone = state.clone()
    expected = [gated_delta.step(given.part(slice(i, i + 1)), alone[i : i + 1]) for i in range(3)]
    state[3] = torch.nan
    found = gated_delta.step(given, state)
    assert torch.allclose(found[:3], torch.cat(expected), atol=1e-5)
    assert torch.allclose(state[:3], alone[:3], atol=1e-5)
