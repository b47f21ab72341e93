"""Decoding on a GPU that is not there: devices, types and shapes agree, and no step asks the device for anything."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.dict_reader import DictReader
from support.fake_cuda import CUDA, DeviceGraphCapture, NeverWaits, OnDeviceAlone, fake_cuda, on_cuda
from support.tiny_models import tiny_checkpoint
from torch import Tensor

from model_server.attention.torch_varlen import TorchVarlenBackend
from model_server.batch.batch import Batch
from model_server.batch.growth import BlockGrowth
from model_server.batch.sequence import NewRequest, Sequence
from model_server.batch.stopping import StoppingState
from model_server.distributed.group import ProcessGroup
from model_server.distributed.layout import Axis, Layout, Ranks
from model_server.distributed.placement import Placement
from model_server.distributed.stage_links import StageTokens
from model_server.engine.answers import Answers
from model_server.engine.calls import DecodeCall, Session
from model_server.engine.steps.choice import next_step, prepare_rows
from model_server.engine.steps.context import StepContext, StepTimes
from model_server.engine.steps.running import Running
from model_server.engine.steps.step import Step
from model_server.features.drafts.device.speculator import BatchWindows, DeviceSpeculator
from model_server.features.drafts.pace import Pace
from model_server.features.drafts.steps import DeviceVerifyStep, DraftedSteps, drafts_by
from model_server.layers.experts.experts import ExpertWeights
from model_server.layers.experts.grouped import GroupedExperts
from model_server.memory.kv_cache import KvCache
from model_server.memory.transfer import Staging
from model_server.models.config import ModelConfig
from model_server.models.decoder.build import build
from model_server.models.decoder.decoder import Decoder
from model_server.models.families import spec_of
from model_server.quantization.forms import Plain
from model_server.runner.cuda_graphs import GraphedRunner
from model_server.runner.runner import Runner
from model_server.sampling.parameters import SamplingParameters, StoppingParameters
from model_server.sampling.sampler import Sampler

BLOCK, NUM_BLOCKS, MAX_LENGTH = 16, 64, 256
DTYPE = torch.bfloat16


def attend(query: Tensor, keys: Tensor, values: Tensor, *given: Any, **named: Any) -> Tensor:
    """In place of the library's attention: shapes alone, and where its arguments lie."""
    tensors = [t for t in (query, keys, values, *given, *named.values()) if isinstance(t, Tensor)]
    assert all(t.device == CUDA for t in tensors)
    return query.new_empty(*query.shape[:-1], values.shape[-1])


def decoder(state: dict[str, Tensor], config: ModelConfig, ranks: Ranks | None = None) -> Decoder:
    spec = spec_of(config)
    made = {name: on_cuda(tensor, DTYPE) for name, tensor in state.items()}
    made |= {spec.names.base + name: t for name, t in made.items() if not name.startswith(spec.names.base)}
    made |= {name.removeprefix(spec.names.base): t for name, t in made.items()}
    reader = DictReader(made)
    reader.dtype = DTYPE
    placement = Placement(CUDA, DTYPE) if ranks is None else Placement(CUDA, DTYPE, ranks)
    return build(spec, reader, placement, TorchVarlenBackend(attend))


def requests(sampler: Sampler, kinds: list[dict[str, Any]], first_id: int = 0) -> list[Sequence]:
    """Prompts of 5 tokens; each has 2 blocks."""
    made = []
    for number, kind in enumerate(kinds, first_id):
        top, prefill = kind.pop("top_n_tokens", 0), kind.pop("prefill_logprobs", False)
        sampling, stopping = SamplingParameters(**kind), StoppingParameters(max_new_tokens=100, ignore_eos_token=True)
        blocks = np.array([1 + 3 * number, 2 + 3 * number], np.int32)
        prompt = [5, 6, 7, 8, 9]
        request = NewRequest(
            id=number, input_ids=tuple(prompt), sampling=sampling, stopping=stopping,
            prefill_logprobs=prefill, top_n_tokens=top, blocks=blocks, cache_len=0, chunk_len=None,
        )  # fmt: skip
        row = sampler.new_row(sampling, prompt, 100, top, end_ids=frozenset({2}))
        stop = StoppingState(stopping, frozenset())
        made.append(
            Sequence(
                request,
                prompt,
                block_size=BLOCK,
                row=row,
                stopping=stop,
                detokenizer=None,
                owned=True,
                prefill_logprobs=prefill,
            )
        )
    return made


KINDS: list[dict[str, Any]] = [
    {},
    {"do_sample": True, "seed": 3},
    {"do_sample": True, "top_k": 7, "seed": 1},
    {"do_sample": True, "top_p": 0.5, "seed": 1},
    {"do_sample": True, "typical_p": 0.5, "top_n_tokens": 2, "seed": 1},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "min_tokens": 2},
    {"presence_penalty": 0.3, "logit_bias": ((3, 1.0), (4, -1.0)), "top_n_tokens": 3},
    {"prefill_logprobs": True},
]

