"""Drafters that compute, on a GPU that is not there: devices and shapes agree, and no step asks the device."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support.dict_reader import DictReader
from support.fake_cuda import CUDA, DeviceGraphCapture, fake_cuda, on_cuda
from support.loading import FixedAttention
from support.tiny_drafters import eagle3, medusa, mlp_speculator, with_mtp
from support.tiny_models import tiny_checkpoint
from torch import Tensor
from unit.model_server.test_fake_cuda import (
    BLOCK,
    DTYPE,
    MAX_LENGTH,
    NUM_BLOCKS,
    attend,
    decoder,
    step_windows,
    windows_of,
)

from model_server.attention.torch_varlen import TorchVarlenBackend
from model_server.distributed.group import ProcessGroup
from model_server.distributed.placement import Placement
from model_server.features.drafts.device.model_speculator import DeviceModelSpeculator
from model_server.features.drafts.drafters.draft_model import DraftModel
from model_server.features.drafts.drafters.drafter import DraftedRunner, Drafter
from model_server.features.drafts.drafters.eagle_loading import load_eagle
from model_server.features.drafts.drafters.heads import Heads
from model_server.features.drafts.drafters.medusa import load_medusa
from model_server.features.drafts.drafters.mlp_speculator import SpeculatorShape, load_mlp_speculator
from model_server.features.drafts.drafters.mtp import load_mtp
from model_server.features.drafts.pace import Pace
from model_server.features.drafts.steps import DeviceVerifyStep
from model_server.memory.kv_cache import KvCache
from model_server.models.config import ModelConfig
from model_server.models.decoder.decoder import Decoder
from model_server.models.decoder.loader import Loader
from model_server.models.families import spec_of
from model_server.quantization.scheme import Scheme
from model_server.runner.cuda_graphs import GraphedRunner
from model_server.sampling.sampler import Sampler

MOST, HIDDEN, VOCAB = 3, 64, 320
PLACEMENT = Placement(CUDA, DTYPE)


def read(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    (file,) = folder.glob("*.safetensors")
    return load_file(file), json.loads((folder / "config.json").read_text())


def reader_of(state: dict[str, Tensor]) -> DictReader:
    reader = DictReader({name: on_cuda(tensor, DTYPE) for name, tensor in state.items()})
    reader.dtype = DTYPE
    return reader


def drafter_of(kind: str, state: dict[str, Tensor], fields: dict[str, Any], base: Decoder, base_fields: Any) -> Drafter:
    """On the fake GPU, from what was read of its folder."""
    reader: Any = reader_of(state)
    loader = Loader(reader, CUDA, ProcessGroup())
    spec = spec_of(ModelConfig(base_fields))
    if kind == "medusa":
        assert base.output is not None
        return Heads(load_medusa(loader, MOST, 2, HIDDEN, VOCAB, base.output.head), MOST, HIDDEN, loader)
    if kind == "mlp":
        shape = SpeculatorShape(MOST, 48, HIDDEN, VOCAB, tied=False, scales_input=True)
        return Heads(load_mlp_speculator(loader, MOST, shape), MOST, HIDDEN, loader)
    if kind == "eagle":
        return load_eagle(fields, reader, spec, base, PLACEMENT, FixedAttention(TorchVarlenBackend(attend)))
    if kind == "mtp":
        return load_mtp(reader, spec, Scheme(), base, PLACEMENT)
    return DraftModel(decoder(state, ModelConfig(fields)), base)


FOLDERS: dict[str, Callable[[Path], Path]] = {
    "medusa": partial(medusa, number=MOST),
    "mlp": partial(mlp_speculator, number=MOST, scales_input=True),
    "eagle": partial(eagle3, draft_vocab=None, fc_norm=True, states=2, eagle_aux_hidden_state_layer_ids=[1, 0]),
    "mtp": lambda path: path.parent / "base",
    "model": lambda path: tiny_checkpoint("llama", path, num_hidden_layers=1, vocab_size=VOCAB, with_tokenizer=False),
}


@pytest.mark.parametrize(
    "kind", ["model", *(pytest.param(one, marks=pytest.mark.weekly) for one in ("eagle", "medusa", "mlp", "mtp"))]
)
def test_drafts_stay_on_the_device(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, windows with drafts of changing lengths, more blocks, leavers, a request that joins, plain steps."""
    base = tiny_checkpoint("llama", tmp_path / "base", num_hidden_layers=3, vocab_size=VOCAB, with_tokenizer=False)
    if kind == "mtp":
        with_mtp(base, copies_head=False)
    state, fields = read(base)
    found = read(FOLDERS[kind](tmp_path / "drafter"))
    monkeypatch.setattr("model_server.features.drafts.drafters.mtp._is_shared", lambda *_: False)  # compares numbers
    with fake_cuda(monkeypatch):
        runner = decoder(state, ModelConfig(fields))
        drafter = drafter_of(kind, *found, runner, fields)
        drafter.pace = Pace([(1, 0.01)])
        whole: Any = DraftedRunner(runner, drafter)
        sampler = Sampler(runner.vocab_size, CUDA)
        cache = KvCache(whole.kv_shapes, NUM_BLOCKS, BLOCK, DTYPE, CUDA)
        graphs = GraphedRunner(whole, (32,), DeviceGraphCapture(), keeps=whole.retains)
        graphs.capture(cache, MAX_LENGTH, ProcessGroup())
        assert graphs.captured_sizes == (32,)
        speculator = DeviceModelSpeculator(MOST, 128, CUDA, BLOCK, drafter, alone=True)
        running, step = step_windows(graphs, speculator, sampler, cache, monkeypatch)
        windows_of(running).unseen = 0
        speculator.pace = Pace([(1, 1.0), (2, 9.0)])
        assert not isinstance(step(), DeviceVerifyStep)
