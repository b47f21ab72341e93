"""What the config tells of a model's attention is what the loaded model asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from parity.protocol import PagedBatch, prompts
from support.loading import load
from support.tiny_models import tiny_checkpoint
from torch import Tensor

from model_server.attention.backend import AttentionLayer
from model_server.attention.metadata import AttentionMetadata
from model_server.attention.reference import ReferenceBackend, ReferenceStep
from model_server.memory.kv_cache import KvCache
from model_server.models.decoder.attention.layers import attention_layers
from model_server.models.model import describe
from model_server.weights.checkpoint import examine


class Recorder(ReferenceBackend):
    """The reference, which takes down the layers that it is asked for."""

    def __init__(self) -> None:
        self.layers: list[AttentionLayer] = []

    def start(self, metadata: AttentionMetadata, cache: KvCache) -> ReferenceStep:
        step = RecordingStep(metadata, cache)
        step.layers = self.layers
        return step


class RecordingStep(ReferenceStep):
    layers: list[AttentionLayer]

    def attend(self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.layers.append(layer)
        return super().attend(layer, query, key, value)


def features(layer: AttentionLayer) -> dict[str, Any]:
    alibi = None if layer.alibi is None else (layer.alibi.slopes.tolist(), layer.alibi.bfloat16_scale)
    sizes = {name: getattr(layer, name) for name in ("index", "num_heads", "num_kv_heads", "head_dim", "value_dim")}
    kinds = {name: getattr(layer, name) for name in ("scale", "window", "chunk", "softcap")}
    return sizes | kinds | {"alibi": alibi, "sinks": None if layer.sinks is None else layer.sinks.shape}


@pytest.mark.parametrize(
    "model_type", ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v2", "llama4_text", "bloom", "falcon", "gpt2"]
)
def test_config_and_model_agree(model_type: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    tiny_checkpoint(model_type, path)
    recorder = Recorder()
    runner = load(path, backend=recorder)
    batch = PagedBatch(runner, prompts(runner.vocab_size, (3,)), 16)
    batch.step((1,))
    spec = describe(examine(path)).spec
    assert spec is not None
    expected = attention_layers(spec)
    assert [features(layer) for layer in recorder.layers] == [features(layer) for layer in expected]
