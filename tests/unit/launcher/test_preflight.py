"""Refusals before anything is started; and that nothing is left behind."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from launcher import preflight
from launcher.config import LauncherConfig
from launcher.errors import ArgumentValidation


def listener() -> socket.socket:
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen()
    return server


def config(**fields: Any) -> LauncherConfig:
    return LauncherConfig(**fields)


def test_a_free_port() -> None:
    with listener() as server:
        port = server.getsockname()[1]
        with pytest.raises(ArgumentValidation, match=rf"`--port` {port} is in use"):
            preflight.http_port(config(port=port), "127.0.0.1")
    assert preflight.http_port(config(port=port), "127.0.0.1") == port
    assert preflight.http_port(config(port=0), "127.0.0.1") > 0
    assert preflight.http_port(config(port=0, aip_http_port=port), "127.0.0.1") == port


def test_an_address_of_another_machine() -> None:
    with pytest.raises(ArgumentValidation, match="--hostname"):
        preflight.http_port(config(port=0), "192.0.2.1")


@pytest.mark.parametrize(("name", "address"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("localhost", None)])
def test_listening_address(name: str, address: str | None) -> None:
    found = preflight.listening_address(config(hostname=name))
    assert found == address if address else preflight.is_ip_address(found)


def test_unknown_name() -> None:
    with pytest.raises(ArgumentValidation, match="--hostname"):
        preflight.listening_address(config(hostname="no.such.host.invalid"))


def test_rendezvous_port() -> None:
    assert preflight.rendezvous_port(config(), 1) == 29500
    with listener() as server:
        taken = server.getsockname()[1]
        with pytest.raises(ArgumentValidation, match="--master-port"):
            preflight.rendezvous_port(config(master_port=taken), 2)
        # Somewhere else it is not ours to test.
        assert preflight.rendezvous_port(config(master_port=taken, master_addr="10.0.0.1"), 2) == taken


def test_rendezvous_port_moves_when_the_default_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with listener() as server:
        monkeypatch.setattr(preflight, "DEFAULT_MASTER_PORT", server.getsockname()[1])
        port = preflight.rendezvous_port(config(), 2)
        assert port not in (0, server.getsockname()[1])


def test_private_directory() -> None:
    with preflight.endpoints(config(), 2, address="127.0.0.1", port=3) as ends:
        folder = Path(ends.uds_prefix).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert folder.stat().st_uid == os.getuid()
        (folder / "shard-0").touch()
        assert (ends.hostname, ends.port) == ("127.0.0.1", 3)
    assert not folder.exists()


def test_given_prefix_is_locked_and_cleared(tmp_path: Path) -> None:
    prefix = str(tmp_path / "s")
    asked = config(shard_uds_path=prefix)
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(f"{prefix}-0")
    dead.close()
    with preflight.socket_prefix(asked, 1) as found:
        assert found == prefix
        assert not Path(f"{prefix}-0").exists()
        with (
            pytest.raises(ArgumentValidation, match=rf"--shard-uds-path.*pid {os.getpid()}"),
            preflight.socket_prefix(asked, 1),
        ):
            pass
        Path(f"{prefix}-0").touch()
    assert not Path(f"{prefix}-0").exists()
    with preflight.socket_prefix(asked, 1):
        pass


def test_a_living_socket_is_never_taken(tmp_path: Path) -> None:
    prefix = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as alive:
        alive.bind(f"{prefix}-1")
        alive.listen()
        with (
            pytest.raises(ArgumentValidation, match="is listening"),
            preflight.socket_prefix(config(shard_uds_path=prefix), 2),
        ):
            pass
        assert Path(f"{prefix}-1").exists()


@pytest.mark.parametrize("prefix", ["/no/such/folder/s", "/tmp/" + "x" * 120])
def test_impossible_prefixes(prefix: str) -> None:
    with (
        pytest.raises(ArgumentValidation, match="--shard-uds-path"),
        preflight.socket_prefix(config(shard_uds_path=prefix), 1),
    ):
        pass
