"""What holds after each test that says `usefixtures("nothing_is_left")`, of the `server` of its own file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hostile.invariants import Invariants
from support.running_server import RunningServer


@pytest.fixture(scope="module")
def invariants(server: RunningServer) -> Invariants:
    return Invariants(server)


@pytest.fixture
def nothing_is_left(invariants: Invariants) -> Iterator[None]:
    yield
    invariants.check()
