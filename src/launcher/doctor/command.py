"""`launcher doctor` from its options to its verdict."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.text import Text

from launcher.doctor import machine, surroundings
from launcher.doctor.config import DoctorConfig
from launcher.doctor.finding import Finding
from launcher.planning import hardware
from launcher.planning.model_info import with_hub_cache
from wire.text.counting import counted
from wire.text.escape import one_line

_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}
_STATE_WIDTH, _NAME_WIDTH = 8, 14


def run_doctor(config: DoctorConfig, environ: Mapping[str, str]) -> int:
    """Prints as it looks; returns the exit status: 1 if something prevents serving."""
    console, found = Console(), []
    for finding in _findings(config, environ):
        found.append(finding)
        if not config.json:
            _print(console, finding)
    errors = [finding for finding in found if finding.state == "error"]
    if config.json:
        answer = {"can_serve": not errors, "findings": [dataclasses.asdict(finding) for finding in found]}
        sys.stdout.write(json.dumps(answer, indent=2) + "\n")
    else:
        console.print(_verdict(found, len(errors)), highlight=False, soft_wrap=True)
    return 1 if errors else 0


def _findings(config: DoctorConfig, environ: Mapping[str, str]) -> Iterator[Finding]:
    environ = with_hub_cache(environ, config.huggingface_hub_cache)
    found = hardware.detect(environ)
    yield surroundings.python()
    yield machine.processor(found)
    yield machine.memory(found)
    yield from machine.gpus(found, machine.driver_version())
    yield from machine.torch(found, environ)
    yield machine.operators(environ)
    yield machine.compiler(found)
    yield surroundings.cache(environ)
    yield surroundings.port(config.hostname, config.port)
    yield surroundings.hub(environ)


def _print(console: Console, finding: Finding) -> None:
    line = Text(f"{finding.state:<{_STATE_WIDTH}}", style=_STYLES[finding.state])
    line.append(f"{finding.name:<{_NAME_WIDTH}} {one_line(finding.text)}", style="default")
    console.print(line, highlight=False, soft_wrap=True)
    if finding.remedy:
        console.print(
            f"{'':<{_STATE_WIDTH + _NAME_WIDTH}} do: {finding.remedy}", highlight=False, markup=False, soft_wrap=True
        )


def _verdict(found: Sequence[Finding], num_errors: int) -> str:
    if num_errors:
        return f"This machine cannot serve yet: {counted(num_errors, 'error')} above."
    warnings = sum(finding.state == "warning" for finding in found)
    more = f", with {counted(warnings, 'warning')} above" if warnings else ""
    return f"This machine can serve{more}. Next: launcher serve demo"
