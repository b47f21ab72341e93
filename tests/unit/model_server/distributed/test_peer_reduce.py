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
from model_server.distributed.peer_reduce import MAX_BYTES, OneShot, PeerFacts, connect, sums_correctly, why_not

CPU = torch.device("cpu")
GOOD = PeerFacts(
    world_size=4, device_count=8, capability=(9, 0), peer_access=True, nvlink=True, operators=True, memory="CUDA"
)


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_ranks_that_may(world_size: int) -> None:
    assert why_not(replace(GOOD, world_size=world_size)) is None


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
        ({"operators": False}, f"torch {torch.__version__} has no symmetric memory"),
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
    facts = PeerFacts.gather(2, CPU)
    assert facts == replace(GOOD, world_size=2, device_count=2, peer_access=False, nvlink=False)
    assert PeerFacts.gather(4, CPU).peer_access is False, "devices that are not there were asked"


class FakeOperators:
    """torch.ops.symm_mem of rank `rank` of `size`: the others' messages are this one's times their share of its own.

    What rank 0 sends times r + 1 is what rank r sends, so sums can be foretold."""

    def __init__(self, rank: int, size: int, *, copies: bool, stale: bool = False) -> None:
        self.calls: list[str] = []
        self._rank, self._size, self._stale = rank, size, stale
        self._first: Tensor | None = None
        if copies:
            self.one_shot_all_reduce_copy = self._copy

    def one_shot_all_reduce(self, staged: Tensor, op: str, group_name: str) -> Tensor:
        assert (op, group_name) == ("sum", "0")
        self.calls.append(str(staged.dtype))
        if self._stale:
            self._first = staged.clone() if self._first is None else self._first
            staged = self._first.view(-1)[: staged.numel()].view(staged.shape).to(staged.dtype)
        own = staged.double() / (self._rank + 1)
        total = torch.zeros_like(staged)
        for rank in range(self._size):
            total += (own * (rank + 1)).to(staged.dtype)
        return total

    def _copy(self, staged: Tensor, tensor: Tensor, op: str, group_name: str) -> Tensor:
        assert staged.shape == tensor.shape and staged.dtype == tensor.dtype
        staged.copy_(tensor)
        self.calls.append("copy")
        return self.one_shot_all_reduce(staged, op, group_name)


def one_shot(
    monkeypatch: pytest.MonkeyPatch, rank: int = 1, size: int = 4, *, copies: bool = True, stale: bool = False
) -> tuple[OneShot, FakeOperators]:
    fake = FakeOperators(rank, size, copies=copies, stale=stale)
    monkeypatch.setattr(torch, "ops", SimpleNamespace(symm_mem=fake))
    return OneShot(torch.empty(MAX_BYTES[size], dtype=torch.uint8), "0", MAX_BYTES[size]), fake


@pytest.mark.parametrize("copies", [True, False], ids=["copy", "plain"])
@pytest.mark.parametrize(
    ("dtype", "staged"),
    [(torch.bfloat16, "torch.bfloat16"), (torch.float16, "torch.float32"), (torch.float32, "torch.float32")],
    ids=["bfloat16", "float16", "float32"],
)
def test_sums(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, staged: str, copies: bool) -> None:
    shot, fake = one_shot(monkeypatch, copies=copies)
    tensor = torch.arange(128).remainder(16).to(dtype).view(2, 64)
    total = shot.all_reduce(tensor * 2)
    assert torch.equal(total, tensor * 10) and total.dtype == dtype
    assert fake.calls == (["copy", staged] if copies and dtype != torch.float16 else [staged])


def test_what_goes_that_way(monkeypatch: pytest.MonkeyPatch) -> None:
    shot, _ = one_shot(monkeypatch)
    limit = MAX_BYTES[4] // 2
    whole = torch.empty(limit + 8, dtype=torch.bfloat16)
    assert shot.takes(whole[:limit])
    assert not shot.takes(whole)
    assert not shot.takes(whole[1:9]), "its beginning is not aligned"
    assert shot.takes(whole[8:16])
    assert not shot.takes(whole[:4]), "8 bytes"
    assert not shot.takes(whole[:0])
    assert not shot.takes(whole[:64].view(8, 8).T)
    assert not shot.takes(torch.empty(limit, dtype=torch.float16)), "staged in float32 it is twice as large"
    assert shot.takes(torch.empty(limit // 2, dtype=torch.float16))
    assert not shot.takes(torch.empty(64, dtype=torch.int64))
    assert not shot.takes(torch.empty(64, dtype=torch.float64))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_it_is_tried_before_it_is_used(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    rank = size - 1
    good, _ = one_shot(monkeypatch, rank, size)
    assert sums_correctly(good, rank, size, CPU)
    stale, _ = one_shot(monkeypatch, rank, size, stale=True)
    assert not sums_correctly(stale, rank, size, CPU), "sums of an earlier message went unnoticed"
    few, _ = one_shot(monkeypatch, rank, size)
    assert not sums_correctly(few, rank - 1, size, CPU), "a wrong share went unnoticed"


def agreeing(*others: bool) -> tuple[Any, list[bool]]:
    """`agree`, with what the other ranks answer each time; and what this one was heard to say."""
    heard: list[bool] = []

    def agree(good: bool) -> bool:
        heard.append(good)
        return good and others[len(heard) - 1]

    return agree, heard


@pytest.mark.parametrize(
    ("facts", "fails", "others", "said", "heard"),
    [
        (GOOD, False, (True, True, True), "All-reduce of up to 512 KiB in one shot, above through NCCL", [True] * 3),
        (replace(GOOD, peer_access=False), False, (True,), "the GPUs cannot read each other's memory", [False]),
        (GOOD, False, (False,), "another rank says why", [True]),
        (GOOD, True, (True, True), "symmetric memory cannot be exchanged: no descriptors", [True, False]),
        (GOOD, False, (True, False), "another rank says why", [True, True]),
        (GOOD, False, (True, True, False), "the sums in one shot were wrong when they were tried", [True] * 3),
    ],
    ids=["all", "own-reason", "others-reason", "own-exchange", "others-exchange", "wrong-sums"],
)
def test_all_ranks_go_the_same_way(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    facts: PeerFacts,
    fails: bool,
    others: tuple[bool, ...],
    said: str,
    heard: list[bool],
) -> None:
    shot, _ = one_shot(monkeypatch, rank=0)

    def exchange(device: torch.device, max_bytes: int) -> OneShot:
        assert max_bytes == MAX_BYTES[4]
        if fails:
            raise RuntimeError("no descriptors\nand a stack")
        return shot

    monkeypatch.setattr(PeerFacts, "gather", lambda world_size, device: facts)
    monkeypatch.setattr(peer_reduce, "_exchange", exchange)
    agree, said_here = agreeing(*others)
    with caplog.at_level(logging.INFO):
        result = connect(0, 4, CPU, agree)
    assert (result is shot) == (len(heard) == 3 and others[-1])
    assert said_here == heard
    [line] = caplog.messages
    assert line.endswith(said)


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
    memory = peer_reduce._symmetric_memory()
    assert hasattr(memory._SymmetricMemory, "empty_strided_p2p") and hasattr(memory, "rendezvous")
    assert peer_reduce._memory_kind(torch.device("cuda", 0)) in ("CUDA", "None")
