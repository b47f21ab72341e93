"""The images' entry points, run for real with a launcher that tells how it was called."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

DOCKER = Path(__file__).parents[3] / "docker"
NOBODY = 65534
PATIENCE_S = 60

# In the shell, as the unprivileged user may not be able to run this interpreter.
_LAUNCHER = r"""#!/bin/sh
trap 'echo terminated; exit 7' TERM
if [ "${1:-}" = wait ] || [ "${3:-}" = wait ]; then
    echo "$$"
    while :; do sleep 0.05; done
fi
printf '%s\0' "$#" "$@"
env -0
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that an unprivileged user can enter, with the scripts and the launcher in it."""
    # A user without rights may not get to pytest's own folders, nor to this repository.
    folder = Path(tempfile.mkdtemp(prefix="entry-"))
    folder.chmod(0o755)
    (folder / "bin").mkdir()
    for script in ("entrypoint.sh", "sagemaker-entrypoint.sh"):
        shutil.copy(DOCKER / script, folder / script)
    (folder / "bin" / "launcher").write_text(_LAUNCHER)
    (folder / "bin" / "launcher").chmod(0o755)
    for name in ("data", "scratch"):
        (folder / name).mkdir()
        _give_away(folder / name)
    yield folder
    shutil.rmtree(folder)


def _give_away(path: Path) -> None:
    if os.geteuid() == 0:
        os.chown(path, NOBODY, NOBODY)


def _take_away(path: Path) -> None:
    """Nobody but root can write there; the tests run the scripts as somebody else."""
    if os.geteuid() == 0:
        os.chown(path, 0, 0)
    path.chmod(0o555)


def start(place: Path, script: str, *argv: str, **env: str) -> subprocess.Popen[str]:
    unprivileged = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
    return subprocess.Popen(
        [str(place / script), *argv],
        env={"PATH": f"{place / 'bin'}:/usr/bin:/bin", "TMPDIR": str(place / "scratch")} | env,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/",
        **unprivileged,  # type: ignore[call-overload]
    )  # fmt: skip


@pytest.fixture
def called(place: Path) -> Callable[..., tuple[list[str], dict[str, str], str]]:
    """Runs a script to its end: the launcher's arguments and environment, and what the script said."""

    def run(script: str, *argv: str, **env: str) -> tuple[list[str], dict[str, str], str]:
        with start(place, script, *argv, **env) as process:
            out, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, err
        count, *rest = out.removesuffix("\0").split("\0")
        argv, env_lines = rest[: int(count)], rest[int(count) :]
        return argv, dict(line.split("=", 1) for line in env_lines), err

    return run


Called = Callable[..., tuple[list[str], dict[str, str], str]]


def test_every_word_reaches_the_launcher_as_it_was(called: Called, place: Path) -> None:
    words = ["--model-id", "/data/a model", "--otlp-service-name", "two  words", "", "*", "$HOME", "it's"]
    argv, _, said = called("entrypoint.sh", *words, HF_HOME=str(place / "data"))
    assert (argv, said) == (words, "")


def test_caches_lie_with_the_models(called: Called, place: Path) -> None:
    _, env, said = called("entrypoint.sh", HF_HOME=str(place / "data"))
    assert env["HF_HOME"] == str(place / "data")
    assert env["XDG_CACHE_HOME"] == f"{place}/data/cache" and env["TRITON_CACHE_DIR"] == f"{place}/data/cache/triton"
    assert said == "" and (place / "data" / "cache").is_dir()


def test_places_that_the_operator_names_stay(called: Called, place: Path) -> None:
    given = {"HF_HOME": str(place / "data"), "XDG_CACHE_HOME": "/some/where", "TRITON_CACHE_DIR": "/else/where"}
    _, env, _ = called("entrypoint.sh", **given)
    assert {name: env[name] for name in given} == given


def test_a_folder_of_somebody_else_is_not_used_for_downloads(called: Called, place: Path) -> None:
    _take_away(place / "data")
    _, env, said = called("entrypoint.sh", HF_HOME=str(place / "data"))
    assert env["HF_HOME"] == f"{place}/scratch/huggingface"
    assert env["XDG_CACHE_HOME"] == f"{place}/scratch/huggingface/cache"
    assert "cannot be written" in said and "--user" in said and len(said.splitlines()) == 1


def test_models_in_a_folder_that_cannot_be_written_are_served(called: Called, place: Path) -> None:
    (place / "data" / "hub").mkdir()
    _take_away(place / "data")
    _, env, said = called("entrypoint.sh", HF_HOME=str(place / "data"))
    assert env["HF_HOME"] == str(place / "data") and env["XDG_CACHE_HOME"] == f"{place}/scratch/cache"
    assert "models in it are served" in said


def test_a_hub_cache_elsewhere_needs_no_writable_home(called: Called, place: Path) -> None:
    _take_away(place / "data")
    _, env, said = called("entrypoint.sh", HF_HOME=str(place / "data"), HF_HUB_CACHE=str(place / "scratch"))
    assert env["HF_HOME"] == str(place / "data") and said == ""


@pytest.mark.parametrize("script", ["entrypoint.sh", "sagemaker-entrypoint.sh"])
def test_the_launcher_is_the_same_process_and_gets_the_signal(place: Path, script: str) -> None:
    data = str(place / "data")
    with start(place, script, "wait", HF_HOME=data, HF_MODEL_ID="demo") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{process.pid}\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "terminated\n"
        assert process.wait(PATIENCE_S) == 7


def test_sagemakers_variables(called: Called, place: Path) -> None:
    argv, env, _ = called(
        "sagemaker-entrypoint.sh", "serve", HF_HOME=str(place / "data"), HF_MODEL_ID="org/some model",
        HF_MODEL_REVISION="refs/pr/1", SM_NUM_GPUS="4", HF_MODEL_QUANTIZE="awq", HF_MODEL_TRUST_REMOTE_CODE="true",
        MAX_TOTAL_TOKENS="4096",
    )  # fmt: skip
    assert argv == ["--port", "8080"], "the word that SageMaker starts images with is not the launcher's"
    wanted = {
        "MODEL_ID": "org/some model", "REVISION": "refs/pr/1", "NUM_SHARD": "4", "QUANTIZE": "awq",
        "TRUST_REMOTE_CODE": "true", "MAX_TOTAL_TOKENS": "4096",
    }  # fmt: skip
    assert {name: env.get(name) for name in wanted} == wanted


def test_sagemaker_without_optional_variables(called: Called, place: Path) -> None:
    argv, env, _ = called("sagemaker-entrypoint.sh", "--max-batch-size", "2", HF_HOME=str(place), HF_MODEL_ID="demo")
    assert argv == ["--port", "8080", "--max-batch-size", "2"]
    assert not {"REVISION", "NUM_SHARD", "QUANTIZE", "TRUST_REMOTE_CODE"} & env.keys()


def test_sagemakers_instances_without_a_gpu(called: Called, place: Path) -> None:
    _, env, _ = called("sagemaker-entrypoint.sh", "serve", HF_HOME=str(place), HF_MODEL_ID="demo", SM_NUM_GPUS="0")
    assert "NUM_SHARD" not in env, "zero shards are refused by the launcher"


@pytest.mark.parametrize("env", [{}, {"HF_MODEL_ID": ""}])
def test_sagemaker_without_a_model_is_refused(place: Path, env: dict[str, str]) -> None:
    with start(place, "sagemaker-entrypoint.sh", **env) as process:
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out, err) == (1, "", "HF_MODEL_ID must be set\n")
