"""What the machine has: GPUs, cores, memory. Asks the driver's own tool and the kernel, never torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from wire.host import machine

_QUERY = "uuid,name,memory.total,compute_cap"
_TIMEOUT_S = 20.0
"""nvidia-smi needs seconds on a machine with many GPUs and no persistence daemon."""


def has_compiled_kernels(environ: Mapping[str, str]) -> bool:
    """Whether Triton has kept kernels of an earlier start, of which it compiles the missing ones only."""
    folder = Path(environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    try:
        return any(folder.iterdir())
    except OSError:
        return False


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One visible GPU. `card` is the name in TGI's spelling (`nvidia-h200`), empty if unknown."""

    uuid: str = ""
    card: str = ""
    memory_mib: int | None = None
    compute_capability: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The machine as this launch may use it: GPUs after `CUDA_VISIBLE_DEVICES`, cores after affinity and quota."""

    gpus: tuple[Gpu, ...] = ()
    unused_gpus: int = 0
    """Visible GPUs that the installed torch has no code for."""
    cpu: str = ""
    """Name of the processor, empty if unknown."""
    cores: int = 1
    memory_bytes: int | None = None
    free_bytes: int | None = None
    """Of the memory, what processes may still take."""
    multiplies_bfloat16: bool = False
    """The CPU has instructions for it."""
    shared_memory_bytes: int | None = None
    omp_num_threads: int | None = None
    """What the operator has set; None leaves it to the shards."""

    def devices(self, num_shard: int) -> str:
        """What `num_shard` shards run on, for people."""
        if not self.gpus:
            return f"{self.cpu or 'CPU'}, {self.cores} cores"
        return "\n".join(f"{rank}: {gpu.card or gpu.uuid}" for rank, gpu in enumerate(self.gpus[:num_shard]))

    def memory(self, num_shard: int, fraction: float) -> str:
        """What they may use of it, for people."""
        if not self.gpus:
            return f"{self.memory_bytes / 2**30:.1f} GiB" if self.memory_bytes else "unknown"
        sizes = [gpu.memory_mib for gpu in self.gpus[:num_shard]]
        known = [f"{mib / 1024:.1f} GiB" if mib else "unknown" for mib in sizes]
        shown = known[0] if len(set(known)) == 1 else ", ".join(known)
        return (
            shown + (" each" if len(known) > 1 else "") + (f", {fraction:.0%} of it to be used" if fraction < 1 else "")
        )


def detect(environ: Mapping[str, str]) -> Hardware:
    """Looks at the machine. Never raises: what cannot be found out is absent."""
    gpus = visible(_query_gpus(), environ.get("CUDA_VISIBLE_DEVICES"))
    is_usable = not gpus or not _is_cpu_build()
    threads = environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return Hardware(
        gpus=gpus if is_usable else (),
        unused_gpus=0 if is_usable else len(gpus),
        cpu=_cpu_model(),
        cores=_cores(),
        memory_bytes=machine.total_memory(),
        free_bytes=machine.free_memory(),
        multiplies_bfloat16=machine.multiplies_bfloat16(),
        shared_memory_bytes=_shared_memory_bytes(),
        omp_num_threads=int(threads) if threads.isdecimal() else None,
    )


def _is_cpu_build() -> bool:
    """Whether the installed torch, by its version and unimported, has no code for GPUs."""
    from importlib import metadata

    try:
        return metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def process_age_s() -> float:
    """Seconds since this process was started, interpreter and imports included; 0 if the kernel does not say."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError):
        return 0.0


def visible(gpus: tuple[Gpu, ...], selection: str | None) -> tuple[Gpu, ...]:
    """The GPUs that `CUDA_VISIBLE_DEVICES` leaves, in its order. As in CUDA, an invalid entry ends the list."""
    if selection is None or selection.strip().lower() == "all":
        return gpus
    chosen: list[Gpu] = []
    for entry in selection.split(","):
        gpu = _named(gpus, entry.strip())
        if gpu is None or gpu in chosen:
            break
        chosen.append(gpu)
    return tuple(chosen)


def _named(gpus: tuple[Gpu, ...], entry: str) -> Gpu | None:
    if entry.isdecimal():
        return gpus[int(entry)] if int(entry) < len(gpus) else None
    if entry.startswith("MIG-") and gpus:
        # Slices are not listed by the query; each entry is one device of the GPU that they are parts of.
        return Gpu(uuid=entry, card=gpus[0].card, compute_capability=gpus[0].compute_capability)
    matches = [gpu for gpu in gpus if entry and gpu.uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


def _query_gpus() -> tuple[Gpu, ...]:
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        try:
            answer = subprocess.run(
                [tool, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"],
                capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL,
            )  # fmt: skip
            if answer.returncode == 0:
                return parse_query(answer.stdout)
        except (OSError, subprocess.TimeoutExpired):
            pass
    # A container without the tool: the device files still say how many there are.
    files = [path for path in Path("/dev").glob("nvidia[0-9]*") if path.name.removeprefix("nvidia").isdecimal()]
    return tuple(Gpu(uuid=path.name) for path in sorted(files))


def parse_query(text: str) -> tuple[Gpu, ...]:
    """The GPUs in the tool's answer; a line that does not look like one is skipped."""
    gpus = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) != 4 or not parts[0].startswith("GPU-"):
            continue
        major, _, minor = parts[3].partition(".")
        gpus.append(
            Gpu(
                uuid=parts[0],
                card=parts[1].lower().replace(" ", "-"),
                memory_mib=int(parts[2]) if parts[2].isdecimal() else None,
                compute_capability=(int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None,
            )
        )
    return tuple(gpus)


def _cores() -> int:
    count = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            count = min(count, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return count


def _shared_memory_bytes() -> int | None:
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return None
