"""The command itself, as far as it goes without a model: exit statuses, last lines, no secrets."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.config import LauncherConfig
from launcher.launch import redacted


def launcher(*argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "launcher", *argv], capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, **environ},
    )  # fmt: skip


def test_help_and_version() -> None:
    answer = launcher("--help")
    assert (answer.returncode, answer.stderr) == (0, "")
    assert "--max-batch-prefill-tokens" in answer.stdout and "--graceful-termination-timeout" in answer.stdout
    answer = launcher("-V")
    assert answer.returncode == 0
    assert answer.stdout.startswith("launcher ")


def test_a_reader_that_has_seen_enough_of_the_help() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "launcher", "--help"], stdout=write, stderr=subprocess.PIPE, timeout=60, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_help_imports_nothing_of_a_launch() -> None:
    program = (
        "import sys; from launcher.cli import main; sys.argv = ['launcher', '--help']; assert main() == 0;"
        "sys.exit(int(bool({'launcher.launch', 'launcher.processes.supervisor', 'grpc'} & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done


def test_models_that_need_no_download_are_completed(tmp_path: Path) -> None:
    (tmp_path / "models--org--some-model").mkdir()
    typed = {"_LAUNCHER_COMPLETE": "complete_bash", "COMP_WORDS": "launcher serve ", "COMP_CWORD": "2"}
    program = "import sys; sys.argv = ['launcher']; from launcher.cli import main; sys.exit(main())"
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True,
        env={**os.environ, **typed, "HF_HUB_CACHE": str(tmp_path)},
    )  # fmt: skip
    assert answer.stdout.split() == ["demo", "org/some-model"]


def test_usage_error() -> None:
    answer = launcher("--model_id", "x")
    assert (answer.returncode, answer.stdout) == (2, "")
    assert "--model_id" in answer.stderr and "--help" in answer.stderr


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--model-id", "demo", "--quantize", "awq"], 'Error: ArgumentValidation("`--quantize awq` names a stored'),
        (["--model-id", "demo", "--num-shard", "3"], 'Error: ArgumentValidation("`--num-shard` 3 does not divide'),
        (["--model-id", "./nowhere"], 'Error: ArgumentValidation("./nowhere: no such directory'),
        (["--model-id", "demo", "--sharded", "true"], 'Error: NotEnoughCUDADevices("'),
        (["--model-id", "demo", "--max-input-tokens", "9", "--max-total-tokens", "9"], "Error: ArgumentValidation("),
    ],
)
def test_refused_with_one_line(argv: list[str], line: str) -> None:
    answer = launcher(*argv, "--port", "0", CUDA_VISIBLE_DEVICES="")
    assert answer.returncode == 1
    assert answer.stderr.startswith(line)
    assert answer.stderr.count("\n") == 1


def test_port_in_use() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        answer = launcher("--model-id", "demo", "--hostname", "127.0.0.1", PORT=str(port))
    assert answer.returncode == 1
    assert answer.stderr == (
        f'Error: ArgumentValidation("`--port` {port} is in use by another process; choose another '
        '(from the environment: PORT)")\n'
    )


def test_json_mode_is_json_to_the_last_line() -> None:
    answer = launcher("--model-id", "./nowhere", "--json-output", "--api-key", "secret")
    records = [json.loads(line) for line in answer.stdout.splitlines()]
    assert all({"timestamp", "level", "fields", "target"} <= set(record) for record in records)
    assert records[-1]["level"] == "ERROR"
    assert records[-1]["fields"]["message"] == answer.stderr.rstrip()
    assert "secret" not in answer.stdout + answer.stderr


def test_no_standard_streams_at_all() -> None:
    """Closed, not redirected: the next file that is opened must not take their place, and nothing may fail of it."""
    script = f"exec 0<&- 1>&- 2>&-; {sys.executable} -m launcher --env; exit $?"
    assert subprocess.run(["sh", "-c", script], timeout=60, check=False).returncode == 0


def test_the_default_model_is_warned_about_and_the_demo_named(tmp_path: os.PathLike[str]) -> None:
    answer = launcher("--port", "0", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert answer.returncode == 1
    assert "NO MODEL WAS GIVEN" in answer.stdout
    assert answer.stderr.startswith('Error: DownloadError("bigscience/bloom-560m: ')
    assert "the model `demo`" in answer.stderr


def test_report_alone_ends_there() -> None:
    answer = launcher("--env")
    assert (answer.returncode, answer.stderr) == (0, "")
    assert "Runtime environment:" in answer.stdout and "tercet" in answer.stdout


def test_the_containers_host_name_is_no_address() -> None:
    answer = launcher("--model-id", "./nowhere", HOSTNAME="f00ba4-pod")
    assert "f00ba4-pod" not in answer.stdout + answer.stderr
    assert "./nowhere" in answer.stderr


def test_secrets_are_hidden() -> None:
    text = redacted(LauncherConfig(api_key="s3cret", ngrok_authtoken="s3cret", model_id="m"))
    assert "s3cret" not in text
    assert "api_key='<hidden>'" in text and "model_id='m'" in text
    text = redacted(LauncherConfig(otlp_endpoint="http://me:s3cret@collector:4317", model_id="m"))
    assert "s3cret" not in text and "http://<hidden>@collector:4317" in text


def test_a_password_of_the_collector_is_shown_nowhere() -> None:
    for endpoint in ("http://me:s3cret@collector:4317", "me:s3cret@collector:4317"):
        answer = launcher("--model-id", "demo", "--otlp-endpoint", endpoint)
        assert answer.returncode != 0 and "s3cret" not in answer.stdout + answer.stderr
        answer = launcher("--env", "--model-id", "./nowhere", OTLP_ENDPOINT=endpoint)
        assert "s3cret" not in answer.stdout + answer.stderr
