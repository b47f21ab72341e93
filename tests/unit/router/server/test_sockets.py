"""Where the server listens, and how many connections the limit of open files allows."""

from __future__ import annotations

import resource

import pytest

from router.server.sockets import (
    FILES_OF_IMAGES,
    RESERVED_FILES,
    allow_connections,
    allow_images,
    bind,
    warn_without_key,
)

ENDLESS = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "allowed", "set_to"),
    [
        ((10_000, 20_000), 4096, None),
        ((ENDLESS, ENDLESS), 4096, None),
        ((1024, 20_000), 4096, 4096 + RESERVED_FILES + FILES_OF_IMAGES),
        ((1024, ENDLESS), 4096, 4096 + RESERVED_FILES + FILES_OF_IMAGES),
        ((5000, 6000), 4096, 6000),
        ((1024, 2048), 2048 - RESERVED_FILES, 2048),
        ((1024, 1024), 1024 - RESERVED_FILES, None),
        ((128, 128), 48, None),
        ((64, 64), 24, None),
    ],
)
def test_the_limit_is_raised_as_far_as_it_goes(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], allowed: int, set_to: int | None
) -> None:
    done: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, values: done.append(values))
    assert allow_connections(4096) == allowed
    assert done == ([] if set_to is None else [(set_to, limits[1])])


@pytest.mark.parametrize(("asked", "allowed"), [(20, 20), (24, 24), (25, 24)])
def test_no_more_connections_than_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, asked: int, allowed: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, 64))
    assert allow_connections(asked) == allowed
    assert bool(caplog.messages) == (allowed < asked)


@pytest.mark.parametrize(
    ("limit", "allowed"),
    [
        (ENDLESS, FILES_OF_IMAGES),
        (20_000, FILES_OF_IMAGES),
        (5000, 5000 - RESERVED_FILES - 4096),
        (1024, 112),
        (256, 16),
        (64, 3),
    ],
)
def test_large_images_are_some_of_the_open_files(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, limit: int, allowed: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    assert allow_images(4096) == allowed
    assert ("raise the limit (ulimit -n)" in caplog.text) == (allowed < 64)


def test_a_hostname_that_is_no_address(caplog: pytest.LogCaptureFixture) -> None:
    with bind("example.invalid", 0) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"
    assert "example.invalid" in caplog.text
    with bind("::1", 0) as listener:
        assert listener.getsockname()[0] == "::1"


@pytest.mark.parametrize(
    ("hostname", "is_told"),
    [("0.0.0.0", True), ("::", True), ("127.0.0.1", False), ("127.0.0.2", False), ("::1", False)],
)
def test_a_port_that_is_open_to_everybody_is_told(
    caplog: pytest.LogCaptureFixture, hostname: str, is_told: bool
) -> None:
    with bind(hostname, 0) as listener:
        warn_without_key(listener)
        port = listener.getsockname()[1]
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [f"port {port} of {hostname} is served" in text and "--api-key" in text for text in told] == [True] * is_told
