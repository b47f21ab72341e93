"""`launcher doctor`: each finding by the machine that gives it, and the verdict."""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from launcher.doctor import machine, surroundings
from launcher.doctor.command import run_doctor
from launcher.doctor.config import DoctorConfig
from launcher.doctor.finding import Finding
from launcher.planning.hardware import Gpu, Hardware

GPU = Gpu(uuid="GPU-1", card="nvidia-l4", memory_mib=24564, compute_capability=(8, 9))


def answers(monkeypatch: pytest.MonkeyPatch, status: int = 0, **said: Any) -> None:
    """The child says this of torch."""
    text = json.dumps({"torch": "2.13.0", "cuda": None, "gpus": 0, "reason": None, "triton": None} | said) + "\n"
    monkeypatch.setattr(machine, "_child", lambda *_: subprocess.CompletedProcess([], status, text, ""))


def test_memory() -> None:
    assert machine.memory(Hardware(memory_bytes=64 << 30)).state == "ok"
    small = machine.memory(Hardware(memory_bytes=2 << 30))
    assert small.state == "warning" and "launcher estimate" in small.remedy
    assert machine.memory(Hardware()).state == "warning"


def test_torch_for_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch)
    assert machine.torch(Hardware(), {}) == [Finding(name="torch", text="2.13.0, built for CPUs")]
    (unused,) = machine.torch(Hardware(unused_gpus=2), {})
    assert unused.state == "warning" and "2 GPUs will not be used" in unused.text and "pip install" in unused.remedy


def test_torch_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, cuda="13.0", gpus=1)
    assert [one.state for one in machine.torch(Hardware(gpus=(GPU,)), {})] == ["ok", "ok"]
    answers(monkeypatch, cuda="13.0", gpus=1, triton="Failed to find C compiler")
    _, kernels = machine.torch(Hardware(gpus=(GPU,)), {})
    assert kernels.state == "warning" and "gcc" in kernels.remedy
    answers(monkeypatch, cuda="13.0", reason="The NVIDIA driver on your system is too old")
    (old,) = machine.torch(Hardware(gpus=(GPU,)), {})
    assert old.state == "error" and "too old" in old.text


def test_a_child_that_cannot_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_child", lambda *_: subprocess.CompletedProcess([], 1, "", "No module named torch"))
    (torch,) = machine.torch(Hardware(), {})
    assert torch.state == "error" and "pip install" in torch.remedy
    operators = machine.operators({})
    assert operators.state == "warning" and operators.text == "No module named torch"


def test_this_machines_own_answers() -> None:
    """The two children run."""
    (torch, *_) = machine.torch(Hardware(), {})
    assert torch.state == "ok" and torch.text.startswith("2.")
    assert "perators" in machine.operators({}).text


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "nvidia-l4 (24 GiB); driver 580.1" in machine.gpus(Hardware(gpus=(GPU,)), "580.1")[0].text
    _, shared = machine.gpus(Hardware(gpus=(GPU, GPU), shared_memory_bytes=64 << 20), None)
    assert shared.state == "warning" and "--shm-size" in shared.remedy
    assert machine.gpus(Hardware(unused_gpus=1), None)[0].text.startswith("1 GPU,")


def test_the_compiler_counts_on_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert machine.compiler(Hardware()).state == "ok"
    lacking = machine.compiler(Hardware(gpus=(GPU,)))
    assert lacking.state == "warning" and lacking.remedy == "apt install gcc python3-dev"


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        found = surroundings.port("127.0.0.1", number)
    assert found.state == "error" and f"{number} is in use" in found.text
    assert f"--port {number + 1}" in found.remedy
    assert surroundings.port("127.0.0.1", number).state == "ok"


def test_the_folder_of_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 100 << 30}))
    assert surroundings.cache({"HF_HOME": str(tmp_path / "new")}).state == "ok"
    (tmp_path / "file").touch()
    assert surroundings.cache({"HF_HOME": str(tmp_path / "file")}).state == "error"
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1 << 30}))
    assert surroundings.cache({"HF_HOME": str(tmp_path)}).state == "warning"


def test_the_hub() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        assert surroundings.hub({"HF_ENDPOINT": url}).state == "ok"
    gone = surroundings.hub({"HF_ENDPOINT": url})
    assert gone.state == "warning" and "launcher serve demo" in gone.remedy
    assert surroundings.hub({"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "1"}).state == "ok"


@pytest.mark.parametrize(("state", "status"), [("ok", 0), ("warning", 0), ("error", 1)])
@pytest.mark.parametrize("as_json", [False, True])
def test_the_verdict(
    state: Any, status: int, as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = [
        Finding(name="port", state=state, text="[8080] is\nodd", remedy="do [this]"),
        Finding(name="a", text="b"),
    ]
    monkeypatch.setattr("launcher.doctor.command._findings", lambda config, environ: iter(findings))
    assert run_doctor(DoctorConfig(json_output=as_json), {}) == status
    out = capsys.readouterr().out
    if as_json:
        answer = json.loads(out)
        assert answer["can_serve"] is (status == 0) and answer["findings"][0]["state"] == state
    else:
        assert "[8080]" in out and "do: do [this]" in out
        assert ("cannot serve yet: 1 error" in out) is (status == 1)
