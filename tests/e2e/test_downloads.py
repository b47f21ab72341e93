"""Real processes against a hub on loopback: a model served from it, and everything that ends a download early."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.hub_server import Fault, HubServer, Repository, wait_until
from support.running_server import RunningServer, free_port, running_server
from support.tiny_drafters import medusa
from support.tiny_models import tiny_checkpoint
from support.tokenizer_kinds import KINDS

pytestmark = pytest.mark.e2e

ID = "org/tiny"
ENDS_S = 120.0
"""Any of the processes below, on a busy machine."""
SOON_S = 60.0
"""An end that waits for nothing; what it could wait for takes minutes."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A tiny model whose tokenizer is vocab.json and merges.txt."""
    folder = tiny_checkpoint("llama", tmp_path_factory.mktemp("tiny"), with_tokenizer=False)
    config = (folder / "config.json").read_bytes()
    KINDS["gpt2"](folder)
    (folder / "config.json").write_bytes(config)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


@pytest.fixture
def repository(hub: HubServer, files: dict[str, bytes]) -> Repository:
    return hub.add(ID, {**files, "tokenizer.json": b"{}"})


def partial_files(home: Path) -> list[Path]:
    return list((home / "hub" / "models--org--tiny" / "blobs").glob("*.incomplete"))


