"""S9: what breaks on a card must break as the rules say, and leave the rest as it was. The last stage."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.context import Context
from benchmarks.gpu.subjects.drive import Driver, make_engine, random_cache
from benchmarks.gpu.subjects.serving import model_folder, prompts, running
from benchmarks.gpu.subjects.shapes import Shape, by_size
from benchmarks.gpu.subjects.synthetic import make_decoder
from launcher.bench.apis import Sampling, TgiApi
from launcher.bench.load import Load, Target
from launcher.bench.results import Cell
from model_server.errors import OutOfMemoryError
from model_server.memory.kv_cache import KvCache, KvShape
from model_server.rpc.interceptor import is_fatal
from model_server.runner.runner import ModelInputs, Runner, RunnerTraits

# Of the card, after a shard was killed.
BASELINE_SLACK = 64 * 2**20
BACK_S = 5.0
SHARD_END_S = 20.0


class Faulty:
    """A runner that fails once where `fault`, given the next forward's logits, says so."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.fault: Callable[[Tensor], Tensor] | None = None

    @property
    def traits(self) -> RunnerTraits:
        return self._runner.traits

    @property
    def vocab_size(self) -> int:
        return self._runner.vocab_size

    @property
    def max_positions(self) -> int | None:
        return self._runner.max_positions

    @property
    def kv_shapes(self) -> tuple[KvShape, ...]:
        return self._runner.kv_shapes

    def reserve_positions(self, max_positions: int) -> None:
        self._runner.reserve_positions(max_positions)

    def forward(self, inputs: ModelInputs, cache: KvCache) -> Tensor:
        logits = self._runner.forward(inputs, cache)
        fault, self.fault = self.fault, None
        return logits if fault is None else fault(logits)


def run(context: Context) -> None:
    """In this process what a shard survives; in others what it must not."""
    shape = by_size(context.tiny)[0]
    _survived(context, shape)
    _device_assert(context)
    with model_folder(context, shape) as folder:
        if context.has_time(25):
            _killed(context, folder)
        if context.has_time(25):
            _terminated(context, folder, shape)


def _survived(context: Context, shape: Shape) -> None:
    dtype = torch.bfloat16 if context.on_cuda else torch.float32
    runner = Faulty(make_decoder(shape, context.device, dtype))
    engine = make_engine(runner, context.device)
    random_cache(engine, 64 if context.tiny else 4096, dtype)
    driver = Driver(engine)
    prompts = [driver.random_prompt(n) for n in (20, 33, 7)]

    def ids() -> list[list[int]]:
        driver.blocks.reset()
        return list(driver.generate([driver.request(p, 6) for p in prompts]).values())

    before = ids()
    _out_of_memory(context, driver, runner)
    after = ids()
    context.check("after running out of memory the same ids", after == before)
    _nan_row(context, driver, runner, prompts, before)
    context.check("after NaN logits the same ids", ids() == before)
    if context.on_cuda:
        _ballast(context, driver)
        context.check("after a full card the same ids", ids() == before)


