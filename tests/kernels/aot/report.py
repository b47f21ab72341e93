"""The rows as a table for people and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from aot.compiler import Row
from aot.limits import SHARED_KIB, SMALL_SHARED_KIB, SPILL_STORE_BYTES

COLUMNS = ("target", "warps", "stages", "regs", "spilled", "reloaded", "shared KiB", "seconds")


def table(rows: Sequence[Row]) -> str:
    """One line per variant and target; failures again at the end."""
    names = [f"{row.file}.{row.kernel}: {row.variant}" for row in rows]
    width = max(map(len, names), default=0)
    lines = [" " * width + "".join(f"{title:>12}" for title in COLUMNS)]
    for name, row in zip(names, rows, strict=True):
        cells = (
            f"sm_{row.target}", row.warps, row.stages, row.registers, row.spill_stores, row.spill_loads,
            f"{row.shared / 1024:.1f}", f"{row.seconds:.1f}",
        )  # fmt: skip
        lines.append(f"{name:<{width}}" + "".join(f"{cell:>12}" for cell in cells) + ("  FAILED" if row.fault else ""))
    lines.append("")
    large = [row for row in rows if row.target == 80 and not row.fault and row.shared > SMALL_SHARED_KIB * 1024]
    if large:
        lines.append(f"More than the {SMALL_SHARED_KIB} KiB of shared memory that sm_86 and sm_89 have:")
        lines.extend(f"  {row.file}.{row.kernel}: {row.variant}" for row in large)
    failed = [row for row in rows if row.fault]
    lines.extend(f"FAILED {row.file}.{row.kernel}: {row.variant}, sm_{row.target}: {row.fault}" for row in failed)
    lines.append(f"{len(rows)} compiled, {len(failed)} failed")
    return "\n".join(lines)


def write(rows: Sequence[Row], path: Path) -> None:
    """All rows with the versions and limits they were made under."""
    from importlib.metadata import version

    header = {
        "what": "kernels compiled ahead of time, without a GPU: registers and spilled bytes per thread as the "
        "assembler of Triton's wheel reports them, shared memory in bytes per block",
        "triton": version("triton"),
        "shared_limits_kib": {f"sm_{target}": limit for target, limit in SHARED_KIB.items()},
        "spill_store_limit_bytes": SPILL_STORE_BYTES,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join("    " + json.dumps(row.as_json()) for row in rows)
    path.write_text(json.dumps(header, indent=2)[:-2] + ',\n  "kernels": [\n' + lines + "\n  ]\n}\n")
