"""What a shard announces, which errors of one rank leave the others behind, and how a rank leaves them in order."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support.fake_model import FakeStateRunner
from support.graph_doubles import CapturableRunner, PlainGraphCapture
from support.tiny_types import type_checkpoint

from model_server import shard
from model_server.attention import choice
from model_server.attention.backend import AttentionBackend
from model_server.attention.choice import AttentionChoice, Offer
from model_server.config import ServeConfig
from model_server.distributed.group import ProcessGroup
from model_server.distributed.layout import Layout
from model_server.distributed.placement import Placement
from model_server.errors import RequestError, parts_ranks
from model_server.memory.kv_cache import KvCache
from model_server.models.load import load_runner
from model_server.models.model import describe
from model_server.runner.cuda_graphs import GraphedRunner
from model_server.shard import announce, release_ranks, run_shard
from model_server.weights.checkpoint import examine
from wire import demo_model

CPU = torch.device("cpu")


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
    """Notes whether a capture was left when the group was closed."""

    size = 2

    def __init__(self, capture: PlainGraphCapture) -> None:
        self._capture = capture
        self.closed: list[tuple[bool, bool]] = []

    def close(self, *, orderly: bool = True) -> None:
        self.closed.append((orderly, all(graph.released for graph in self._capture.graphs)))


@pytest.mark.parametrize("orderly", [True, False])
def test_graphs_go_before_the_communicator_that_they_hold(orderly: bool) -> None:
    capture, runner = PlainGraphCapture(), CapturableRunner()
    graphs, group = GraphedRunner(runner, (2, 1), capture), TwoRanks(capture)
    graphs.capture(KvCache(runner.kv_shapes, 4, 4, torch.float32, torch.device("cpu")), 8, group)
    assert graphs.captured_sizes == (1, 2)
    release_ranks(graphs, group, orderly=orderly)
    assert group.closed == [(orderly, orderly)], "a device in doubt is not asked for anything"


def test_info_tells_the_backend_that_serves_the_layers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where the layers are known only once the model is loaded, and rule out the first choice."""

    def first(device: torch.device, dtype: torch.dtype) -> Offer:
        backend = SimpleNamespace(name="cpp", tgi_name="flashinfer", block_size=256)
        return Offer(cast(AttentionBackend, backend), lambda layer: "cannot")

    monkeypatch.setitem(choice._OFFERS, "cpp", first)
    assert AttentionChoice(None, CPU).for_layers().tgi_name == "flashinfer"
    type_checkpoint("olmo", tmp_path)
    runner = load_runner(describe(examine(tmp_path)), Placement(CPU, torch.float32), AttentionChoice(None, CPU))
    assert runner.traits.attention is not None and runner.traits.attention.name == "reference"
    facts = announce(ServeConfig(model_id="m"), runner, CPU, torch.float32, Layout())
    assert (facts.attention_impl, facts.block_size, facts.prefix_caching) == ("paged", 16, True)
    assert (facts.kv_cache_dtype, facts.quantize) == ("torch.float32", None)
    narrow = announce(ServeConfig(model_id="m"), runner, CPU, torch.float32, Layout(), torch.float8_e5m2, "gptq")
    assert (narrow.kv_cache_dtype, narrow.quantize) == ("torch.float8_e5m2", "gptq")


@pytest.mark.parametrize(("nodes", "direct"), [(1, True), (2, False)])
def test_ranks_of_several_nodes_read_no_memory_of_each_other(
    monkeypatch: pytest.MonkeyPatch, nodes: int, direct: bool
) -> None:
    given: dict[str, object] = {}
    monkeypatch.setattr(shard, "connect", lambda *args, **kwargs: given.update(kwargs))
    config = ServeConfig(model_id="demo", num_nodes=nodes, endpoints=["a"] * nodes)
    shard._connect(config, Layout.of(0, 2, num_nodes=nodes).world, torch.device("cpu"))
    assert given["one_shot"] is direct


def test_info_of_a_model_that_keeps_states() -> None:
    facts = announce(ServeConfig(model_id="m"), FakeStateRunner(), CPU, torch.float32, Layout())
    assert (facts.attention_impl, facts.block_size) == ("paged", 16)
    assert not (facts.chunking or facts.prefix_caching or facts.grows)


def test_threads_of_loading_end_once_all_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A drafter leaves threads as the model does: beside them those of each step would sleep between operators."""
    done: list[str] = []

    class Served(Exception):
        pass

    def noted(name: str, then: Any) -> None:
        def call(*args: Any, **kwargs: Any) -> Any:
            done.append(name)
            return then(*args, **kwargs)

        monkeypatch.setattr(shard, name, call)

    def serve(*_: Any) -> None:
        raise Served

    for name in ("load_runner", "load_drafts", "load_images"):
        noted(name, getattr(shard, name))
    noted("finish_loading", lambda device: None)
    monkeypatch.setattr(shard, "tune", lambda *args, **kwargs: 1)
    monkeypatch.setattr(shard, "_serve", serve)
    folder = Path(demo_model.__file__).parent
    config = ServeConfig(model_id=str(folder), speculator=str(folder), uds_path=tmp_path / "s")
    with pytest.raises(Served):
        run_shard(config, examine(folder))
    assert done == ["load_runner", "load_drafts", "load_images", "finish_loading"]
