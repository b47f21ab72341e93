"""`download` with the real hub library, against a hub on loopback that fails in every way."""

from __future__ import annotations

import errno
import json
import logging
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hub_server import Fault, HubServer, Repository, etag, wait_until

from model_server.errors import StartupError
from model_server.weights.download.download import TRIES, download
from model_server.weights.download.hub import HuggingFaceHub
from model_server.weights.download.progress import DownloadProgress
from model_server.weights.hub_cache import entry
from model_server.weights.locate import resolve

ID = "org/name"


def safetensors(num_bytes: int, seed: int = 0) -> bytes:
    """A valid file that holds one tensor of `num_bytes` bytes, different in every place."""
    header = json.dumps({"x": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}}).encode()
    header += b" " * (-len(header) % 8)
    body = b"".join(((n * 2654435761 + seed) & 0xFFFFFFFF).to_bytes(4, "little") for n in range(-(-num_bytes // 4)))
    return len(header).to_bytes(8, "little") + header + body[:num_bytes]


SMALL = safetensors(1000)
LARGE = safetensors(300_000)
SIDE = {"config.json": b'{"model_type": "llama"}', "tokenizer.json": b"{}", "README.md": b"# hello"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    with HubServer() as server:
        for name, value in {
            "ENDPOINT": server.url, "HF_HUB_OFFLINE": False, "HF_HUB_CACHE": str(tmp_path / "hub"),
            "HF_HUB_DOWNLOAD_TIMEOUT": 10, "HF_TOKEN_PATH": str(tmp_path / "token"), "HF_HUB_ETAG_TIMEOUT": 20,
        }.items():  # fmt: skip
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield server


@pytest.fixture
def repository(hub: HubServer) -> Repository:
    return hub.add(ID, {**SIDE, "model.safetensors": LARGE})


def fetch(revision: str | None = None) -> Path:
    return download(ID, revision, wait_s=0)


def weights_of(directory: Path) -> bytes:
    return (directory / "model.safetensors").read_bytes()


def test_the_cache_is_the_library_s_own(hub: HubServer, repository: Repository) -> None:
    """Blobs by ETag, links in the snapshot of the commit, the branch in refs; nothing that serving has no use for."""
    directory = fetch()
    commit = repository.refs["main"]
    assert directory == entry(ID) / "snapshots" / commit
    assert {path.name for path in directory.iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}
    assert (directory / "model.safetensors").resolve() == entry(ID) / "blobs" / etag("model.safetensors", LARGE)
    assert (entry(ID) / "refs" / "main").read_text() == commit
    assert weights_of(directory) == LARGE
    assert resolve(ID, None) == directory
    assert not list((entry(ID) / "blobs").glob("*.incomplete"))
    from huggingface_hub import snapshot_download

    assert snapshot_download(ID, local_files_only=True) == str(directory)


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


def test_more_breaks_than_tries_while_something_comes(hub: HubServer, repository: Repository) -> None:
    hub.fault("model.safetensors", Fault.cut(after=20_000), times=2 * TRIES)
    assert weights_of(fetch()) == LARGE


def test_xet_is_the_library_s_business(
    hub: HubServer, repository: Repository, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where its own switch asks for it; the progress is told all the same."""
    monkeypatch.setattr("huggingface_hub.constants.HF_XET_HIGH_PERFORMANCE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", False)
    monkeypatch.setattr(
        "model_server.weights.download.transfer.Transfer.run", lambda self: pytest.fail("not asked for")
    )
    told: list[int] = []
    monkeypatch.setattr(DownloadProgress, "received", lambda self, num_bytes: told.append(num_bytes))
    assert weights_of(fetch()) == LARGE
    assert sum(told) == len(LARGE) + len(SIDE["config.json"]) + len(SIDE["tokenizer.json"])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    repository.commit({**SIDE, "model.safetensors": SMALL})
    with pytest.raises(pytest.fail.Exception, match="not asked for"):
        fetch()


def test_a_stall_ends_by_itself(
    hub: HubServer, repository: Repository, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 1)
    hub.fault("model.safetensors", Fault.stall(after=200_000))
    assert weights_of(fetch()) == LARGE
    assert "model.safetensors: not a byte for 1 s; again in 0 s (1 of 4)" in caplog.messages
    assert hub.gets("model.safetensors")[-1].range == "bytes=200000-"


def test_a_server_without_ranges_starts_over(hub: HubServer, repository: Repository) -> None:
    hub.fault("model.safetensors", Fault.cut(after=100_000))
    hub.fault("model.safetensors", Fault.no_ranges())
    assert weights_of(fetch()) == LARGE


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


def test_a_partial_file_of_an_earlier_run(hub: HubServer, repository: Repository) -> None:
    blobs = entry(ID) / "blobs"
    blobs.mkdir(parents=True)
    partial = blobs / f"{etag('model.safetensors', LARGE)}.incomplete"
    partial.write_bytes(LARGE[:123_456])
    assert weights_of(fetch()) == LARGE
    assert hub.sent("model.safetensors") == len(LARGE) - 123_456
    assert not partial.exists()


@pytest.mark.parametrize("content", [b"x" * 1000, b"x" * len(LARGE), LARGE + b"more"], ids=["other", "whole", "longer"])
def test_a_partial_file_that_is_wrong(hub: HubServer, repository: Repository, content: bytes) -> None:
    blobs = entry(ID) / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{etag('model.safetensors', LARGE)}.incomplete").write_bytes(content)
    assert weights_of(fetch()) == LARGE


def test_truncated_files_in_the_cache(hub: HubServer) -> None:
    template = "additional_chat_templates/tools.jinja"
    hub.add(ID, {**SIDE, "model.safetensors": LARGE, template: b"a template"})
    directory = fetch()
    for name in ("model.safetensors", template):
        (directory / name).resolve().write_bytes(b"x")
    assert weights_of(fetch()) == LARGE
    assert hub.sent("model.safetensors") == 2 * len(LARGE)
    assert (directory / template).read_bytes() == b"a template"


def test_a_restart_asks_the_hub_once(hub: HubServer) -> None:
    index = json.dumps({"weight_map": {"x": "model-1.safetensors"}}).encode()
    hub.add(ID, {**SIDE, "model-1.safetensors": SMALL, "model.safetensors.index.json": index})
    fetch()
    asked = len(hub.requests)
    fetch()
    assert [request.path for request in hub.requests[asked:]] == ["/api/models/org/name"]


def test_the_token_is_for_the_hub_alone(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(ID, {**SIDE, "model.safetensors": SMALL}, is_private=True, readers=frozenset({"hf_good"}))
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    fetch()
    hosts = {(request.host.split(":")[0], request.token) for request in hub.requests}
    assert ("localhost", None) in hosts
    assert ("localhost", "hf_good") not in hosts
    assert ("127.0.0.1", "hf_good") in hosts


GATED = {"is_gated": True, "readers": frozenset({"hf_good"})}
PRIVATE = {"is_private": True, "readers": frozenset({"hf_good"})}


@pytest.mark.parametrize(
    ("settings", "token", "revision", "said"),
    [
        (GATED, None, None, r"access is gated: accept its licence at http://\S+/org/name, then set HF_TOKEN"),
        (GATED, "hf_other", None, r"gated, and the account of HF_TOKEN has none: accept the licence at http"),
        (PRIVATE, None, None, r"no such model, or it is private: check the id; for a private one set HF_TOKEN"),
        (PRIVATE, "hf_other", None, r"it is private and the token \(HF_TOKEN\) may not read it: check the id"),
        (PRIVATE, "hf_bad", None, r"does not accept the token \(HF_TOKEN\): expired or mistyped"),
        ({}, None, "nowhere", r"no revision 'nowhere'; --revision takes a branch, a tag or a full commit"),
    ],
)
def test_refusals_say_what_to_do(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, settings: dict[str, object], token: str | None,
    revision: str | None, said: str,
) -> None:  # fmt: skip
    """One line, one try, nothing in the cache that could pass for a model."""
    hub.add(ID, {**SIDE, "model.safetensors": SMALL}, **settings)
    hub.tokens.add("hf_other")
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(StartupError, match=said) as caught:
        fetch(revision)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("--model-id org/name: ")
    assert not list(entry(ID).glob("snapshots/*/*"))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault.answer(429, Retry_After="0"), r"rate limit is reached \(HTTP 429\); with a token \(HF_TOKEN\)"),
        (Fault.answer(500), r"cannot be reached \(the hub answered HTTP 500\)"),
    ],
)
def test_patience_ends(hub: HubServer, repository: Repository, fault: Fault, said: str) -> None:
    hub.fault("/api/models/org/name", fault, times=100)
    with pytest.raises(StartupError, match=said):
        fetch()
    assert sum(request.path == "/api/models/org/name" for request in hub.requests) == TRIES


def test_a_moved_branch_is_followed(hub: HubServer, repository: Repository) -> None:
    first = fetch()
    repository.commit({**SIDE, "model.safetensors": SMALL})
    second = fetch()
    assert second != first
    assert weights_of(second) == SMALL
    assert resolve(ID, None) == second
    assert len(hub.gets("config.json")) == 1  # the same in both commits


def test_branch_tag_and_commit(hub: HubServer, repository: Repository) -> None:
    other = repository.commit({**SIDE, "model.safetensors": SMALL}, "v1.0", "feature/x")
    for revision in ("v1.0", "feature/x", other):
        assert weights_of(fetch(revision)) == SMALL
        assert resolve(ID, revision).name == other
    assert weights_of(fetch()) == LARGE
    asked = len(hub.requests)
    fetch(other)
    assert len(hub.requests) == asked  # what a commit means cannot change


def test_a_commit_that_was_not_fetched_wholly_is_completed(hub: HubServer, repository: Repository) -> None:
    commit = repository.commit({**SIDE, "chat_template.jinja": b"{{ messages }}", "model.safetensors": SMALL})
    directory = fetch(commit)
    (directory / "chat_template.jinja").unlink()
    (entry(ID) / "complete" / commit).unlink()
    assert (fetch(commit) / "chat_template.jinja").read_bytes() == b"{{ messages }}"


def test_a_commit_in_a_cache_that_can_only_be_read(
    hub: HubServer, repository: Repository, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Filled by another program, so that nothing says it is whole; also where something optional is missing."""
    index = json.dumps({"weight_map": {"x": "model.safetensors"}}).encode()
    files = {**SIDE, "model.safetensors.index.json": index, "model.safetensors": SMALL}
    commit = repository.commit(files | {"chat_template.jinja": b""})
    directory = fetch(commit)
    shutil.rmtree(entry(ID) / "complete")

    def refuse(*args: object, **options: object) -> None:
        raise PermissionError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    monkeypatch.setattr(Path, "touch", refuse)
    assert fetch(commit) == directory
    (directory / "chat_template.jinja").unlink()
    assert fetch(commit) == directory
    assert "Read-only file system" in caplog.messages[-1] and "serving what is cached" in caplog.messages[-1]


@pytest.mark.parametrize("fault", [Fault.answer(503), Fault.answer(404, X_Error_Code="RepoNotFound")])
def test_a_complete_snapshot_is_served_without_the_hub(
    hub: HubServer, repository: Repository, caplog: pytest.LogCaptureFixture, fault: Fault
) -> None:
    directory = fetch()
    hub.fault("/api/models/org/name", fault, times=100)
    caplog.clear()
    assert fetch() == directory
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert f"serving what is cached, commit {directory.name}" in record.getMessage()
    assert record.levelno == logging.WARNING


def test_the_old_commit_is_served_when_the_new_one_cannot_be_fetched(
    hub: HubServer, repository: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    directory = fetch()
    repository.commit({**SIDE, "model.safetensors": SMALL})
    hub.fault("model.safetensors", Fault.answer(500), times=100)
    assert fetch() == directory
    assert resolve(ID, None) == directory
    assert f"serving what is cached, commit {directory.name}" in caplog.messages[-1]


def test_when_one_file_fails_the_others_are_given_up(
    hub: HubServer, repository: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    """After a little of a large file that would take minutes; what came of it is kept."""
    hub.fault("tokenizer.json", Fault.answer(403))
    hub.fault("model.safetensors", Fault.drip(1000, 0.05))
    with pytest.raises(StartupError, match="the hub refuses access"):
        download(ID, None, wait_s=0)
    partial = entry(ID) / "blobs" / f"{etag('model.safetensors', LARGE)}.incomplete"
    wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith("download-")], "their ends")
    assert not partial.exists() or partial.stat().st_size < len(LARGE)
    assert not [message for message in caplog.messages if "again in" in message]


def test_offline(hub: HubServer, repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(StartupError, match="HF_HUB_OFFLINE is set"):
        fetch()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    directory = fetch()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    asked = len(hub.requests)
    assert fetch() == directory
    assert len(hub.requests) == asked


def test_an_adapter_is_no_model(hub: HubServer) -> None:
    config = json.dumps({"base_model_name_or_path": "org/base"}).encode()
    hub.add(ID, {"adapter_config.json": config, "adapter_model.safetensors": SMALL, "tokenizer.json": b"{}"})
    with pytest.raises(StartupError, match=r"an adapter \(LoRA\) of org/base.*serve org/base.*--lora-adapters"):
        fetch()
    assert not hub.gets("adapter_model.safetensors")


def test_no_tokenizer_is_seen_before_the_weights_are_fetched(hub: HubServer) -> None:
    hub.add(ID, {"config.json": b"{}", "model.safetensors": SMALL})
    with pytest.raises(StartupError, match=r"no tokenizer.json, and nothing to make one of \(tokenizer.model, vocab"):
        fetch()
    assert not hub.gets("model.safetensors")


def test_the_disk_is_asked_before_the_first_byte(hub: HubServer, repository: Repository) -> None:
    hub.fault("model.safetensors", Fault.claim(10**17))
    with pytest.raises(StartupError, match=r"needs 88.8 PiB and the disk of \S+ has .* free: make room, or set HF_"):
        fetch()
    assert not [request for request in hub.requests if "/resolve/" in request.path]


def test_a_full_disk_is_explained(hub: HubServer, repository: Repository) -> None:
    blobs = entry(ID) / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{etag('model.safetensors', LARGE)}.incomplete").symlink_to("/dev/full")
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

    monkeypatch.setattr("model_server.weights.download.transfer.os.replace", read_only)
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


def test_an_odd_etag_is_no_path(hub: HubServer, repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.hub_server.etag", lambda name, data: "../../../escaped")
    with pytest.raises(StartupError, match="no usable ETag"):
        fetch()


def test_not_an_id() -> None:
    with pytest.raises(StartupError, match="neither a directory nor a hub id"):
        HuggingFaceHub().repository("a/b/c", None)