def _out_of_memory(context: Context, driver: Driver, runner: Faulty) -> None:
    def refuse(logits: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("injected")

    runner.fault = refuse
    driver.blocks.reset()
    try:
        driver.prefill([driver.request(driver.random_prompt(12), 4)])
    except OutOfMemoryError as error:
        context.check("an injected allocation failure costs its batch alone", not is_fatal(error), str(error))
    else:
        context.check("an injected allocation failure costs its batch alone", False, "it was not reported")


def _ballast(context: Context, driver: Driver) -> None:
    """A real one: everything but 256 MiB of the card is taken while a prefill runs."""
    free, _ = torch.cuda.mem_get_info(context.device)
    torch.cuda.empty_cache()
    held = torch.empty(max(0, free - 256 * 2**20), dtype=torch.uint8, device=context.device)
    length = min(driver.engine.cache.num_blocks * driver.engine.options.block_size - 256, 60_000)
    driver.blocks.reset()
    try:
        driver.prefill([driver.request(driver.random_prompt(length), 2)])
        context.note("full card", f"a prefill of {length} tokens needed less than 256 MiB")
    except OutOfMemoryError as error:
        context.check("a full card costs one batch alone", not is_fatal(error), str(error))
    finally:
        driver.engine.clear(None)
        del held
        torch.cuda.empty_cache()


def _nan_row(
    context: Context, driver: Driver, runner: Faulty, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """One row of three is NaN in the first step: it fails with a message, the others do not notice."""

    def poison(logits: Tensor) -> Tensor:
        logits = logits.clone()
        logits[1] = float("nan")
        return logits

    runner.fault = poison
    driver.blocks.reset()
    requests = [driver.request(p, 6) for p in prompts]
    result = driver.prefill(requests)
    said: dict[int, Any] = {r.id: [] for r in requests}
    errors: dict[int, str] = {}
    while True:
        for generation in result.generations:
            if generation.error is not None:
                errors[generation.request_id] = generation.error
            elif generation.tokens is not None:
                said[generation.request_id] += generation.tokens.ids
        if result.batch is None:
            break
        result = driver.decode()
    failed = list(errors) == [requests[1].id]
    others = [said[r.id] for r in requests if r is not requests[1]]
    context.check("NaN logits fail their own row", failed, "; ".join(errors.values()))
    context.check("the rows beside it are as ever", others == [expected[0], expected[2]])


# A shard's device thread with a job that hits an assertion on the device, or what stands for it on a CPU.
_ASSERT = """
import sys, torch
from model_server.device import enter
from model_server.engine.device_thread import DeviceThread, whole
from model_server.rpc.interceptor import is_fatal
device = torch.device(sys.argv[1])
ended = []
thread = DeviceThread(enter=lambda: enter(device), on_fatal=ended.append, is_fatal=is_fatal)
thread.start()
def fault():
    if device.type == "cpu":
        raise RuntimeError("CUDA error: device-side assert triggered")
    table = torch.zeros(4, 4, device=device)
    torch.nn.functional.embedding(torch.tensor([9], device=device), table)
    torch.cuda.synchronize()
try:
    thread.enqueue(whole(fault), 0).result(30)
except Exception as error:
    print("reported:", str(error).splitlines()[0])
try:
    thread.enqueue(whole(lambda: 1), 1).result(30)
    print("went on")
except Exception as error:
    print("refused:", error)
print("fatal:", bool(ended))
"""


def _device_assert(context: Context) -> None:
    device = "cuda:0" if context.on_cuda else "cpu"
    ran = subprocess.run([sys.executable, "-c", _ASSERT, device], capture_output=True, text=True, timeout=60)
    wanted = ("reported:", "refused:", "fatal: True")
    context.check(
        "an assertion on the device is fatal for its shard, and reported",
        all(word in ran.stdout for word in wanted) and "went on" not in ran.stdout,
        ran.stdout.strip().replace("\n", "; ") or ran.stderr[-300:],
    )


def _killed(context: Context, folder: Path) -> None:
    """SIGKILL of the shard: the launcher ends, and what the shard held is free again."""
    baseline = _used(context)
    with running(context, folder) as server:
        held = _used(context) - baseline
        for pid in shard_pids(folder):
            os.kill(pid, signal.SIGKILL)
        started = time.monotonic()
        back = None
        while time.monotonic() - started < SHARD_END_S and (back is None or server.process.poll() is None):
            gone = not shard_pids(folder) and _used(context) <= baseline + BASELINE_SLACK
            if back is None and gone:
                back = time.monotonic() - started
            time.sleep(0.05)
        detail = "never" if back is None else f"{held / 2**30:.1f} GiB within {back:.2f} s"
        context.check("a killed shard's memory is free within 5 s", back is not None and back <= BACK_S, detail)
        status = server.process.poll()
        context.check("the launcher ends with it, not with status 0", status not in (None, 0), f"status {status}")


def _terminated(context: Context, folder: Path, shape: Shape) -> None:
    """SIGTERM with streams under way: they end whole, and the launcher says by which signal it ended."""
    count, new_tokens = (3, 40) if context.tiny else (32, 256)
    with running(context, folder) as server:
        target = Target(url=server.url, api=TgiApi(Sampling(None, ignore_eos=True)))
        work = prompts(count, 16, shape, seed=5)

        async def streams() -> Cell:
            task = asyncio.create_task(Load(target, new_tokens).closed(work, count))
            await asyncio.sleep(0.1 if context.tiny else 0.5)
            server.process.send_signal(signal.SIGTERM)
            return await task

        cell = asyncio.run(streams())
        whole = cell.num_requests - cell.short_requests if not cell.errors else 0
        context.check("SIGTERM under load: running streams end whole", whole == count, cell.first_error or "")
        status = server.stop(60)
        context.check("SIGTERM under load: running streams end whole", whole == count, f"{whole} of {count}")
        context.check("SIGTERM under load: the launcher ends with status 143", status == 143, f"status {status}")


def _used(context: Context) -> int:
    if not context.on_cuda:
        return 0
    free, total = torch.cuda.mem_get_info(context.device)
    return int(total - free)


def shard_pids(folder: Path) -> list[int]:
    """Processes that serve this folder; zombies have no command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"model_server" in words and b"serve" in words and str(folder).encode() in words:
            found.append(int(path.parent.name))
    return found
