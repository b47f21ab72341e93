"""LoRA adapters of models that transformers computes over the paged cache, with PEFT as the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parity.protocol import CHUNKS, assert_equal_logits, prompts, run_protocol
from support.adapters import write_adapter
from support.loading import load
from support.peft_adapters import peft_adapter, peft_logits
from support.thread_ranks import on_ranks
from support.tiny_models import tiny_checkpoint
from support.tiny_types import VOCAB_SIZE, type_checkpoint

from model_server.adapters.rows import BASE
from model_server.distributed.group import ProcessGroup
from model_server.errors import StartupError
from model_server.models.hf import adapters as hooked
from model_server.models.hf.paged import TransformersRunner

SEQUENCES = prompts(VOCAB_SIZE)
CASES: list[Any] = [
    ("olmo", {}, {"use_dora": True}),
    ("olmo", {"tie_word_embeddings": True}, {"target_modules": ["embed_tokens", "v_proj", "lm_head"]}),
    *(
        pytest.param(name, settings, config, marks=pytest.mark.parity)
        for name, settings, config in (
            ("nemotron", {}, {"lora_bias": True, "target_modules": ["up_proj", "q_proj"]}),
            ("helium", {}, {"target_modules": ["q_proj"], "trainable_token_indices": [44, 9]}),
            ("persimmon", {}, {"target_modules": ["query_key_value", "dense"], "use_rslora": True}),
            ("minicpm3", {}, {}),
        )
    ),
]


@pytest.mark.parametrize(("model_type", "settings", "config"), CASES)
def test_rows_of_two_adapters_and_none(
    model_type: str, settings: dict[str, Any], config: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    type_checkpoint(model_type, model := tmp_path / "model", **settings)
    first = peft_adapter(model, tmp_path / "first", 1, **config)
    second = peft_adapter(model, tmp_path / "second", 2)
    sequences = [s.clone() for s in SEQUENCES]
    for sequence in sequences:
        sequence[1:3] = torch.tensor([9, 44])
    wanted = [peft_logits(model, a, [s])[0] for a, s in zip((first, None, second), sequences, strict=True)]
    runner = load(model, adapters={"a": first, "b": second})
    assert isinstance(runner, TransformersRunner) and runner.traits.adapters == ("a", "b")
    got = run_protocol(runner, sequences, 4, steps=CHUNKS, adapters=(0, BASE, 1))
    assert_equal_logits(got, wanted)
    assert float((wanted[0] - peft_logits(model, None, sequences[:1])[0]).abs().max()) > 0.1
    plain = run_protocol(load(model), sequences, 4)
    for one, other in zip(run_protocol(runner, sequences, 4), plain, strict=True):
        assert torch.equal(one, other)


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = write_adapter(tmp_path / "a", {"lm_head": (64, 512)})
    recurrent = tiny_checkpoint("rwkv", tmp_path / "rwkv", with_tokenizer=False)
    with pytest.raises(StartupError, match=r"rwkv needs a state for each request .*, and takes no LoRA adapters"):
        load(recurrent, adapters={"a": adapter})
    olmo = tiny_checkpoint("olmo", tmp_path / "olmo", with_tokenizer=False)
    with pytest.raises(StartupError, match="--lora-root: olmo is served by the transformers runner, whose adapters"):
        load(olmo, adapter_room=4)

    def on_two(group: ProcessGroup) -> None:
        with pytest.raises(StartupError, match="LoRA adapters of olmo are served on one shard only: use --num-shard"):
            load(olmo, adapters={"a": adapter}, group=group)

    on_ranks(2, on_two)
    write_adapter(tmp_path / "b", {"model.layers.9.self_attn.q_proj": (64, 64)})
    with pytest.raises(StartupError, match=r"LoRA adapter `b`: tensor .*layers\.9.* belongs to no layer that takes"):
        load(olmo, adapters={"b": tmp_path / "b"})
    # Modelling code that hands a layer the rows of a step in another order.
    plain = hooked._adapt_rows
    monkeypatch.setattr(hooked, "_adapt_rows", lambda linear, x, out: plain(linear, x.flip(1), out.flip(1)).flip(1))
    write_adapter(tmp_path / "a", {"model.layers.0.self_attn.q_proj": (64, 64)})
    with pytest.raises(StartupError, match="LoRA adapters are not served for olmo: a row of a batch gives other"):
        load(olmo, adapters={"a": tmp_path / "a"})
