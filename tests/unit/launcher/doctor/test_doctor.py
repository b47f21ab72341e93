"""`launcher doctor`: each finding by the machine that gives it, and the verdict."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from launcher.config import LauncherConfig
from launcher.doctor import machine, surroundings
from launcher.doctor.command import run_doctor
from launcher.doctor.config import DoctorConfig
from launcher.doctor.finding import Finding
from launcher.errors import ArgumentValidation
from launcher.planning.hardware import Gpu, Hardware
from model_server.cpp import instruction_sets

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
    monkeypatch.setattr(
        machine, "_child", lambda *_: subprocess.CompletedProcess([], 1, "", "Trace\nNo module named torch")
    )
    (torch,) = machine.torch(Hardware(), {})
    assert torch.state == "error" and "pip install" in torch.remedy
    assert torch.text == "cannot be used: No module named torch"
    operators = machine.operators({})
    assert operators.state == "error" and operators.text == "cannot be used: No module named torch"


@pytest.mark.parametrize(
    ("lack", "remedy"),
    [("none were built: install g++", "make operators"), ("this CPU has none of avx2", "")],
)
def test_a_machine_without_operators(lack: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler helps only where there was none."""
    said = f"No C++ operators, torch's are used: {lack}\nThis CPU has: none of them\n"
    monkeypatch.setattr(machine, "_child", lambda *_: subprocess.CompletedProcess([], 1, said, ""))
    found = machine.operators({})
    assert found.state == "warning" and "torch's are used" in found.text and "\n" not in found.text
    assert remedy in found.remedy and bool(found.remedy) is bool(remedy)


def test_the_words_of_the_model_server_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instruction_sets, "is_served", lambda: True)
    survey = instruction_sets.Survey(built=(), supported=("avx2",), chosen=None, faults=())
    assert machine._NOT_BUILT in (survey.lack() or "")


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


def test_an_address_that_is_not_this_machines() -> None:
    found = surroundings.port("203.0.113.1", 8080)
    assert found.state == "error" and "no address 203.0.113.1" in found.text
    assert found.remedy == "launcher serve MODEL --hostname 0.0.0.0"


@pytest.mark.parametrize(("number", "other"), [(80, 8080), (8080, 8081), (65535, 8080)])
def test_another_port_can_be_opened(number: int, other: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def http_port(config: LauncherConfig, address: str) -> int:
        if config.port:
            raise ArgumentValidation(f"`--port` {config.port} is in use by another process; choose another")
        return 1

    monkeypatch.setattr(surroundings, "http_port", http_port)
    assert surroundings.port("127.0.0.1", number).remedy == f"launcher serve MODEL --port {other}"


def test_the_folder_of_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 100 << 30}))
    assert surroundings.cache({"HF_HOME": str(tmp_path / "new")}).state == "ok"
    (tmp_path / "file").touch()
    assert surroundings.cache({"HF_HOME": str(tmp_path / "file")}).state == "error"
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1 << 30}))
    assert surroundings.cache({"HF_HOME": str(tmp_path)}).state == "warning"


def test_a_folder_of_models_that_can_only_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    found = surroundings.cache({"HF_HUB_CACHE": str(tmp_path)})
    assert found.state == "warning" and "can only be read" in found.text
    assert surroundings.cache({"HF_HUB_CACHE": str(tmp_path / "new")}).state == "error"


def test_the_hub() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        assert surroundings.hub({"HF_ENDPOINT": url}).state == "ok"
    gone = surroundings.hub({"HF_ENDPOINT": url})
    assert gone.state == "warning" and "launcher serve demo" in gone.remedy
    assert surroundings.hub({"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "1"}).state == "ok"


@pytest.mark.parametrize("endpoint", ["http://h:abc", "https://[bad", "huggingface.co", "https://"])
def test_an_endpoint_that_is_no_url(endpoint: str) -> None:
    found = surroundings.hub({"HF_ENDPOINT": endpoint})
    assert found.state == "warning" and found.text.startswith("HF_ENDPOINT is not a URL")
    assert found.remedy.startswith("unset it")


def test_the_hub_behind_a_proxy() -> None:
    """The hub's own name is not looked up; where it is exempt from the proxy, it is."""
    environ = {"HF_ENDPOINT": "https://127.0.0.1:1"}
    with socket.create_server(("127.0.0.1", 0)) as listening:
        proxy = f"127.0.0.1:{listening.getsockname()[1]}"
        for value in (proxy, f"http://{proxy}"):
            found = surroundings.hub(environ | {"HTTPS_PROXY": value})
            assert found.state == "ok" and found.text.startswith(f"the proxy {proxy} for 127.0.0.1 can be reached")
        assert surroundings.hub(environ | {"https_proxy": proxy, "no_proxy": "127.0.0.1"}).state == "warning"
    assert "the proxy" in surroundings.hub(environ | {"HTTPS_PROXY": proxy}).text
    assert "is not a URL" in surroundings.hub(environ | {"HTTPS_PROXY": "http://h:abc"}).text


def test_a_name_service_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()

    def create_connection(*_: Any, **__: Any) -> socket.socket:
        answered.wait(60)
        raise socket.gaierror("no name service")

    monkeypatch.setattr(surroundings, "_CONNECT_TIMEOUT_S", 0.01)
    monkeypatch.setattr(socket, "create_connection", create_connection)
    found = surroundings.hub({})
    answered.set()
    assert found.state == "warning" and "no answer for" in found.text


@pytest.mark.parametrize(("token", "text"), [("hf_x", "there is a token"), (None, "hf auth login")])
def test_the_token_is_found_as_the_hub_library_finds_it(
    token: str | None, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: token)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        found = surroundings.hub({"HF_ENDPOINT": f"http://127.0.0.1:{listening.getsockname()[1]}"})
    assert text in found.text


def test_the_torch_to_install_is_the_tested_one(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch)
    (unused,) = machine.torch(Hardware(unused_gpus=1), {})
    tested = Path(__file__).parents[4] / "constraints.txt"
    assert unused.remedy.rpartition(" ")[2] in tested.read_text().splitlines()


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
    assert run_doctor(DoctorConfig(json=as_json), {}) == status
    out = capsys.readouterr().out
    if as_json:
        answer = json.loads(out)
        assert answer["can_serve"] is (status == 0) and answer["findings"][0]["state"] == state
    else:
        assert "[8080]" in out and "do: do [this]" in out
        assert ("cannot serve yet: 1 error" in out) is (status == 1)
