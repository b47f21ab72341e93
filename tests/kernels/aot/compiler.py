"""One kernel, one variant, one target -> one row of facts."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from aot.coverage import variants_of
from aot.limits import SHARED_KIB, SPILL_STORE_BYTES, TENSOR_MEMORY_COLUMNS

# Lines of `ptxas -v`.
REGISTERS = re.compile(r"Used (\d+) registers")
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True, kw_only=True)
class Job:
    """Variant number `index` of `module`, for capability `target` (80, 89, 90, 100). Crosses process borders."""

    module: str
    index: int
    target: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """What came of a job. Registers and spilled bytes are per thread, shared memory in bytes per block."""

    file: str
    kernel: str
    variant: str
    target: int
    warps: int = 0
    stages: int = 0
    registers: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    shared: int = 0
    tensor_memory: int = 0  # columns
    seconds: float = 0.0
    fault: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Without the time, which is another at every run."""
        return {name: value for name, value in asdict(self).items() if name != "seconds"}


def work(job: Job) -> Row:
    """Compile it. What goes wrong is in `Row.fault`: nothing is raised for a kernel's fault."""
    variant = _variant(job)
    names = _names(job, variant)
    began = time.monotonic()
    try:
        facts = _compiled(variant, job.target)
    except Exception as error:
        return Row(**names, seconds=time.monotonic() - began, fault=_one_line(error))
    return Row(**names, **facts, seconds=time.monotonic() - began, fault=_excess(facts, job.target))


def died(job: Job) -> Row:
    """The row of a job whose process has ended."""
    return Row(**_names(job, _variant(job)), fault="the compiler's process has ended without a word")


def _variant(job: Job) -> Any:
    return variants_of(job.module)[job.index]


def _names(job: Job, variant: Any) -> dict[str, Any]:
    return {
        "file": job.module.rpartition(".")[2],
        "kernel": variant.kernel.__name__,
        "variant": variant.name,
        "target": job.target,
        "warps": variant.num_warps,
        "stages": variant.num_stages,
    }


def _compiled(variant: Any, target: int) -> dict[str, int]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from model_server.kernels.dependent import early_on

    kernel = variant.kernel
    launch = early_on(divmod(target, 10)) if "EARLY" in kernel.arg_names else {}
    early = {"EARLY": launch.pop("EARLY")} if launch else {}
    signature, constants = arguments(kernel, variant.signature, {**variant.constants, **early})
    places = {name: kernel.arg_names.index(name) for name in variant.divisible}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs=constants,
        attrs={(place,): [["tt.divisibility", 16]] for place in places.values()},
    )
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, **launch}
    compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    facts = {"shared": compiled.metadata.shared, "tensor_memory": compiled.metadata.tmem_size or 0}
    return facts | assembled(compiled.asm["ptx"], target)


def arguments(
    kernel: Any, signature: Mapping[str, str], constants: Mapping[str, Any]
) -> tuple[dict[str, str], dict[str, Any]]:
    """Signature and constants of all arguments, in the kernel's order; a constant's type is "constexpr".

    A constant that is not named has its default. Raises ValueError for names that the kernel lacks, for arguments that
    neither names, and for constexpr arguments with a type.
    """
    constants = dict(constants)
    for parameter in kernel.params:
        name = parameter.name
        if name not in signature and name not in constants and parameter.has_default:
            constants[name] = parameter.default
        if parameter.is_constexpr and name in signature:
            raise ValueError(f"{name} is a constant and has no type")
    both = signature.keys() & constants.keys()
    unknown = (signature.keys() | constants.keys()) - set(kernel.arg_names)
    missing = set(kernel.arg_names) - signature.keys() - constants.keys()
    for fault, names in (("given twice", both), ("unknown to the kernel", unknown), ("not given", missing)):
        if names:
            raise ValueError(f"arguments {fault}: {', '.join(sorted(names))}")
    return {name: signature.get(name, "constexpr") for name in kernel.arg_names}, constants


def assembled(ptx: str, target: int) -> dict[str, int]:
    """What Triton's own assembler for `target` says of `ptx`. Triton runs it too, but keeps only the binary."""
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [get_ptxas(target).path, "-v", f"--gpu-name={sm_arch_from_capability(target)}"]
        log = subprocess.run(
            [*command, str(source), "-o", str(Path(folder, "kernel.cubin"))], check=True, capture_output=True, text=True
        ).stderr
    registers, spills = REGISTERS.search(log), SPILLS.search(log)
    if registers is None or spills is None:
        raise ValueError(f"the assembler's words are not understood: {log}")
    return {
        "registers": int(registers[1]),
        "spill_stores": int(spills[1]),
        "spill_loads": int(spills[2]),
    }


def _excess(facts: Mapping[str, int], target: int) -> str | None:
    if facts["shared"] > SHARED_KIB[target] * 1024:
        return f"{facts['shared']} bytes of shared memory, sm_{target} has {SHARED_KIB[target] * 1024}"
    if facts["tensor_memory"] > TENSOR_MEMORY_COLUMNS:
        return f"{facts['tensor_memory']} columns of tensor memory, a block has {TENSOR_MEMORY_COLUMNS}"
    if facts["spill_stores"] > SPILL_STORE_BYTES:
        return f"{facts['spill_stores']} bytes spilled, at most {SPILL_STORE_BYTES} are accepted"
    return None


def _one_line(error: BaseException) -> str:
    """The innermost cause: Triton wraps it once per function and repeats the source."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = (
        lines[-1] if isinstance(error, SyntaxError) or type(error).__name__ == "CompilationError" else " ".join(lines)
    )
    return f"{type(error).__name__}: {text[-300:]}"


def jobs(module: str, targets: tuple[int, ...]) -> Iterator[Job]:
    """All that the variants of `module` ask for."""
    for index, variant in enumerate(variants_of(module)):
        for target in targets:
            if target not in variant.excluded:
                yield Job(module=module, index=index, target=target)
