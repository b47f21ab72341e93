"""Which errors of one rank leave the others behind, and how a rank leaves them in order."""

from __future__ import annotations

import pytest
import torch
from support.graph_doubles import CapturableRunner, PlainRecorder

from model_server.distributed.group import ProcessGroup
from model_server.errors import RequestError
from model_server.memory.kv_cache import KvCache
from model_server.runner.cuda_graphs import GraphedRunner
from model_server.shard import leave, parts_ranks


@pytest.mark.parametrize(
    ("error", "parts"),
    [
        (MemoryError(), True),
        (BlockingIOError(11, "Resource temporarily unavailable"), True),
        (RequestError("bad"), False),
        (ValueError("bad"), False),
    ],
    ids=["memory", "system", "request", "value"],
)
def test_what_only_one_rank_lacks(error: Exception, parts: bool) -> None:
    assert parts_ranks(error) is parts


class TwoRanks(ProcessGroup):
    """Notes whether a recording was left when the group was closed."""

    size = 2

    def __init__(self, recorder: PlainRecorder) -> None:
        self._recorder = recorder
        self.closed: list[tuple[bool, bool]] = []

    def close(self, *, orderly: bool = True) -> None:
        self.closed.append((orderly, all(recording.released for recording in self._recorder.recordings)))


@pytest.mark.parametrize("orderly", [True, False])
def test_recordings_go_before_the_communicator_that_they_hold(orderly: bool) -> None:
    recorder, runner = PlainRecorder(), CapturableRunner()
    graphs, group = GraphedRunner(runner, (2, 1), recorder), TwoRanks(recorder)
    graphs.capture(KvCache(runner.kv_shapes, 4, 4, torch.float32, torch.device("cpu")), 8, group)
    assert graphs.recorded_sizes == (1, 2)
    leave(graphs, group, orderly=orderly)
    assert group.closed == [(orderly, orderly)], "a device in doubt is not asked for anything"
