"""Bytes from a hub on loopback that fails in every way: sent once, whole, and onto a disk that may be full."""

from __future__ import annotations

import errno
import logging
import re
import threading
from pathlib import Path

import pytest
from hub_files import ID, LARGE, SIDE, fetch, weights_of
from support.hub_server import Fault, HubServer, Repository, etag, wait_until

from model_server.errors import StartupError
from model_server.weights.download.download import TRIES, download
from model_server.weights.hub_cache import entry


def test_each_file_is_sent_once(hub: HubServer, repository: Repository, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    fetch()
    fetch()
    assert hub.sent("model.safetensors") == len(LARGE)
    assert caplog.messages[-1] == "Files are already present on the host. Skipping download."
    assert [m for m in caplog.messages if re.fullmatch(r"Download: \[3/3] -- ETA: 0 s", m)]


@pytest.mark.parametrize(
    "fault",
    [Fault.cut(after=100_000), Fault.cut(after=0), Fault.answer(503), Fault.answer(429, Retry_After="0")],
    ids=["cut", "cut at once", "503", "429"],
)
def test_a_broken_transfer_goes_on_where_it_broke(hub: HubServer, repository: Repository, fault: Fault) -> None:
    hub.fault("model.safetensors", fault, times=2)
    assert weights_of(fetch()) == LARGE
    assert len(hub.gets("model.safetensors")) >= 3
    assert hub.sent("model.safetensors") == len(LARGE)


def test_a_stall_ends_by_itself(hub: HubServer, repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 1)
    hub.fault("model.safetensors", Fault.stall(after=200_000))
    assert weights_of(fetch()) == LARGE
    assert hub.gets("model.safetensors")[-1].range == "bytes=200000-"


def test_damaged_bytes_are_fetched_again(
    hub: HubServer, repository: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    hub.fault("model.safetensors", Fault.corrupt())
    hub.fault("config.json", Fault.corrupt())
    directory = fetch()
    assert weights_of(directory) == LARGE
    assert (directory / "config.json").read_bytes() == SIDE["config.json"]
    assert sum("the checksum is not the hub's" in message for message in caplog.messages) == 2


def test_bytes_that_stay_damaged_are_not_served(hub: HubServer, repository: Repository) -> None:
    hub.fault("model.safetensors", Fault.corrupt(), times=TRIES)
    with pytest.raises(StartupError, match="checksum"):
        fetch()
    assert not (entry(ID) / "blobs" / etag("model.safetensors", LARGE)).exists()
    assert not (entry(ID) / "refs" / "main").exists()


def test_partial_files_of_killed_downloads_are_removed(hub: HubServer, repository: Repository) -> None:
    """But not one that another process is writing."""
    from huggingface_hub.utils import WeakFileLock

    locks = entry(ID).parent / ".locks" / entry(ID).name
    locks.mkdir(parents=True)
    blobs = entry(ID) / "blobs"
    blobs.mkdir(parents=True)
    left, written = blobs / f"{etag('model.safetensors', LARGE)}.0a1b2c3d.incomplete", blobs / "abc.12345678.incomplete"
    for partial in (left, written):
        partial.write_bytes(LARGE[:123_456])
    with WeakFileLock(locks / "abc.lock"):
        assert weights_of(fetch()) == LARGE
    assert not left.exists() and written.exists()


def test_truncated_files_in_the_cache(hub: HubServer) -> None:
    template = "additional_chat_templates/tools.jinja"
    hub.add(ID, {**SIDE, "model.safetensors": LARGE, template: b"a template"})
    directory = fetch()
    for name in ("model.safetensors", template):
        (directory / name).resolve().write_bytes(b"x")
    assert weights_of(fetch()) == LARGE
    assert hub.sent("model.safetensors") == 2 * len(LARGE)
    assert (directory / template).read_bytes() == b"a template"


def test_when_one_file_fails_the_others_are_given_up(
    hub: HubServer, repository: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    """After a little of a large file that would take minutes."""
    hub.fault("tokenizer.json", Fault.answer(403))
    hub.fault("model.safetensors", Fault.drip(1000, 0.05))
    with pytest.raises(StartupError, match="the hub refuses access"):
        download(ID, None, wait_s=0)
    wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith("download-")], "their ends")
    assert hub.sent("model.safetensors") < len(LARGE)
    assert not list((entry(ID) / "blobs").glob("*.incomplete"))
    assert not [message for message in caplog.messages if "again in" in message]


def test_the_disk_is_asked_before_the_first_byte(hub: HubServer, repository: Repository) -> None:
    hub.fault("model.safetensors", Fault.claim(10**17))
    with pytest.raises(StartupError, match=r"needs 88.8 PiB and the disk of \S+ has .* free: make room, or set HF_"):
        fetch()
    assert not [request for request in hub.requests if "/resolve/" in request.path]


def test_a_full_disk_is_explained(hub: HubServer, repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.file_download._chmod_and_move", full)
    with pytest.raises(StartupError, match=r"disk of the cache \S+ is full.*HF_HOME \(or --huggingface-hub-cache\)"):
        fetch()


def test_a_cache_that_cannot_be_written(
    hub: HubServer, repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
    with pytest.raises(StartupError, match=r"cannot write the cache \S+ \(Not a directory\): set HF_HOME \(or --hug"):
        fetch()


def test_errors_of_the_disk_are_not_retried(
    hub: HubServer, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*args: object, **options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("huggingface_hub.file_download._chmod_and_move", read_only)
    with pytest.raises(StartupError, match=r"cannot write the cache \S+ \(Read-only file system\)"):
        fetch()
    assert max(len(hub.gets(name)) for name in (*SIDE, "model.safetensors")) == 1


def test_two_at_once_share_the_work(hub: HubServer, repository: Repository) -> None:
    hub.fault("model.safetensors", Fault.drip(30_000, 0.02))
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(weights_of(fetch()))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [LARGE, LARGE]
    assert hub.sent("model.safetensors") == len(LARGE)
