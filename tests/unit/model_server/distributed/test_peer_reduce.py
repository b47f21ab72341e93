"""Who may reduce in one shot, and what goes that way; torch's kernel is stood in for by a sum over fake ranks."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from model_server.distributed import peer_reduce
from model_server.distributed.peer_reduce import (
    LARGE_BYTES,
    LARGE_WAYS,
    MAX_BYTES,
    TRIED_SUMS,
    PeerFacts,
    PeerReduce,
    Way,
    connect,
    may_use,
    why_not,
)

CPU = torch.device("cpu")
GOOD = PeerFacts(
    world_size=4, device_count=8, capability=(9, 0), peer_access=True, nvlink=True, multicast=True, memory="CUDA",
    operators=frozenset(peer_reduce.OPERATORS),
)  # fmt: skip


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_ranks_that_may(world_size: int) -> None:
    assert why_not(replace(GOOD, world_size=world_size)) is None
    assert why_not(replace(GOOD, world_size=world_size, memory="None")) is None, "the kind is not decided yet"


def test_two_gpus_need_no_nvlink() -> None:
    assert why_not(replace(GOOD, world_size=2, nvlink=False)) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"world_size": 3}, "3 ranks, not one of 2, 4, 8"),
        ({"world_size": 8, "device_count": 4}, "4 GPUs visible to 8 ranks"),
        ({"capability": (7, 5)}, "compute capability 7.5 is below 8.0"),
        ({"peer_access": False}, "the GPUs cannot read each other's memory"),
        ({"nvlink": False}, "more than two GPUs without NVLink between all of them"),
        ({"operators": frozenset()}, f"torch {torch.__version__} has no symmetric memory"),
        ({"memory": "NVSHMEM"}, "symmetric memory of the kind NVSHMEM"),
    ],
    ids=lambda value: value if isinstance(value, str) and "torch" not in value else "",
)
def test_ranks_that_may_not(change: dict[str, Any], reason: str) -> None:
    assert why_not(replace(GOOD, **change)) == reason


def test_facts_are_of_every_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    def can(a: int, b: int) -> bool:
        return (a, b) != (1, 0)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", can)
    monkeypatch.setattr(peer_reduce, "_memory_kind", lambda device: "CUDA")
    monkeypatch.setattr(peer_reduce, "_has_multicast", lambda device: True)
    facts = PeerFacts.gather(2, CPU)
    assert facts == replace(GOOD, world_size=2, device_count=2, peer_access=False, nvlink=False)
    assert PeerFacts.gather(4, CPU).peer_access is False, "devices that are not there were asked"


def test_without_nvml_there_is_no_nvlink_and_torch_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """It calls a null pointer then, which ends the process."""
    distributed = pytest.importorskip("torch._C._distributed_c10d")
    asked: list[object] = []
    monkeypatch.setattr(distributed, "_detect_dma_connectivity", lambda *which: asked.append(which), raising=False)
    monkeypatch.setattr(peer_reduce, "NVML", "libthere-is-none.so.1")
    assert not peer_reduce._nvlink([(0, 1)])
    assert asked == []


class FakeOperators:
    """torch.ops.symm_mem of rank `rank` of `size`: the others' messages are this one's times their share of its own.

    What rank 0 sends times r + 1 is what rank r sends, so sums can be foretold. stale: from which call on a sum is that
    of the message before, as without a closing barrier. refuses: the operators that raise."""

    def __init__(
        self, rank: int, size: int, *, copies: bool = True, stale: int | None = None, refuses: tuple[str, ...] = ()
    ) -> None:
        self.calls: list[str] = []
        self._rank, self._size, self._stale, self._refuses = rank, size, stale, refuses
        self._before: Tensor | None = None
        if copies:
            self.one_shot_all_reduce_copy = self._copy

    def one_shot_all_reduce(self, staged: Tensor, op: str, group_name: str) -> Tensor:
        return self._sum("one_shot_all_reduce", staged, op, group_name)

    def two_shot_all_reduce_out(self, staged: Tensor, op: str, group_name: str, output: Tensor) -> Tensor:
        return output.copy_(self._sum("two_shot_all_reduce_out", staged, op, group_name))

    def multimem_all_reduce_(self, staged: Tensor, op: str, group_name: str) -> Tensor:
        return staged.copy_(self._sum("multimem_all_reduce_", staged, op, group_name))

    def _sum(self, name: str, staged: Tensor, op: str, group_name: str) -> Tensor:
        assert (op, group_name) == ("sum", "0")
        if name in self._refuses:
            raise RuntimeError(f"{name}: no\nstack")
        self.calls.append(f"{name} {staged.dtype}")
        message, before = staged, self._before
        if self._stale is not None and len(self.calls) > self._stale and before is not None:
            message = before.view(-1)[: staged.numel()].to(staged.dtype)
            message = torch.zeros_like(staged) if message.numel() < staged.numel() else message.view(staged.shape)
        self._before = staged.clone()
        own = message.double() / (self._rank + 1)
        total = torch.zeros_like(staged)
        for rank in range(self._size):
            total += (own * (rank + 1)).to(staged.dtype)
        return total

    def _copy(self, staged: Tensor, tensor: Tensor, op: str, group_name: str) -> Tensor:
        assert staged.shape == tensor.shape and staged.dtype == tensor.dtype
        staged.copy_(tensor)
        self.calls.append("copy")
        return self.one_shot_all_reduce(staged, op, group_name)


def peer_reduce_of(
    monkeypatch: pytest.MonkeyPatch, rank: int = 1, size: int = 4, **options: Any
) -> tuple[PeerReduce, FakeOperators]:
    fake = FakeOperators(rank, size, **options)
    monkeypatch.setattr(torch, "ops", SimpleNamespace(symm_mem=fake))
    buffer = torch.empty(max(MAX_BYTES[size], LARGE_BYTES.get(size, 0)), dtype=torch.uint8)
    return PeerReduce(buffer, "0", size), fake


@pytest.mark.parametrize("copies", [True, False], ids=["copy", "plain"])
@pytest.mark.parametrize(
    ("dtype", "staged"),
    [(torch.bfloat16, "torch.bfloat16"), (torch.float16, "torch.float32"), (torch.float32, "torch.float32")],
    ids=["bfloat16", "float16", "float32"],
)
@pytest.mark.parametrize("way", ["one_shot", "two_shot", "multimem"])
def test_sums(monkeypatch: pytest.MonkeyPatch, way: Way, dtype: torch.dtype, staged: str, copies: bool) -> None:
    reduce, fake = peer_reduce_of(monkeypatch, copies=copies)
    tensor = torch.arange(128).remainder(16).to(dtype).view(2, 64)
    total = reduce.all_reduce(tensor * 2, way)
    reduce.all_reduce(tensor * 3, way)
    assert torch.equal(total, tensor * 10) and total.dtype == dtype, "the next sum took its memory"
    assert fake.calls[-1] == f"{peer_reduce.OPERATORS[way]} {staged}"
    assert ("copy" in fake.calls) == (way == "one_shot" and copies and dtype != torch.float16)


def test_what_goes_which_way(monkeypatch: pytest.MonkeyPatch) -> None:
    reduce, _ = peer_reduce_of(monkeypatch)
    limit, large = MAX_BYTES[4] // 2, LARGE_BYTES[4] // 2
    whole = torch.empty(large + 32, dtype=torch.bfloat16)
    assert reduce.way(whole[:limit]) == "one_shot"
    assert reduce.way(whole[: limit + 32]) is None
    assert reduce.way(whole[1:9]) is None, "its beginning is not aligned"
    assert reduce.way(whole[8:16]) == "one_shot"
    assert reduce.way(whole[:4]) is None, "8 bytes"
    assert reduce.way(whole[:0]) is None
    assert reduce.way(whole[:64].view(8, 8).T) is None
    assert reduce.way(torch.empty(limit, dtype=torch.float16)) is None, "staged in float32 it is twice as large"
    assert reduce.way(torch.empty(limit // 2, dtype=torch.float16)) == "one_shot"
    assert reduce.way(torch.empty(64, dtype=torch.int64)) is None
    assert reduce.way(torch.empty(64, dtype=torch.float64)) is None
    for way in LARGE_WAYS:
        reduce.large = way
        assert reduce.way(whole[:limit]) == "one_shot"
        assert reduce.way(whole[: limit + 32]) == reduce.way(whole[:large]) == way
        assert reduce.way(whole[: limit + 8]) is None, "the ranks' parts would not be whole vectors"
        assert reduce.way(whole) is None
        assert reduce.way(torch.empty(large // 2, dtype=torch.float16)) == way


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({}, ["multimem", "two_shot"]),
        ({"multicast": False}, ["two_shot"]),
        ({"world_size": 8, "operators": frozenset({"one_shot", "multimem"})}, ["multimem"]),
        ({"operators": frozenset({"one_shot"})}, []),
        ({"world_size": 2}, []),
    ],
)
def test_ways_for_large_messages(change: dict[str, Any], wanted: list[Way]) -> None:
    assert [way for way in LARGE_WAYS if may_use(way, replace(GOOD, **change))] == wanted


def at_once(work: Any) -> Any:
    """A capture that does the work when it is replayed."""
    return work


class Agreement:
    """`agree`, with what the others answer by turn (True beyond), and what this rank was heard to say."""

    def __init__(self, *others: bool) -> None:
        self.others = others
        self.heard: list[bool] = []

    def __call__(self, good: bool) -> bool:
        self.heard.append(good)
        turn = len(self.heard) - 1
        return good and (turn >= len(self.others) or self.others[turn])


def connected(
    monkeypatch: pytest.MonkeyPatch, reduce: PeerReduce, facts: PeerFacts, agree: Agreement, capture: Any = at_once,
    *, rank: int = 1, fails: bool = False,
) -> PeerReduce | None:  # fmt: skip
    def exchange(device: torch.device, world_size: int) -> PeerReduce:
        assert world_size == facts.world_size
        if fails:
            raise RuntimeError("no descriptors\nand a stack")
        return reduce

    monkeypatch.setattr(PeerFacts, "gather", lambda world_size, device: facts)
    monkeypatch.setattr(peer_reduce, "_exchange", exchange)
    # Sums as long as on a GPU only take time here.
    monkeypatch.setattr(peer_reduce, "TRIED_BYTES", 4096)
    return connect(rank, facts.world_size, CPU, agree, capture)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_good_machine(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, size: int) -> None:
    monkeypatch.setattr(peer_reduce, "LARGE_BYTES", {4: 2**20, 8: 2**20})
    reduce, fake = peer_reduce_of(monkeypatch, rank=size - 1, size=size)
    with caplog.at_level(logging.INFO):
        made = connected(monkeypatch, reduce, replace(GOOD, world_size=size), Agreement(), rank=size - 1)
    assert made is reduce and reduce.large == (None if size == 2 else "multimem")
    [line] = caplog.messages
    assert line.startswith("All-reduce of up to") and line.endswith("above through NCCL")
    assert ("by multimem" in line) == (size > 2)
    assert sum("one_shot" in call for call in fake.calls) > 3 * TRIED_SUMS


@pytest.mark.parametrize(
    ("facts", "fails", "others", "said", "heard"),
    [
        (replace(GOOD, peer_access=False), False, (True,), "the GPUs cannot read each other's memory", [False]),
        (GOOD, False, (False,), "another rank says why", [True]),
        (GOOD, True, (True, True), "symmetric memory cannot be exchanged: no descriptors", [True, False]),
        (GOOD, False, (True, False), "another rank says why", [True, True]),
        (GOOD, False, (True, True, False), "the sums in one shot were wrong when they were tried", [True] * 3),
        (GOOD, False, (True,) * 3 + (False,), "the sums in one shot were wrong when they were tried", [True] * 4),
        (GOOD, False, (True,) * 4 + (False,), "the sums in one shot were wrong when they were tried", [True] * 5),
    ],
    ids=[
        "own-reason",
        "others-reason",
        "own-exchange",
        "others-exchange",
        "others-sums",
        "others-capture",
        "others-graph",
    ],
)
def test_all_ranks_go_the_same_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, facts: PeerFacts, fails: bool,
    others: tuple[bool, ...], said: str, heard: list[bool],
) -> None:  # fmt: skip
    reduce, _ = peer_reduce_of(monkeypatch, rank=0)
    agree = Agreement(*others)
    with caplog.at_level(logging.INFO):
        assert connected(monkeypatch, reduce, facts, agree, rank=0, fails=fails) is None
    assert agree.heard == heard
    assert caplog.messages[-1].endswith(said)


@pytest.mark.parametrize("stale", [0, 1, 20, 100, 200])
def test_a_kernel_that_reads_an_earlier_message_is_found(monkeypatch: pytest.MonkeyPatch, stale: int) -> None:
    """Also one that does so only in the middle of a graph."""
    reduce, _ = peer_reduce_of(monkeypatch, copies=False, stale=stale)
    assert connected(monkeypatch, reduce, GOOD, Agreement()) is None


def test_a_wrong_share_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    reduce, _ = peer_reduce_of(monkeypatch, rank=2)
    assert connected(monkeypatch, reduce, GOOD, Agreement(), rank=1) is None


def test_a_graph_that_cannot_be_captured(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def capture(work: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    reduce, _ = peer_reduce_of(monkeypatch)
    agree = Agreement()
    assert connected(monkeypatch, reduce, GOOD, agree, capture) is None
    assert agree.heard[-1] is False and "operation not permitted" in caplog.text


def test_a_large_way_that_fails_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peer_reduce, "LARGE_BYTES", {4: 2**20, 8: 2**20})
    for refused, left in ((("multimem_all_reduce_",), "two_shot"), (tuple(peer_reduce.OPERATORS.values())[1:], None)):
        caplog.clear()
        reduce, _ = peer_reduce_of(monkeypatch, refuses=refused)
        assert connected(monkeypatch, reduce, GOOD, Agreement()) is reduce
        assert reduce.large == left
        assert "All-reduce by multimem was wrong when it was tried: it is not used" in caplog.messages


def test_the_operators_are_called_as_torch_declares_them() -> None:
    """Private ones: a new torch that changes them is to fail here and not on a machine with GPUs."""
    operators = torch.ops.symm_mem
    assert str(operators.one_shot_all_reduce.default._schema) == (
        "symm_mem::one_shot_all_reduce(Tensor input, str reduce_op, str group_name) -> Tensor"
    )
    assert str(operators.one_shot_all_reduce_copy.default._schema) == (
        "symm_mem::one_shot_all_reduce_copy(Tensor symm_buffer, Tensor local_input, str reduce_op, str group_name)"
        " -> Tensor"
    )
    assert str(operators.two_shot_all_reduce_out.default._schema) == (
        "symm_mem::two_shot_all_reduce_out(Tensor(a!) input, str reduce_op, str group_name, Tensor(b!) output)"
        " -> Tensor(b!)"
    )
    assert str(operators.multimem_all_reduce_.default._schema) == (
        "symm_mem::multimem_all_reduce_(Tensor(a!) input, str reduce_op, str group_name) -> Tensor(a!)"
    )
    assert peer_reduce._operators() == set(peer_reduce.OPERATORS)
    memory = peer_reduce._symmetric_memory()
    assert hasattr(memory._SymmetricMemory, "has_multicast_support")
    assert hasattr(memory._SymmetricMemory, "empty_strided_p2p") and hasattr(memory, "rendezvous")
    assert peer_reduce._memory_kind(torch.device("cuda", 0)) in ("CUDA", "None")
