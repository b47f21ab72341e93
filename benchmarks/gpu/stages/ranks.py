"""S8: several ranks with one card: NCCL alone with itself, and two shards of a model that meet over gloo."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.cases.attention_alone import make_metadata
from benchmarks.gpu.context import Context
from benchmarks.gpu.measuring.environment import ROOT
from benchmarks.gpu.measuring.timing import captured, measure
from benchmarks.gpu.subjects.shapes import LLAMA_1B, TOY_UNTIED, Shape
from benchmarks.gpu.subjects.synthetic import make_decoder
from model_server.attention.choice import AttentionChoice
from model_server.distributed.group import ProcessGroup
from model_server.memory.kv_cache import KvCache
from model_server.runner.runner import ModelInputs

RANKS = 2
LENGTHS = (70, 33)
# float32 sums in another order.
TOLERANCE = 1e-4
LIMIT_S = 60.0


class ThroughHost(ProcessGroup):
    """Collectives of gloo over copies in host memory: two ranks of NCCL refuse to share a card."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        copy = tensor.cpu()
        dist.all_reduce(copy)
        return tensor.copy_(copy)

    def all_gather_last(self, tensor: Tensor, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        copy = tensor.cpu().contiguous()
        parts = [torch.empty_like(copy) for _ in range(self.size)]
        dist.all_gather(parts, copy)
        gathered = torch.cat(parts, dim=-1).to(tensor.device, dtype)
        return gathered if out is None else out.copy_(gathered)

    def all_reduce_min(self, value: int) -> int:
        tensor = torch.tensor([value])
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
        return int(tensor.item())

    def barrier(self) -> None:
        dist.barrier()


def run(context: Context) -> None:
    """One rank of NCCL (of gloo on a CPU), then two shards."""
    _alone(context)
    _two_shards(context)


def _alone(context: Context) -> None:
    """Meet, sum, capture a sum in a graph, part."""
    backend = "nccl" if context.on_cuda else "gloo"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", _free_port(), 1, is_master=True, timeout=timedelta(seconds=30))
    dist.init_process_group(
        backend, store=store, rank=0, world_size=1, timeout=timedelta(seconds=30),
        device_id=context.device if context.on_cuda else None,
    )  # fmt: skip
    try:
        tensor = torch.randn(256, 4096, device=context.device)
        expected = tensor.clone()
        dist.all_reduce(tensor)
        context.check(f"{backend}, world size 1: a sum is what it was", torch.equal(tensor, expected))
        replay = captured(lambda: dist.all_reduce(tensor), context.device)
        timing = measure(replay, context.device, repeats=10)
        context.check(f"{backend}, world size 1: a sum in a captured graph", torch.equal(tensor, expected))
        context.figure(f"{backend} all-reduce in a graph, world size 1", timing.seconds, "s", spread=timing.spread)
        del replay
    finally:
        dist.destroy_process_group()
    context.check(f"{backend}, world size 1: destroyed", not dist.is_initialized())


def _two_shards(context: Context) -> None:
    """Each rank a process of its own; rank 0's logits against those of one rank."""
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        out = Path(folder) / "logits.pt"
        arguments = [str(port), str(context.device), str(int(context.tiny)), str(out)]
        children = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu.stages.ranks", str(rank), *arguments],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT,
            )
            for rank in range(RANKS)
        ]  # fmt: skip
        words = []
        try:
            for child in children:
                said, _ = child.communicate(timeout=LIMIT_S)
                words.append(said.decode(errors="replace")[-400:])
        finally:
            for child in children:
                child.kill()
                child.wait()
        if any(child.returncode for child in children):
            context.check("two shards of one model", False, " | ".join(words))
            return
        sharded = torch.load(out).to(context.device)
    whole = _logits(ProcessGroup(), context.device, context.tiny)
    error = float((sharded - whole).norm() / whole.norm())
    equal = torch.equal(sharded.argmax(-1), whole.argmax(-1))
    context.check("two shards give the logits of one", error < TOLERANCE and equal, f"relative error {error:.1e}")


def _shape(tiny: bool) -> Shape:
    """Float32, so that only the order of sums differs."""
    return TOY_UNTIED_TWO if tiny else LLAMA_1B


TOY_UNTIED_TWO = Shape(
    name="toy of two", hidden=64, layers=2, heads=4, kv_heads=2, head_dim=32, ffn=96, vocab=TOY_UNTIED.vocab,
    positions=2048,
)  # fmt: skip


def _logits(group: ProcessGroup, device: torch.device, tiny: bool) -> Tensor:
    shape = _shape(tiny)
    backend = AttentionChoice(None, device).for_layers()
    runner = make_decoder(shape, device, torch.float32, attention=backend, group=group)
    size = backend.block_size
    counts = [-(-n // size) for n in LENGTHS]
    first = [1 + sum(counts[:i]) for i in range(len(counts))]
    tables = [list(range(a, a + n)) for a, n in zip(first, counts, strict=True)]
    cache = KvCache(runner.kv_shapes, sum(counts) + 1, size, torch.float32, device)
    generator = torch.Generator().manual_seed(11)
    inputs = ModelInputs(
        input_ids=torch.randint(2, shape.vocab, (sum(LENGTHS),), generator=generator).to(device),
        positions=torch.cat([torch.arange(n) for n in LENGTHS]).to(device),
        attention=make_metadata(tables, [(0, n) for n in LENGTHS], size, device),
        logit_rows=None,
    )
    with torch.inference_mode():
        return runner.forward(inputs, cache).float()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def main(rank: int, port: int, device: torch.device, tiny: bool, out: Path) -> None:
    """One shard."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    limit = timedelta(seconds=LIMIT_S)
    store = dist.TCPStore("127.0.0.1", port, RANKS, is_master=rank == 0, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=limit)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    logits = _logits(ThroughHost(rank, RANKS), device, tiny)
    if rank == 0:
        torch.save(logits.cpu(), out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), torch.device(sys.argv[3]), sys.argv[4] == "1", Path(sys.argv[5]))