FAMILY = ("llama", "odd_vocab")
MORE = [
    ("qwen2_moe", "plain"), ("gpt_oss", "plain"), ("deepseek_v3", "plain"), ("gemma2", "plain"), ("phi3", "longrope"),
    ("opt", "post_norm"), ("olmo2", "mha"), ("llama4_text", "plain"),
]  # fmt: skip


@pytest.fixture(params=[FAMILY, *(pytest.param(one, marks=pytest.mark.weekly) for one in MORE)], ids="-".join)
def runner(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Decoder]:
    family, variant = request.param
    folder = tiny_checkpoint(family, tmp_path, variant=variant, with_tokenizer=False)
    state, config = (
        load_file(folder / "model.safetensors"),
        ModelConfig(json.loads((folder / "config.json").read_text())),
    )
    with fake_cuda(monkeypatch):
        yield decoder(state, config)


def context_of(runner: Runner, sampler: Sampler, cache: KvCache, **more: Any) -> StepContext:
    return StepContext(
        runner=runner, sampler=sampler, warmed_cache=cache, answers=cast(Answers, None), device=CUDA,
        staging=Staging(CUDA), block_size=BLOCK, grows=True, **more,
    )  # fmt: skip


def start(context: StepContext, batch: Batch) -> Running:
    maker = None if context.watcher is None else drafts_by(cast(Any, context.watcher))
    return Running(batch, context, maker)


def windows_of(running: Running) -> BatchWindows:
    assert isinstance(running.own, DraftedSteps) and running.own.windows is not None
    return running.own.windows


def submit(context: StepContext, running: Running, *new_blocks: BlockGrowth) -> Step:
    """A step of all rows of the batch, which leaves its tokens on the device and waits for nothing."""
    with NeverWaits():
        submitted = submit_step(context, running, *new_blocks)
    assert submitted.sampled is not None and submitted.sampled.ids.device == CUDA
    assert submitted.sampled.ids.shape == (len(running.batch.sequences),)
    return submitted


def submit_step(context: StepContext, running: Running, *new_blocks: BlockGrowth) -> Step:
    call = DecodeCall(batch_ids=(0,), sequence=0, new_blocks=new_blocks)
    failures, _ = prepare_rows(context, running, call)
    assert not failures
    step = next_step(context, running, call, Session(max_prefill_tokens=1000), StepTimes())
    assert step is not None
    step.submit(None)
    running.on_submitted(step)
    return step


