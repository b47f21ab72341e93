"""What a launch refuses before it starts a child: TGI's table of errors, the number of shards, the hub's cache."""

from __future__ import annotations

import json
import logging
import shutil
import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher import launch, model_launch
from launcher.config import LauncherConfig
from launcher.errors import ArgumentValidation, DownloadError, LauncherError, NotEnoughCUDADevices
from launcher.planning import hardware, hub
from launcher.processes.signals import Signals
from wire.cli.parsing import parse


class Started(Exception):
    """The launch has come to the point where children are started."""


@pytest.fixture
def signals() -> Iterator[Signals]:
    made = Signals()
    yield made
    made.close()


@pytest.fixture
def num_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Sets how many GPUs the driver's tool reports; None: there is no tool."""

    def set_to(count: int | None) -> None:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        tool = folder / "nvidia-smi"
        lines = [f"echo 'GPU-{index}, NVIDIA H100, 81559, 9.0'" for index in range(count or 0)]
        tool.write_text("\n".join(["#!/bin/sh", *lines, ""]))
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR if count is not None else 0o600)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin" if count is not None else str(folder))
        monkeypatch.setattr(hardware, "_is_cpu_build", lambda: False)

    return set_to


def attempt(argv: list[str], environ: dict[str, str], signals: Signals, monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of shards that would have been started. Raises LauncherError."""
    counts: list[int] = []

    def start(self: Any, *_: Any) -> int:
        raise Started

    def note(config: Any, machine: Any, info: Any) -> Any:
        resolved = resolve(config, machine, info)
        counts.append(resolved.value)
        return resolved

    resolve = model_launch.resolve_num_shard
    monkeypatch.setattr(model_launch, "resolve_num_shard", note)
    monkeypatch.setattr(launch._Launch, "_run_children", start)
    config = parse(LauncherConfig, ["--model-id", "demo", "--port", "0", *argv], environ)
    with pytest.raises(Started):
        launch._Launch(config, signals, environ).run()
    return counts[-1]


@pytest.fixture
def without_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before a download: nothing is known of the model."""
    monkeypatch.setattr(launch.model_info, "read", lambda path: None)


@pytest.mark.usefixtures("without_model")
@pytest.mark.parametrize(
    ("argv", "cuda", "nvidia", "gpus", "expected"),
    [
        ([], None, None, 8, 8),
        ([], "0,1,2", None, 8, 3),
        ([], "0,1,2", "all", 8, 3),
        ([], "", None, 8, 1),
        ([], "-1", None, 8, 1),
        ([], "all", None, 4, 4),
        ([], None, "all", 4, 4),
        ([], None, "void", 4, 4),
        ([], None, "all", None, 1),
        (["--sharded", "true"], None, None, 0, NotEnoughCUDADevices),
        (["--sharded", "true"], None, None, None, NotEnoughCUDADevices),
        (["--sharded", "true"], "0", None, 1, NotEnoughCUDADevices),
        (["--sharded", "true", "--num-shard", "1"], None, None, 4, ArgumentValidation),
        (["--sharded", "true", "--num-shard", "2"], None, None, 4, 2),
        (["--sharded", "false", "--num-shard", "4"], None, None, 4, 4),
        (["--sharded", "false"], None, None, 4, 1),
        (["--num-shard", "0"], None, None, 4, ArgumentValidation),
        (["--num-shard", "4"], "0,1", None, 2, ArgumentValidation),
        (["--num-shard", "2"], None, None, 0, 2),
        (["--num-shard", "2"], None, None, None, 2),
    ],
)
def test_number_of_shards(
    argv: list[str], cuda: str | None, nvidia: str | None, gpus: int | None, expected: Any,
    num_gpus: Any, signals: Signals, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if gpus is None and list(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("this machine's GPUs are seen without the tool")
    num_gpus(gpus)
    environ = {"CUDA_VISIBLE_DEVICES": cuda, "NVIDIA_VISIBLE_DEVICES": nvidia}
    given = {name: value for name, value in environ.items() if value is not None}
    if isinstance(expected, int):
        assert attempt(argv, given, signals, monkeypatch) == expected
    else:
        with pytest.raises(expected):
            attempt(argv, given, signals, monkeypatch)


ADAPTER = "a@b@c"


@pytest.mark.parametrize(
    ("argv", "variant", "words"),
    [
        (["--sharded", "true"], "NotEnoughCUDADevices", ["--sharded true", "only 0 CUDA devices"]),
        (["--sharded", "true", "--num-shard", "1"], "ArgumentValidation", ["--sharded true", "--num-shard"]),
        (["--num-shard", "0"], "ArgumentValidation", ["--num-shard", "cannot be < 1"]),
        (
            ["--num-shard", "2", "--quantize", "exl2"],
            "ArgumentValidation",
            ["Sharding is currently not supported with `exl2` quantization"],
        ),
        (["--dtype", "float16", "--quantize", "awq"], "ArgumentValidation", ["--quantize"]),
        (
            ["--max-input-tokens", "3", "--max-input-length", "4"],
            "ArgumentValidation",
            ["3", "4", "--max-input-tokens"],
        ),
        (["--max-input-tokens", "9", "--max-total-tokens", "9"], "ArgumentValidation", ["must be <", "9 and 9"]),
        (["--max-input-length", "9", "--max-total-tokens", "9"], "ArgumentValidation", ["must be <", "9 and 9"]),
        (["--validation-workers", "0"], "ArgumentValidation", ["--validation-workers", "must be > 0"]),
        (["--max-total-tokens", "9", "--max-batch-total-tokens", "8"], "ArgumentValidation", ["must be <=", "9 and 8"]),
        (["--ngrok", "--ngrok-edge", "e"], "ArgumentValidation", ["--ngrok"]),
        (["--ngrok", "--ngrok-authtoken", "t"], "ArgumentValidation", ["--ngrok"]),
        (["--lora-adapters", ADAPTER], "ArgumentValidation", ["Invalid LoRA adapter format"]),
        (["--num-shard", "3"], "ArgumentValidation", ["--num-shard", "3", "4 attention heads"]),
        (["--cuda-memory-fraction", "0"], "ArgumentValidation", ["--cuda-memory-fraction"]),
        (["--master-port", "PORT", "--num-shard", "2"], "ArgumentValidation", ["--master-port", "in use"]),
        (["--shard-uds-path", "/tmp/" + "x" * 120], "ArgumentValidation", ["--shard-uds-path", "too long"]),
        (["--hostname", "no.such.name.invalid"], "ArgumentValidation", ["--hostname"]),
    ],
)
def test_refused_before_any_child(
    argv: list[str], variant: str, words: list[str], signals: Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is one line with TGI's variant and the flag to change; the launcher's exit status is then 1."""
    monkeypatch.setattr(launch.Supervisor, "serve", lambda *_, **__: pytest.fail("a child would have been started"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        argv = [word.replace("PORT", str(taken.getsockname()[1])) for word in argv]
        config = parse(LauncherConfig, ["--model-id", "demo", "--port", "0", *argv], {})
        with pytest.raises(LauncherError) as caught:
            launch._Launch(config, signals, {"CUDA_VISIBLE_DEVICES": ""}).run()
    line = caught.value.report()
    assert line.startswith(f'Error: {variant}("') and "\n" not in line
    assert all(word in line for word in words), line


def test_a_refusal_names_an_inherited_variable(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NODE_RANK", "3")
    environ = {"NODE_RANK": "3", "MODEL_ID": "demo", "CUDA_VISIBLE_DEVICES": ""}
    assert launch.run_launch(parse(LauncherConfig, ["--nnodes", "2"], environ), environ) == 1
    refused = "`--node-rank` must be < `--nnodes`. Given: 3 and 2 (from the environment: NODE_RANK)"
    assert capfd.readouterr().err == f'Error: ArgumentValidation("{refused}")\n'


@pytest.mark.parametrize(
    ("environ", "refused"),
    [
        (
            {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "3"},
            "`--node-rank` must be < `--nnodes`. Given: 3 and 2 "
            "(from the environment: LWS_GROUP_SIZE, LWS_WORKER_INDEX)",
        ),
        (
            {"TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_RANK": "1", "NNODES": "1"},
            "`--node-rank` must be < `--nnodes`. Given: 1 and 1 (from the environment: NNODES, GROUP_RANK)",
        ),
        (
            {
                "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "0", "LWS_LEADER_ADDRESS": "203.0.113.9",
                "INSECURE_GROUP": "true",
            },
            "`--master-addr` 203.0.113.9 is the address of node 0, but this node has no such address "
            "(from the environment: LWS_LEADER_ADDRESS)",
        ),
        (
            {"MASTER_ADDR": "203.0.113.9", "NNODES": "2", "INSECURE_GROUP": "true"},
            "`--master-addr` 203.0.113.9 is the address of node 0, but this node has no such address "
            "(from the environment: MASTER_ADDR)",
        ),
    ],
)  # fmt: skip
def test_a_refusal_names_the_variables_of_a_supervisor(
    environ: dict[str, str], refused: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    environ = {"MODEL_ID": "demo", "CUDA_VISIBLE_DEVICES": "", **environ}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert launch.run_launch(parse(LauncherConfig, [], environ), environ) == 1
    assert capfd.readouterr().err == f'Error: ArgumentValidation("{refused}")\n'


def test_an_empty_model_id(
    signals: Signals, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with pytest.raises(ArgumentValidation, match="`--model-id` is empty"):
        launch._Launch(parse(LauncherConfig, ["--model-id", ""], {}), signals, {}).run()
    environ = {"MODEL_ID": "", "HF_HUB_CACHE": str(tmp_path)}
    monkeypatch.setattr(launch._Launch, "_run_children", lambda *_: 0)
    assert launch._Launch(parse(LauncherConfig, ["--port", "0"], environ), signals, environ).run() == 0
    assert "NO MODEL WAS GIVEN (the variable MODEL_ID is set, but empty): serving TGI's default" in caplog.text


def test_a_quantized_checkpoint(tmp_path: Path, signals: Signals) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "hqq"}}))
    (tmp_path / "model.safetensors").touch()
    config = parse(LauncherConfig, ["--model-id", str(tmp_path), "--port", "0"], {})
    with pytest.raises(ArgumentValidation, match="is quantized with hqq, which is not served"):
        launch._Launch(config, signals, {}).run()


@pytest.mark.parametrize(
    ("said", "flag", "text"),
    [
        (None, "awq", "`--quantize awq` names a stored format, but {} holds plain weights; leave it out, or "),
        ("gptq", "fp8", "`--quantize fp8` quantizes plain weights on load, but {} is stored as gptq; leave it out"),
    ],
)
def test_a_flag_that_does_not_go_with_the_checkpoint(
    said: str | None, flag: str, text: str, tmp_path: Path, signals: Signals
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said and {"quant_method": said}}))
    (tmp_path / "model.safetensors").touch()
    config = parse(LauncherConfig, ["--model-id", str(tmp_path), "--port", "0", "--quantize", flag], {})
    with pytest.raises(ArgumentValidation) as refused:
        launch._Launch(config, signals, {}).run()
    assert str(refused.value).startswith(text.format(tmp_path))


def test_a_cache_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by its mode: the tests may run as root, who may write everywhere."""
    monkeypatch.setattr(hub.os, "access", lambda path, mode: False)
    with pytest.raises(ArgumentValidation, match=r"hub cache .* for org/m: the user \d+ may not write to"):
        hub.check_cache("org/m", None, {"HF_HUB_CACHE": str(tmp_path / "hub")})
    # What is in the cache is served from there.
    (tmp_path / "model.safetensors").touch()
    hub.check_cache("org/m", tmp_path, {"HF_HUB_CACHE": str(tmp_path / "hub")})


def test_a_cache_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentValidation, match=r"/file is not a folder; .*--huggingface-hub-cache"):
        hub.check_cache("org/m", None, {"HF_HUB_CACHE": str(tmp_path / "file")})


@pytest.mark.parametrize(("free_mib", "outcome"), [(10, "refused"), (500, "warned"), (100_000, "silent")])
def test_room_for_a_download(
    free_mib: int, outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=free_mib << 20)
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda path: usage)
    environ = {"HF_HUB_CACHE": str(tmp_path / "hub")}
    if outcome == "refused":
        with pytest.raises(ArgumentValidation, match=r"is full \(10 MiB free\), too little for org/m"):
            hub.check_cache("org/m", None, environ)
        return
    hub.check_cache("org/m", None, environ)
    assert ("500 MiB free; org/m may not fit" in caplog.text) is (outcome == "warned")


def test_a_hub_without_an_address(signals: Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"HF_ENDPOINT": "https://hub.invalid:8080/x"}
    with pytest.raises(DownloadError, match=r"org/m is not in the local cache.*hub\.invalid .*the model `demo`"):
        hub.check_network("org/m", environ, signals)
    # The child says this itself, and a proxy may know the name.
    assert hub.check_network("org/m", environ | {"HF_HUB_OFFLINE": "1"}, signals)
    assert hub.check_network("org/m", environ | {"HTTPS_PROXY": "http://10.0.0.1:3128"}, signals)
    assert hub.check_network("org/m", {"HF_ENDPOINT": "http://127.0.0.1:1"}, signals)
    with pytest.raises(ArgumentValidation, match="HF_ENDPOINT is not a URL; unset it"):
        hub.check_network("org/m", {"HF_ENDPOINT": "https://[bad"}, signals)


def test_a_name_service_that_comes_up_late(signals: Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [socket.gaierror(socket.EAI_AGAIN, "Temporary failure"), []]
    waits: list[float] = []

    def look_up(*_: Any, **__: Any) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(hub.socket, "getaddrinfo", look_up)
    monkeypatch.setattr(signals, "wait", waits.append)
    assert hub.check_network("org/m", {}, signals)
    assert len(waits) == 1
    answers += [socket.gaierror(socket.EAI_AGAIN, "Temporary failure")]
    signals.received.append(15)
    assert not hub.check_network("org/m", {}, signals)
    monkeypatch.setattr(hub, "_NAME_SERVICE_PATIENCE_S", -1.0)
    answers += [socket.gaierror(socket.EAI_AGAIN, "Temporary failure")]
    with pytest.raises(DownloadError, match="Temporary failure"):
        hub.check_network("org/m", {}, signals)


def test_start_up_phases(signals: Signals, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Any] = []

    def serve(self: Any, shards: Any, router: Any, *, on_started: Any, on_ready: Any) -> int:
        on_started()
        seen.append(self._own_phases)
        return 0

    monkeypatch.setattr(launch.Supervisor, "serve", serve)
    caplog.set_level(logging.INFO)
    for verbose in (False, True):
        argv = ["--model-id", "demo", "--port", "0", *(["--verbose-startup"] if verbose else [])]
        assert launch._Launch(parse(LauncherConfig, argv, {}), signals, {"CUDA_VISIBLE_DEVICES": ""}).run() == 0
    assert seen[0] is None
    names = ["process start and imports", "check of the machine", "checks", "trial of the tokenizer"]
    names.append("plan, start of the shards")
    assert [name for name, took in seen[1] if took >= 0] == names
    assert "Default `max_batch_prefill_tokens` to 4096" in caplog.text
    assert "│ url" in caplog.text


def test_a_stop_that_ends_the_trial_of_the_tokenizer(signals: Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal's Ctrl-C goes to the trial too, which is then no fault of the tokenizer."""

    def interrupted(path: Path, directory: Path) -> str:
        signals.notify(signal.SIGINT)
        return f"{path} takes more memory or time"

    monkeypatch.setattr(launch.preflight.tokenizer_trial, "failure_of", interrupted)
    monkeypatch.setattr(launch.Supervisor, "serve", lambda *_, **__: pytest.fail("a child would have been started"))
    config = parse(LauncherConfig, ["--model-id", "demo", "--port", "0"], {})
    assert launch._Launch(config, signals, {"CUDA_VISIBLE_DEVICES": ""}).run() == 0
