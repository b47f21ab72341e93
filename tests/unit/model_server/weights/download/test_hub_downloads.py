"""`download` with the real hub library, against a hub on loopback that fails in every way."""

from __future__ import annotations

import errno
import json
import logging
import shutil
from pathlib import Path

import pytest
from hub_files import ID, LARGE, SIDE, SMALL, fetch, weights_of
from support.hub_server import Fault, HubServer, Repository, etag

from model_server.errors import StartupError
from model_server.weights.download.download import TRIES
from model_server.weights.download.hub import HuggingFaceHub
from model_server.weights.download.progress import DownloadProgress
from model_server.weights.hub_cache import entry
from model_server.weights.locate import resolve, resolve_merged


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


def test_bytes_are_counted_once(hub: HubServer, repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is sent twice because it was damaged or broke off."""
    hub.fault("model.safetensors", Fault.cut(after=100_000))
    hub.fault("model.safetensors", Fault.corrupt())
    done: list[int] = []
    monkeypatch.setattr(DownloadProgress, "received", lambda self, num_bytes: done.append(num_bytes))
    monkeypatch.setattr(DownloadProgress, "found", lambda self, num_bytes: done.append(num_bytes))
    assert weights_of(fetch()) == LARGE
    assert sum(done) == len(LARGE) + len(SIDE["config.json"]) + len(SIDE["tokenizer.json"])


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
        ({}, "hf_\u00e4", None, r"the token \(HF_TOKEN\) has letters that no token has: copy it again"),
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


def test_an_adapter_comes_with_its_base_model(hub: HubServer) -> None:
    config = json.dumps({"base_model_name_or_path": "org/base"}).encode()
    hub.add(ID, {"adapter_config.json": config, "adapter_model.safetensors": SMALL, "tokenizer.json": b"{}"})
    hub.add("org/base", {"config.json": b"{}", "model.safetensors": SMALL, "tokenizer.json": b"{}"})
    base = fetch()
    assert base.parts[-3] == "models--org--base" and fetch() == base
    directory, adapter = resolve_merged(ID, None)
    assert directory == base and adapter is not None
    assert sorted(path.name for path in adapter.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


@pytest.mark.parametrize("base", ["/etc", "../base", "org/base/more", "", None])
def test_an_adapter_of_the_hub_names_a_repository(hub: HubServer, base: str | None) -> None:
    config = json.dumps({"base_model_name_or_path": base}).encode()
    hub.add(ID, {"adapter_config.json": config, "adapter_model.safetensors": SMALL})
    with pytest.raises(
        StartupError, match=r"holds an adapter (whose base model .* is no repo|that does not name its b)"
    ):
        fetch()


def test_no_tokenizer_is_seen_before_the_weights_are_fetched(hub: HubServer) -> None:
    hub.add(ID, {"config.json": b"{}", "model.safetensors": SMALL})
    with pytest.raises(StartupError, match=r"no tokenizer.json, and nothing to make one of \(tokenizer.model, vocab"):
        fetch()
    assert not hub.gets("model.safetensors")


def test_an_odd_etag_is_no_path(hub: HubServer, repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.hub_server.etag", lambda name, data: "../../../escaped")
    with pytest.raises(StartupError, match="no usable ETag"):
        fetch()


def test_not_an_id() -> None:
    with pytest.raises(StartupError, match="neither a directory nor a hub id"):
        HuggingFaceHub().repository("a/b/c", None)