@contextlib.contextmanager
def downloading(home: Path, hub: HubServer, *options: str, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    """`model-server download-weights`, its output in `home`/log."""
    home.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "model_server", "download-weights", ID, *options]
    with (home / "log").open("ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            env={**os.environ, **hub.environment(home, **environ)},
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def download(home: Path, hub: HubServer, *options: str, status: int = 0, **environ: str) -> str:
    """What a download that ends by itself has written."""
    with downloading(home, hub, *options, **environ) as process:
        found = process.wait(ENDS_S)
    log = (home / "log").read_text()
    (home / "log").unlink()
    assert found == status, log
    return log


@pytest.fixture(scope="module")
def server(
    files: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[HubServer, RunningServer]]:
    """`launcher --model-id org/tiny`, from a hub that cuts, stalls, and lies before it delivers."""
    home = tmp_path_factory.mktemp("home")
    with HubServer() as hub:
        hub.add(ID, files)
        hub.fault("model.safetensors", Fault.cut(after=100_000))
        hub.fault("model.safetensors", Fault.stall(after=100_000))
        hub.fault("vocab.json", Fault.corrupt())
        hub.fault("merges.txt", Fault.answer(503))
        environ = hub.environment(home, HF_HUB_DOWNLOAD_TIMEOUT="2")
        with running_server(ID, environ=environ) as running:
            yield hub, running


def post(server: RunningServer, path: str, body: object) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        return json.loads(response.read())
    finally:
        connection.close()


@pytest.mark.long
def test_served_whatever_the_network_does(server: tuple[HubServer, RunningServer], files: dict[str, bytes]) -> None:
    hub, running = server
    answer = post(running, "/generate", {"inputs": "Hello", "parameters": {"max_new_tokens": 4, "details": True}})
    assert len(answer["details"]["tokens"]) == 4
    log = running.log()
    assert f"{ID} at revision main is commit {hub.repositories[ID].refs['main']}" in log
    assert "vocab.json: the checksum is not the hub's" in log
    assert re.search(r"Download: \[\d+/\d+] -- ETA: 0 s", log)
    assert len(hub.gets("model.safetensors")) == 3


def test_the_tokenizer_was_made_once_for_both(
    server: tuple[HubServer, RunningServer], files: dict[str, bytes], tmp_path: Path
) -> None:
    """The router's ids are those of transformers; that the shard takes the same file is in tests/contract."""
    from transformers import AutoTokenizer

    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    text = "naïve café, 日本語 and an emoji 🙂"
    want = AutoTokenizer.from_pretrained(tmp_path)(text).input_ids
    assert [token["id"] for token in post(server[1], "/tokenize", {"inputs": text})] == want
    assert server[1].log().count("No tokenizer.json: making one of vocab.json and merges.txt") == 1


def test_killed_in_the_middle_and_started_again(
    hub: HubServer, repository: Repository, files: dict[str, bytes], tmp_path: Path
) -> None:
    """Whole files are kept, and of the others nothing is left."""
    hub.fault("model.safetensors", Fault.stall(after=400_000))
    with downloading(tmp_path, hub, HF_HUB_DOWNLOAD_TIMEOUT="600") as process:
        wait_until(lambda: re.search(r"Downloaded \S+/config.json", (tmp_path / "log").read_text()), "a whole file")
        wait_until(lambda: partial_files(tmp_path) and hub.sent("model.safetensors") == 400_000, "half a file")
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert partial_files(tmp_path)
    (tmp_path / "log").unlink()
    download(tmp_path, hub)
    assert not partial_files(tmp_path)
    assert len(hub.gets("config.json")) == 1


def test_sigterm_ends_a_launch_that_downloads(hub: HubServer, repository: Repository, tmp_path: Path) -> None:
    """While nothing comes from the hub for as long as a client waits."""
    hub.fault("model.safetensors", Fault.stall(after=300_000))
    environ = hub.environment(tmp_path, HF_HUB_DOWNLOAD_TIMEOUT="600")
    with running_server(ID, environ=environ, wait=False) as launched:
        wait_until(lambda: partial_files(tmp_path) and hub.sent("model.safetensors") == 300_000, "half a file")
        launched.process.send_signal(signal.SIGTERM)
        assert launched.process.wait(SOON_S) == 0
        assert "did not stop" not in launched.log()


@pytest.mark.parametrize(
    ("method", "flag", "message"),
    [
        ("quanto", None, f"{ID} is quantized with quanto, which is not served; served are gptq, awq, "),
        pytest.param(
            "gptq", "fp8",
            f"`--quantize fp8` quantizes plain weights on load, but {ID} is stored as gptq; leave it out",
            marks=pytest.mark.long,
        ),
    ],
)  # fmt: skip
def test_what_is_not_served_quantized_is_refused_before_its_weights_come(
    method: str, flag: str | None, message: str, hub: HubServer, files: dict[str, bytes], tmp_path: Path
) -> None:
    config = json.loads(files["config.json"]) | {"quantization_config": {"quant_method": method}}
    hub.add(ID, {**files, "tokenizer.json": b"{}", "config.json": json.dumps(config).encode()})
    options = () if flag is None else ("--quantize", flag)
    with running_server(ID, *options, environ=hub.environment(tmp_path), wait=False) as launched:
        assert launched.process.wait(ENDS_S) == 1
        assert message in launched.log().splitlines()[-1]
    assert hub.sent("config.json") > 0
    assert hub.sent("model.safetensors") == 0


def test_sigterm_while_it_waits_for_a_rate_limit(hub: HubServer, repository: Repository, tmp_path: Path) -> None:
    hub.fault("/api/models/org/tiny", Fault.answer(429, Retry_After="250"), times=9)
    with downloading(tmp_path, hub) as process:
        wait_until(lambda: "again in 250 s" in (tmp_path / "log").read_text(), "the wait")
        process.send_signal(signal.SIGTERM)
        assert process.wait(SOON_S) == 128 + signal.SIGTERM
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.long
def test_a_draft_model_of_the_hub_is_fetched_with_the_model(
    hub: HubServer, files: dict[str, bytes], tmp_path: Path
) -> None:
    hub.add(ID, files)
    drafts = hub.add("org/drafts", files)
    commit = drafts.refs["main"]
    with running_server(ID, "--speculator", f"org/drafts@{commit}", environ=hub.environment(tmp_path)) as running:
        post(running, "/generate", {"inputs": "Hello", "parameters": {"max_new_tokens": 4}})
        assert f"org/drafts at revision {commit} is commit {commit}" in running.log()
    assert len(hub.gets("model.safetensors")) == 2
    vocabulary = json.loads(files["vocab.json"])
    vocabulary |= {"a": vocabulary["b"], "b": vocabulary["a"]}
    hub.add("org/strange", {**files, "vocab.json": json.dumps(vocabulary).encode()})
    for place, words in (("org/strange", "another text than"), ("org/none", "the hub has no such model")):
        refusal = pytest.raises(AssertionError, match=f"Error: .*--speculator {place}: .*{words}")
        with refusal, running_server(ID, "--speculator", place, environ=hub.environment(tmp_path)):
            pass


@pytest.mark.long
def test_heads_are_fetched_with_the_model_that_they_are_for(
    hub: HubServer, files: dict[str, bytes], tmp_path: Path
) -> None:
    """As in TGI they are `--model-id`, and without a tokenizer; and again from the cache."""
    config = json.loads(files["config.json"])
    sizes = {"hidden": config["hidden_size"], "vocab": config["vocab_size"]}
    heads = {p.name: p.read_bytes() for p in medusa(tmp_path / "medusa", base=ID, **sizes).iterdir()}
    hub.add(ID, files)
    hub.add("org/heads", heads)
    for _ in range(2):
        with running_server("org/heads", environ=hub.environment(tmp_path)) as running:
            body = {"model": "org/heads", "prompt": "Hello", "max_tokens": 4}
            assert post(running, "/v1/completions", body)["model"] == "org/heads"
            assert f"org/heads drafts for {ID}, which is served" in running.log()
            assert "Drafts by medusa models, 4 heads" in running.log()
    assert len(hub.gets("model.safetensors")) == len(hub.gets("medusa_lm_head.safetensors")) == 1
    refusal = pytest.raises(AssertionError, match=r"Error: .*Speculate is set to `5` but this medusa models only has")
    with refusal, running_server("org/heads", "--speculate", "5", environ=hub.environment(tmp_path)):
        pass


@pytest.mark.parametrize("spelling", ["1", "true", "yes"])
def test_offline(hub: HubServer, repository: Repository, tmp_path: Path, spelling: str) -> None:
    assert "HF_HUB_OFFLINE is set" in download(tmp_path, hub, status=1, HF_HUB_OFFLINE=spelling)
    assert not hub.requests


def test_a_restart_without_the_hub(hub: HubServer, repository: Repository, tmp_path: Path) -> None:
    download(tmp_path, hub)
    unreachable = {"HF_ENDPOINT": f"http://127.0.0.1:{free_port()}"}
    log = download(tmp_path, hub, **unreachable)
    assert log.count(" WARN ") == 1
    assert f"serving what is cached, commit {repository.refs['main']}" in log


def test_a_bar_on_a_terminal(hub: HubServer, repository: Repository, tmp_path: Path) -> None:
    """The launcher's terminal; the download itself has none."""
    hub.fault("model.safetensors", Fault.drip(8_000, 0.3))
    screen, terminal = pty.openpty()
    seen = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):  # the terminal's end
            while data := os.read(screen, 4096):
                seen.extend(data)

    threading.Thread(target=read, daemon=True).start()
    process = subprocess.Popen(
        [sys.executable, "-m", "launcher", "--model-id", ID, "--port", str(free_port())], stdin=subprocess.DEVNULL,
        stdout=terminal, env={**os.environ, **hub.environment(tmp_path, TERM="xterm", COLUMNS="200")},
    )  # fmt: skip
    os.close(terminal)
    bar = re.compile(r"Downloading +[━╸╺]{30} +\d+% +\d+\.\d KiB of \d+\.\d KiB .*/s, \d+ s left")
    colour = re.compile(r"\x1b\[\d*m")
    try:
        wait_until(lambda: bar.search(colour.sub("", seen.decode(errors="replace"))), "a bar", ENDS_S)
        process.send_signal(signal.SIGTERM)
        assert process.wait(SOON_S) == 0
    finally:
        process.kill()
        process.wait()


