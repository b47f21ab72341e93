"""Compares the versions that images, CI and `make` install with a database of advisories, by pip-audit; `make audit`
runs this. Fails where a version has an advisory, and where the database says nothing of one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ("docker/requirements-cuda.txt", "environment/locked.txt")
"""Those of the CPU image are among them."""
SOURCE = "https://pypi.org/pypi/NAME/VERSION/json"
UNANSWERED = 2


def main() -> int:
    versions = sorted({line for name in LOCKS for line in locked(ROOT / name)})
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(versions) + "\n")
        file.flush()
        quiet = ["--progress-spinner", "off", "--format", "json"]
        command = [sys.executable, "-m", "pip_audit", "--requirement", file.name, "--no-deps", "--disable-pip", *quiet]
        done = subprocess.run(command, capture_output=True, text=True)
    try:
        found = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        return fail(UNANSWERED, f"pip-audit gave no result; it has to reach {SOURCE}", done.stderr.splitlines()[-3:])
    return report(found)


def locked(path: Path) -> list[str]:
    return re.findall(r"^[a-z0-9-]+==[^\s\\]+", path.read_text(), re.MULTILINE)


def report(found: list[dict[str, Any]]) -> int:
    """Returns the exit status, and prints why it is not 0."""
    unsafe = [
        f"{one['name']} {one['version']}: {advisory['id']}, fixed in {', '.join(advisory['fix_versions']) or 'none'}"
        for one in found
        for advisory in one.get("vulns", ())
    ]
    silent = [f"{one['name']}: {one['skip_reason']}" for one in found if "skip_reason" in one]
    if unsafe:
        return fail(1, f"{len(unsafe)} advisories; `UPGRADE=1 make locks` takes newer versions", unsafe)
    if silent:
        what = f"the database says nothing of {len(silent)} of {len(found)} versions; it has to be reached at {SOURCE}"
        return fail(UNANSWERED, what, silent[:3])
    sys.stdout.write(f"no advisory for any of {len(found)} versions\n")
    return 0


def fail(status: int, what: str, lines: list[str]) -> int:
    sys.stderr.write("\n  ".join([f"error: {what}", *lines]) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
