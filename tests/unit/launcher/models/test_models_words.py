"""`launcher models`, `pull` and `rm` against a hub on this machine and the cache that a download leaves."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.hub_server import Fault, HubServer
from support.screen import screen

from launcher.models.cached import CachedModel
from launcher.models.command import _print_table, run_models, run_remove
from launcher.models.config import ModelsConfig, RemoveConfig

FILES = {
    "config.json": json.dumps({"model_type": "llama"}).encode(), "tokenizer.json": b"{}",
    "model.safetensors": b"\2\0\0\0\0\0\0\0{}",
}  # fmt: skip


def launcher(*words: str, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "launcher", *words], env={**os.environ, **environ}, capture_output=True, text=True,
        timeout=120, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache with one model, which `launcher pull` has fetched."""
    folder = tmp_path_factory.mktemp("home")
    with HubServer() as hub:
        hub.add("org/model", FILES)
        pulled = launcher("pull", "org/model", environ=hub.environment(folder))
        assert pulled.returncode == 0, pulled.stderr
        assert "org/model is in" in pulled.stdout and "{" not in pulled.stdout
        gone = launcher("pull", "org/other", environ=hub.environment(folder))
        assert gone.returncode == 1 and gone.stderr.startswith("error: ") and gone.stderr.count("\n") == 1
    yield folder