def launched_errors(folder: Path, environ: dict[str, str], *options: str, model: str = ID) -> str:
    """The one line on standard error of a launcher that cannot serve."""
    command = [sys.executable, "-m", "launcher", "--model-id", model, "--hostname", "127.0.0.1", *options]
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        status = subprocess.run(
            [*command, "--port", str(free_port())], stdin=subprocess.DEVNULL, stdout=out, stderr=err, timeout=ENDS_S,
            check=False, env={**os.environ, **environ},
        ).returncode  # fmt: skip
    assert status == 1
    lines = (folder / "err").read_text().strip().splitlines()
    assert len(lines) == 1
    return lines[0]


def test_a_gated_model(hub: HubServer, files: dict[str, bytes], tmp_path: Path) -> None:
    hub.add(ID, files, is_gated=True, readers=frozenset({"hf_good"}))
    said = launched_errors(tmp_path, hub.environment(tmp_path))
    assert f"access is gated: accept its licence at {hub.url}/org/tiny, then set HF_TOKEN" in said


def test_a_directory_whose_tokenizer_cannot_be_made(hub: HubServer, files: dict[str, bytes], tmp_path: Path) -> None:
    """Seen before a shard is started: the launcher has the files of a directory converted too."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(b"[1, 2" if name == "vocab.json" else data)
    said = launched_errors(tmp_path, hub.environment(tmp_path), model=str(folder))
    assert f"the tokenizer of {folder} cannot be made a tokenizer.json: " in said


def test_a_cache_that_cannot_be_written(hub: HubServer, repository: Repository, tmp_path: Path) -> None:
    environ = hub.environment(tmp_path)
    del environ["HF_HUB_CACHE"]
    (tmp_path / "file").write_text("")
    said = launched_errors(tmp_path, environ, "--huggingface-hub-cache", str(tmp_path / "file" / "hub"))
    for word in (str(tmp_path / "file"), "HF_HOME", "--huggingface-hub-cache"):
        assert word in said
