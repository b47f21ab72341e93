"""What came of the libraries: which cases are faults, and how the whole run ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

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


# Library -> how many of its checkpoints are at least equal, and at least equal or refused: docs/quantization.md has the
# counts. Fewer mean that a library, or its writer here, no longer makes what it made.
FLOORS: dict[str, tuple[int, int]] = {
    "bitsandbytes": (29, 29),
    "autoawq": (10, 10),
    "torchao": (60, 66),
    "gptqmodel": (46, 79),
    "auto_round": (67, 80),
    "llm_compressor": (91, 97),
}


@dataclass(frozen=True)
class Case:
    """kind: equal, refused, different, crashed, or not made, where the library does not take its own option."""

    name: str
    kind: str
    detail: str = ""


@dataclass(frozen=True)
class Outcome:
    """What came of a library. `skipped` and `fault` say why it was not tried, or not wholly."""

    library: str
    cases: Sequence[Case] = ()
    skipped: str = ""
    fault: str = ""

    @property
    def has_failed(self) -> bool:
        return bool(self.fault) or any(self.is_fault(case) for case in self.cases)

    def is_fault(self, case: Case) -> bool:
        is_known = any(fnmatch(case.name, pattern) for pattern in REFUSED[self.library])
        return case.kind in ("different", "crashed") or (case.kind == "refused" and not (is_known and case.detail))


def of_writer(library: str, status: int, cases: Sequence[Case]) -> Outcome:
    """What came of a library whose writer ended with `status`: one that made nothing has not been tried."""
    fault = f"its writer ended with {status}: see {library}.log" if status else ""
    if not fault and all(case.kind == "not made" for case in cases):
        fault = f"its writer made none of {len(cases)} checkpoints: see {library}.log"
    return Outcome(library, cases, fault=fault or _too_few(library, cases))


def _too_few(library: str, cases: Sequence[Case]) -> str:
    """The fault of a library that made fewer checkpoints than before; empty: as many."""
    counts = Counter(case.kind for case in cases)
    equal, read = counts["equal"], counts["equal"] + counts["refused"]
    least_equal, least_read = FLOORS[library]
    if equal >= least_equal and read >= least_read:
        return ""
    return (
        f"{equal} checkpoints are equal and {read - equal} refused, where {least_equal} and {least_read - least_equal} "
        f"were: see {library}.log"
    )


def table(outcome: Outcome) -> str:
    """What was not equal, and why."""
    counts = Counter(case.kind for case in outcome.cases)
    parts = [f"{count} {kind}" for kind, count in sorted(counts.items())]
    parts += [f"skipped: {outcome.skipped}"] if outcome.skipped else []
    parts += [f"FAIL: {outcome.fault}"] if outcome.fault else []
    lines = [f"{outcome.library}: {', '.join(parts)}"]
    for case in outcome.cases:
        if case.kind != "equal":
            fault = "FAIL" if outcome.is_fault(case) else "    "
            lines.append(f"{fault} {case.name:<34}{case.kind:<10} {case.detail[:160]}")
    return "\n".join(lines)


def ending(outcomes: Sequence[Outcome]) -> tuple[int, str]:
    """The status of the run and its last line; a run that tried nothing has not passed."""
    failed = [one.library for one in outcomes if one.has_failed]
    skipped = [one.library for one in outcomes if one.skipped]
    line = f"{len(outcomes) - len(skipped)} libraries tried"
    line += f"; skipped: {', '.join(skipped)}" if skipped else ""
    line += f"; failed: {', '.join(failed)}" if failed else ""
    return (1 if failed else 2 if len(skipped) == len(outcomes) else 0), line
