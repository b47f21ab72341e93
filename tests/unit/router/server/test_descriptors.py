"""How many connections the limit of open files allows."""

from __future__ import annotations

import resource

import pytest

from router.server.descriptors import RESERVE, allow

ENDLESS = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "allowed", "set_to"),
    [
        ((10_000, 20_000), 4096, None),
        ((ENDLESS, ENDLESS), 4096, None),
        ((1024, 20_000), 4096, 4096 + RESERVE),
        ((1024, ENDLESS), 4096, 4096 + RESERVE),
        ((1024, 2048), 2048 - RESERVE, 2048),
        ((1024, 1024), 1024 - RESERVE, 1024),
        ((64, 64), 1, 64),
    ],
)
def test_the_limit_is_raised_as_far_as_it_goes(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], allowed: int, set_to: int | None
) -> None:
    done: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, values: done.append(values))
    assert allow(4096) == allowed
    assert done == ([] if set_to is None else [(set_to, limits[1])])
