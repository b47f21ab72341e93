"""What the libraries that quantize models write, read by this project; `make test-quantizers`.

Each library has an environment of its own below `build/quantizers`, of the exact versions in `requirements`, with the
torch of `constraints.txt` for CPUs, which they share. There its writer in `writers` makes tiny checkpoints of every
option that it offers on a CPU, and leaves the logits and greedy tokens of the library's own reading beside each
(`writers/tiny.py`). Here each is read: equal, or refused in words. In the end stands what was not equal, and why.
Libraries named on the command line are the only ones. One that the package index does not have is skipped.

autoawq has the last transformers that it works with. On a CPU it writes 4 bits with zero points; gptqmodel and
auto-round write the other forms of its format.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WORK = ROOT / "build" / "quantizers"
TORCH = "torch"
INSTALL_LIMIT_S = 1800.0
WRITE_LIMIT_S = 3600.0

# Library -> its cases that are refused; any other refusal is a fault.
REFUSED: dict[str, tuple[str, ...]] = {
    "bitsandbytes": (),
    "autoawq": (),
    "torchao": (
        "fp8-e5m2", "int1-symmetric_no_clipping_err",  # scales that are infinite
        "mixed-by-pattern", "mixed-by-plain",  # quantized biases
        "mx-*", "nvfp4*",
    ),
    "gptqmodel": (
        "*-[567]-bits-*", "gptq_p-*", "gptq-in-*", "gptq-rotated-*", "awq-gemv*", "awq-marlin*", "awq-llm-awq*",
        "fp8-e5m2", "gguf-*", "qqq", "exl3",
    ),
    "auto_round": (
        "auto_round*-[567]-bits-*", "auto_round-rotated", "*-mxint4", "*-nvfp4_e5m3", "*-mxfp6", "*mlx",
    ),
    "llm_compressor": ("attention", "quip", "spinquant*", "fp8-not-compressed", "w8a16-as-dense"),
}  # fmt: skip


@dataclass
class Outcome:
    """What came of a library: `cases` are (name, kind, detail)."""

    library: str
    result: str
    cases: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def has_passed(self) -> bool:
        return self.result in ("done", "skipped") and not any(self.is_fault(*case) for case in self.cases)

    def is_fault(self, name: str, kind: str, detail: str) -> bool:
        is_known = any(fnmatch(name, pattern) for pattern in REFUSED[self.library])
        return kind in ("different", "crashed") or (kind == "refused" and not (is_known and detail))


class UnavailableError(Exception):
    """The package index does not have a library."""


def main() -> int:
    """0 if all was read as it was meant, or refused as it is known to be."""
    outcomes = [tried(library) for library in sys.argv[1:] or REFUSED]
    print("\n".join(line for outcome in outcomes for line in lines(outcome)))
    return 0 if all(outcome.has_passed for outcome in outcomes) else 1


def tried(library: str) -> Outcome:
    """Installs, writes and reads."""
    print(f"\n=== {library}", flush=True)
    began = time.monotonic()
    try:
        python = installed(library)
    except UnavailableError as error:
        return Outcome(library, "skipped", [("all", "not made", str(error))])
    folder = WORK / "out" / library
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    writer = HERE / "writers" / f"{library}_files.py"
    with (WORK / f"{library}.log").open("w") as log:
        command = [str(python), str(writer), str(folder)]
        try:
            status = subprocess.run(
                command, env=environment(), cwd=WORK, stdout=log, stderr=log, timeout=WRITE_LIMIT_S
            ).returncode
        except subprocess.TimeoutExpired:
            status = 124
    result = "done" if status == 0 else f"its writer ended with {status}: see {log.name}"
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    from compare import compare

    cases = []
    for case in sorted(folder.iterdir()):
        found = compare(case)
        cases.append((case.name, found.kind, found.detail))
    print(f"{len(cases)} checkpoints, {time.monotonic() - began:.0f} s", flush=True)
    return Outcome(library, result, cases)


def installed(library: str) -> Path:
    """The interpreter of a library's environment, which shares torch. Raises UnavailableError."""
    torch = made(TORCH, [ROOT / "constraints.txt"])
    requirements = HERE / "requirements" / f"{library}.txt"
    return made(library, [requirements], torch.parents[1] / site_packages())


def made(name: str, lists: list[Path], shared: Path | None = None) -> Path:
    """The interpreter of an environment, made anew where its lists have changed."""
    folder = WORK / name
    python, mark = folder / "bin" / "python", folder / ".installed"
    wanted = hashlib.sha256(b"".join(path.read_bytes() for path in lists)).hexdigest()
    if mark.is_file() and mark.read_text() == wanted:
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True, timeout=INSTALL_LIMIT_S)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if shared is None:
        command = [str(python), str(ROOT / "environment" / "install_torch.py"), "--build", "cpu"]
    else:
        (folder / site_packages() / "shared.pth").write_text(f"{shared}\n")
        command = [*pip, "--no-deps", "-r", str(lists[0])]
    try:
        subprocess.run(command, check=True, timeout=INSTALL_LIMIT_S, stderr=subprocess.PIPE, text=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        said = (error.stderr or "").strip() if isinstance(error.stderr, str) else ""
        raise UnavailableError(said.splitlines()[-1] if said else str(error)) from None
    mark.write_text(wanted)
    return python


def site_packages() -> Path:
    return Path("lib") / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def environment() -> dict[str, str]:
    """Nothing is downloaded, and nothing compiled: both take minutes."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTHON"))}
    return kept | {"HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}


def lines(outcome: Outcome) -> list[str]:
    counts = Counter(kind for _, kind, _ in outcome.cases)
    counted = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    table = ["", f"{outcome.library}: {outcome.result}; {counted}"]
    for name, kind, detail in outcome.cases:
        if kind != "equal":
            fault = "FAIL" if outcome.is_fault(name, kind, detail) else "    "
            table.append(f"{fault} {name:<34}{kind:<10} {detail[:160]}")
    return table


if __name__ == "__main__":
    sys.exit(main())
