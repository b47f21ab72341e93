"""The systemd unit, and that docs/deploy.md names files, targets and options that exist."""

from __future__ import annotations

import configparser
import re
import shlex
from pathlib import Path

from launcher.config import LauncherConfig

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "deploy.md").read_text()


def test_the_unit_lets_the_launcher_stop_the_others() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(ROOT / "deploy" / "systemd" / "tercet.service")
    service = unit["Service"]
    assert service["KillMode"] == "mixed", "a signal to every process would end the shards before the router"
    assert int(service["TimeoutStopSec"]) >= LauncherConfig().graceful_termination_timeout + 15
    assert service["DynamicUser"] == "yes" and service["NoNewPrivileges"] == "yes"
    environment = dict(pair.split("=") for pair in shlex.split(service["Environment"]))
    assert environment["HF_HOME"] == f"/var/lib/{service['StateDirectory']}"
    assert environment["XDG_CACHE_HOME"] == f"/var/cache/{service['CacheDirectory']}"


def test_files_that_are_named_exist() -> None:
    named = set(re.findall(r"\b(?:docker|deploy|docs)/[\w./-]*\w", TEXT))
    assert len(named) > 9
    for path in named:
        assert (ROOT / path).exists() or (ROOT / path.removesuffix("/")).is_dir(), path
    for link in re.findall(r"\]\((\.\.?/[^)#]+|[\w./]+\.md)", TEXT):
        assert (ROOT / "docs" / link).exists(), link


def test_commands_of_make_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([\w-]+)`", TEXT))
    assert {"locks", "check-deploy"} <= named <= targets


def test_options_and_variables_of_the_launcher_exist() -> None:
    options = {name.upper() for name in LauncherConfig.__dataclass_fields__}
    for flag in re.findall(r"`--(graceful[\w-]*|startup[\w-]*)`", TEXT):
        assert flag.replace("-", "_").upper() in options
    for name in ("PORT", "MAX_TOTAL_TOKENS", "PROMETHEUS_PORT", "AIP_HTTP_PORT"):
        assert name in TEXT and name in options


def test_systemds_sandbox_keeps_no_compiled_operators_from_loading() -> None:
    unit = (ROOT / "deploy" / "systemd" / "tercet.service").read_text()
    assert "NoExecPaths" not in unit and "MemoryDenyWriteExecute" not in unit