def test_every_step_stays_on_the_device(runner: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, then decode steps whose ids the host never sees: replayed and not, with more blocks and with leavers."""
    sampler = Sampler(runner.vocab_size, CUDA)
    cache = KvCache(runner.kv_shapes, NUM_BLOCKS, BLOCK, DTYPE, CUDA)
    assert runner.traits.capturable
    monkeypatch.setattr("model_server.runner.cuda_graphs.TOKEN_SIZES", (64,))
    graphs = GraphedRunner(runner, (8, 4, 2), DeviceGraphCapture())
    graphs.capture(cache, MAX_LENGTH, ProcessGroup())
    assert graphs.captured_sizes == (2, 4, 8) and graphs.captured_tokens == (64,)
    context = context_of(graphs, sampler, cache)
    running = start(context, Batch(0, requests(sampler, [dict(kind) for kind in KINDS])))

    def step(*new_blocks: BlockGrowth) -> None:
        found = submit(context, running, *new_blocks)
        assert found.sampled is not None and found.sampled.ids.dtype == torch.int64

    for _ in range(4):
        step()
    step(BlockGrowth(2, np.array([60])))
    running.filter([0, 2, 3, 5, 6])
    step()
    step()
    running.filter([2])
    step()
    for _ in range(6):  # into its second block
        step()


@pytest.mark.weekly
def test_windows_stay_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_checkpoint("llama", tmp_path, variant="odd_vocab", with_tokenizer=False)
    state = load_file(folder / "model.safetensors")
    config = ModelConfig(json.loads((folder / "config.json").read_text()))
    with fake_cuda(monkeypatch):
        runner = decoder(state, config)
        sampler = Sampler(runner.vocab_size, CUDA)
        cache = KvCache(runner.kv_shapes, NUM_BLOCKS, BLOCK, DTYPE, CUDA)
        graphs = GraphedRunner(runner, (32, 8), DeviceGraphCapture())
        graphs.capture(cache, MAX_LENGTH, ProcessGroup())
        speculator = DeviceSpeculator(3, 128, CUDA, BLOCK, alone=True)
        step_windows(graphs, speculator, sampler, cache, monkeypatch)


def step_windows(
    graphs: GraphedRunner,
    speculator: DeviceSpeculator,
    sampler: Sampler,
    cache: KvCache,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[Running, Callable[[], Step]]:
    """Drafts of changing lengths, with more blocks and with leavers, and prompts that join behind a plain window. The
    batch after these, whose windows the host has not seen, and its next step."""
    speculator.pace = Pace([(1, 1.0)])
    lengths = itertools.cycle([3, 1, 0, 2])
    monkeypatch.setattr(type(speculator), "length", lambda *_: next(lengths))
    context = context_of(graphs, sampler, cache, watcher=speculator)
    running = start(context, Batch(0, requests(sampler, [dict(kind) for kind in KINDS])))

    step = partial(submit, context, running)
    assert not isinstance(step(), DeviceVerifyStep)
    for _ in range(4):
        assert isinstance(step(), DeviceVerifyStep)
    step(BlockGrowth(2, np.array([60])))
    running.filter([0, 2, 3, 5, 6])
    assert isinstance(step(), DeviceVerifyStep)
    running.filter([2, 5])
    assert isinstance(step(), DeviceVerifyStep)
    windows = windows_of(running)
    assert windows.unseen > 0
    windows.unseen = 0  # as if the host had seen all
    for sequence in running.batch.sequences:
        sequence.ids += [7] * (sequence.num_sampled - 1)
    running.batch.join(Batch(1, requests(sampler, [{}], 20)))
    assert not isinstance(step(), DeviceVerifyStep)
    assert isinstance(step(), DeviceVerifyStep)
    return running, step


class PassageOnDevice:
    """One step between two stages, both on the GPU: what a stage gets, and what it passes on."""

    def __init__(self, runner: Decoder, num_rows: int) -> None:
        self.num_rows = num_rows
        self.is_last = runner.traits.passed_on is None
        self._received = runner.traits.received
        self.sent: list[Tensor] = []

    def receive(self, num_tokens: int) -> Tensor | None:
        row = self._received
        return None if row is None else torch.empty(num_tokens, row.width, dtype=row.dtype, device=CUDA)

    def send(self, hidden: Tensor) -> None:
        self.sent.append(hidden)

    def tokens(self) -> StageTokens:
        return StageTokens([7] * self.num_rows, [False] * self.num_rows)


class LinksOnDevice:
    def __init__(self, runner: Decoder) -> None:
        self._runner = runner
        self.passages: list[PassageOnDevice] = []

    def start(self, call: int | None, num_rows: int) -> PassageOnDevice:
        self.passages.append(PassageOnDevice(self._runner, num_rows))
        return self.passages[-1]


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize(("family", "variant"), [FAMILY])
def test_a_step_of_a_stage_never_waits(
    family: str, variant: str, stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It receives, replays, passes on or samples, and takes the ids that come back, all behind what is queued."""
    folder = tiny_checkpoint(family, tmp_path, variant=variant, with_tokenizer=False)
    state = load_file(folder / "model.safetensors")
    config = ModelConfig(json.loads((folder / "config.json").read_text()))
    ranks = Ranks(Layout(stage=Axis(stage, 2)), ProcessGroup(), ProcessGroup())
    with fake_cuda(monkeypatch):
        runner = decoder(state, config, ranks)
        sampler = Sampler(runner.vocab_size, CUDA)
        cache = KvCache(runner.kv_shapes, NUM_BLOCKS, BLOCK, DTYPE, CUDA)
        graphs = GraphedRunner(runner, (8, 4), DeviceGraphCapture())
        graphs.capture(cache, MAX_LENGTH, ProcessGroup())
        assert graphs.captured_sizes == (4, 8) and graphs.captured_tokens == ()
        links = LinksOnDevice(runner)
        context = context_of(graphs, sampler, cache, links=links)
        running = start(context, Batch(0, requests(sampler, [{}, {"do_sample": True, "seed": 3}, {}])))
        for number in range(4):
            with NeverWaits():
                submitted = submit_step(context, running)
                assert submitted.sampled is not None and submitted.sampled.ids.device == CUDA
                if stage == 0:
                    submitted.sampled.to_host()
            num_tokens = 3 * 5 if number == 0 else 3
            (sent,) = links.passages[-1].sent
            assert stage == 1 or (sent.device, sent.dtype, sent.shape[0]) == (CUDA, DTYPE, num_tokens)


@pytest.mark.parametrize(
    ("dtype", "capability", "expected"),
    [(torch.bfloat16, (9, 0), True), (torch.float16, (9, 0), False), (torch.bfloat16, (8, 0), False)],
    ids=["bfloat16", "float16", "ampere"],
)
def test_grouped_products_are_captured_where_they_are_one_kernel(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, capability: tuple[int, int], expected: bool
) -> None:
    with fake_cuda(monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        made = [
            ExpertWeights(*(Plain(torch.empty(8, 8, dtype=dtype, device=CUDA)) for _ in range(2))) for _ in range(2)
        ]
        assert GroupedExperts(made, len(made), torch.relu, dtype, on_input=False).capturable is expected


def test_a_capture_that_touches_the_host_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_cuda(monkeypatch):
        numbers = torch.zeros(3, device=CUDA)
        with pytest.raises(AssertionError, match="touches"), OnDeviceAlone():
            torch.zeros(3).to(CUDA)
        with OnDeviceAlone():
            numbers.add_(1)
        with pytest.raises(RuntimeError), OnDeviceAlone():
            numbers.sum().item()
        with pytest.raises(AssertionError, match="waits"), NeverWaits():
            torch.tensor([1, 2], device=CUDA)
        with NeverWaits():
            torch.tensor([1, 2]).to(CUDA, non_blocking=True)
