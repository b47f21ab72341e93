"""Dockerfiles, scripts and compose files before the tools that know their languages."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import compose_spec
import pytest
import yaml

BIN = Path(sys.executable).parent


def run(*command: str, cwd: Path) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cpu"])
def test_hadolint(root: Path, name: str) -> None:
    run(str(BIN / "hadolint"), f"docker/{name}", cwd=root)


def test_shellcheck(root: Path) -> None:
    scripts = sorted(path.name for path in (root / "docker").glob("*.sh"))
    assert scripts == ["entrypoint.sh", "sagemaker-entrypoint.sh"]
    run(str(BIN / "shellcheck"), "--shell=sh", *scripts, cwd=root / "docker")


def compose(root: Path, name: str) -> str:
    """The file as compose reads it where no variable is set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (root / "deploy" / "compose" / name).read_text())


@pytest.mark.parametrize("name", ["compose.yml", "gpu.yml"])
def test_compose_files_follow_the_specification(root: Path, name: str) -> None:
    text = compose(root, name)
    assert "$" not in text
    parsed = compose_spec.PyCompose.from_yaml(text)
    parsed.validate()
    assert "tercet" in parsed.service_names()


@pytest.mark.parametrize("wrong", ["stop_grace: 105s", "stop_grace_period: soon", "cap_drop: ALL"])
def test_a_mistake_in_a_compose_file_would_be_seen(root: Path, wrong: str) -> None:
    text = compose(root, "compose.yml").replace("stop_grace_period: 105s", wrong, 1)
    with pytest.raises(ValueError):
        compose_spec.PyCompose.from_yaml(text)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not on the PATH")
def test_promtool(root: Path) -> None:
    folder = root / "deploy" / "prometheus"
    run("promtool", "check", "config", "prometheus.yml", cwd=folder)
    run("promtool", "check", "rules", "rules.yml", cwd=folder)
    run("promtool", "test", "rules", "rules_test.yml", cwd=folder)


def test_every_yaml_file_can_be_read(root: Path) -> None:
    files = [path for path in (root / "deploy").rglob("*.yml") if "templates" not in path.parts]
    assert len(files) >= 6
    for path in files:
        assert yaml.safe_load(path.read_text()), path