def listed(environ: dict[str, str], capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert run_models(ModelsConfig(json=True), environ) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return rows


def test_what_was_pulled_is_listed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environ = {"HF_HOME": str(home)}
    (row,) = listed(environ, capsys)
    assert (row["model"], row["revision"], row["whole"]) == ("org/model", "main", True)
    assert row["size"] == sum(map(len, FILES.values())) and Path(row["path"], "config.json").is_file()
    assert run_models(ModelsConfig(), environ) == 0
    out = capsys.readouterr().out
    assert "org/model" in out and "today" in out and "incomplete" not in out
    (Path(row["path"]).parents[1] / "blobs" / "x.incomplete").touch()
    assert run_models(ModelsConfig(), environ) == 0
    assert "(incomplete)" in capsys.readouterr().out


def test_an_empty_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_models(ModelsConfig(), {"HF_HOME": str(tmp_path)}) == 0
    assert "launcher pull MODEL" in capsys.readouterr().out
    assert listed({"HF_HOME": str(tmp_path)}, capsys) == []


@pytest.mark.parametrize(
    ("config", "error"),
    [
        (RemoveConfig(model_id="org/modle", yes=True), "org/modle is not in the cache"),
        (RemoveConfig(model_id="org/modle", yes=True), "did you mean org/model?"),
        (
            RemoveConfig(model_id="org/model", revision="v2", yes=True),
            "no revision 'v2' in the cache (there: main)",
        ),
        (RemoveConfig(model_id="org/model"), "this is no terminal, so no question can be asked: give --yes"),
    ],
)
def test_removals_that_are_refused(
    home: Path, config: RemoveConfig, error: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    environ = {"HF_HOME": str(home)}
    assert run_remove(config, environ) == 1
    said = capsys.readouterr().err
    assert error in said and said.count("\n") == 1
    assert len(listed(environ, capsys)) == 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_removal_is_asked_about(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test of the model: the answer yes takes it away."""
    environ = {"HF_HOME": str(home)}
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    assert run_remove(RemoveConfig(model_id="org/model"), environ) == 1
    assert "Remove org/model and free" in capsys.readouterr().out
    assert len(listed(environ, capsys)) == 1
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    assert run_remove(RemoveConfig(model_id="org/model", revision="main"), environ) == 0
    assert "Removed org/model @ main" in capsys.readouterr().out
    assert listed(environ, capsys) == []


def test_a_pull_goes_on_where_the_last_one_was_cut_off(tmp_path: Path) -> None:
    files = FILES | {"model.safetensors": b"\2\0\0\0\0\0\0\0{}" + b"\0" * 200_000}
    with HubServer() as hub:
        hub.add("org/model", files)
        hub.fault("model.safetensors", Fault.cut(after=100_000), times=1)
        for _ in range(2):
            ran = launcher("pull", "org/model", environ=hub.environment(tmp_path))
            assert ran.returncode == 0, ran.stderr
        assert len(hub.gets("model.safetensors")) == 2


COMMITS = {"main": "a1" + "0" * 38, "old": "a2" + "0" * 38, "a": "b1" + "0" * 38}
"""Of branches; the name of the third is the beginning of the other commits."""


@pytest.fixture
def three(tmp_path: Path) -> dict[str, str]:
    repository = tmp_path / "hub" / "models--org--m"
    for name, commit in COMMITS.items():
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        blob = repository / "blobs" / f"blob-{name}"
        blob.parent.mkdir(exist_ok=True)
        blob.write_bytes(b"\0" * 100)
        (snapshot / "config.json").symlink_to(blob)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / name).write_text(commit)
    return {"HF_HOME": str(tmp_path)}


@pytest.mark.parametrize(
    ("revision", "removed"),
    [("a", "a"), ("main", "main"), ("a2", "old"), (COMMITS["main"], "main"), ("", None), ("a1x", None)],
)
def test_one_revision_is_removed_and_no_other(
    three: dict[str, str], revision: str, removed: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run_remove(RemoveConfig(model_id="org/m", revision=revision, yes=True), three)
    assert status == (removed is None)
    capsys.readouterr()
    assert {row["revision"] for row in listed(three, capsys)} == set(COMMITS) - {removed}


def test_the_beginning_of_several_commits_is_refused(three: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    (Path(three["HF_HOME"]) / "hub" / "models--org--m" / "refs" / "a").unlink()
    assert run_remove(RemoveConfig(model_id="org/m", revision="a", yes=True), three) == 1
    assert "several revisions that begin with a (there: b1000000, main, old)" in capsys.readouterr().err


def test_a_first_download_that_was_cut_off_can_be_seen_and_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blobs = tmp_path / "hub" / "models--org--m" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "x.incomplete").write_bytes(b"\0" * 300)
    environ = {"HF_HOME": str(tmp_path)}
    (row,) = listed(environ, capsys)
    assert (row["model"], row["size"], row["whole"]) == ("org/m", 300, False)
    assert run_remove(RemoveConfig(model_id="org/m", yes=True), environ) == 0
    assert not blobs.exists()


def test_a_download_that_completes_while_it_is_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = tmp_path / "hub" / "models--org--m" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "x.incomplete").write_bytes(b"\0" * 300)
    gone = blobs / "y.incomplete"
    monkeypatch.setattr("launcher.models.cached._unfinished", lambda _: [gone, blobs / "x.incomplete"])
    environ = {"HF_HOME": str(tmp_path)}
    assert [row["size"] for row in listed(environ, capsys)] == [300]
    monkeypatch.setattr("launcher.models.cached._unfinished", lambda _: [gone])
    assert listed(environ, capsys) == []


def test_what_cannot_be_removed_is_not_said_to_be(
    three: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("shutil.rmtree", refuse)
    assert run_remove(RemoveConfig(model_id="org/m", yes=True), three) == 1
    said = capsys.readouterr()
    assert "org/m could not be removed wholly" in said.err and "Removed" not in said.out


def test_an_interrupt_at_the_question_removes_nothing(
    three: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(Terminal):
        def readline(self, size: int | None = -1, /) -> str:
            raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdin", Interrupted())
    assert run_remove(RemoveConfig(model_id="org/m"), three) == 130
    assert "Removed" not in capsys.readouterr().out
    assert len(listed(three, capsys)) == len(COMMITS)


def test_a_pull_on_a_terminal_shows_a_bar(tmp_path: Path) -> None:
    files = FILES | {"model.safetensors": b"\2\0\0\0\0\0\0\0{}" + b"\0" * 200_000}
    ours, theirs = pty.openpty()
    with HubServer() as hub:
        hub.add("org/model", files)
        hub.fault("model.safetensors", Fault.drip(5_000, 0.1))
        environ = {**os.environ, **hub.environment(tmp_path), "TERM": "xterm", "COLUMNS": "120"}
        command = [sys.executable, "-m", "launcher", "pull", "org/model"]
        process = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs)
        os.close(theirs)
        seen = b""
        with contextlib.suppress(OSError):  # Linux: nobody has the other end any more
            while data := os.read(ours, 4096):
                seen += data
        os.close(ours)
        assert process.wait(120) == 0
    text = seen.decode()
    assert "Downloading" in text and "B/s" in text
    assert [line for line in screen(text) if line] == [line for line in screen(text) if "org/model is in" in line]


def test_names_of_folders_are_shown_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without sequences of a terminal, and without the markup of the library that draws the table."""
    name = "a/\x1b[31mred[bold]x[/bold]"
    model = CachedModel(
        model_id=name, revision="[red]\x1b]0;x\x07", commit="0", size=1, used_at=0.0, is_whole=True, path=tmp_path
    )
    _print_table([model])
    said = capsys.readouterr().out
    assert "\x1b" not in said and "\x07" not in said and "red[bold]x[/bold]" in said and "[red]" in said
