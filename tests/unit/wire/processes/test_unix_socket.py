"""Paths of unix sockets: a dead one of this user is removed, and nothing else."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from wire.processes.unix_socket import PathTakenError, make_way


@pytest.fixture
def dead(tmp_path: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "dead"))
    return tmp_path / "dead"


def test_a_dead_socket_goes(dead: Path) -> None:
    make_way(str(dead))
    assert not dead.exists()
    make_way(str(dead))


def test_a_living_socket_stays(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as alive:
        alive.bind(str(tmp_path / "s"))
        alive.listen()
        with pytest.raises(PathTakenError, match=f"listening on {tmp_path}/s"):
            make_way(str(tmp_path / "s"))
    assert (tmp_path / "s").exists()


def test_everything_else_stays(tmp_path: Path, dead: Path) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(dead)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("file", "folder", "fifo", "link", "dangling"):
        path = tmp_path / name
        with pytest.raises(PathTakenError, match=f"{path} exists and is not a socket"):
            make_way(str(path))
        assert os.path.lexists(path)
    assert dead.exists()


def test_a_socket_of_another_user_stays(dead: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: dead.stat().st_uid + 1)
    with pytest.raises(PathTakenError, match="of another user"):
        make_way(str(dead))
    assert dead.exists()


def test_a_path_that_cannot_be_looked_at(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PathTakenError, match="cannot be used as a socket: Not a directory"):
        make_way(str(tmp_path / "file" / "s"))
