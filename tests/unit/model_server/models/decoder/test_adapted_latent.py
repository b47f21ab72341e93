"""LoRA adapters of DeepSeek's `kv_b_proj`, which attention takes apart: as PEFT computes them, in all of its forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parity.protocol import CHUNKS, STEPS, assert_equal_logits, prompts, run_protocol
from support.loading import load
from support.peft_adapters import peft_adapter, peft_logits
from support.thread_ranks import on_ranks
from support.tiny_models import tiny_checkpoint
from torch import Tensor

from model_server.adapters.rows import BASE
from model_server.distributed.group import ProcessGroup

SEQUENCES = prompts(512)
ALL = ["q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
CONFIGS: list[Any] = [
    ("deepseek_v3", {"target_modules": ["kv_b_proj"]}, {"target_modules": ["kv_b_proj", "o_proj"], "r": 3}),
    pytest.param(
        "deepseek_v2",
        {"target_modules": ALL, "use_dora": True},
        {"target_modules": ["kv_b_proj"], "lora_bias": True},
        marks=pytest.mark.long,
    ),
]


@pytest.mark.parametrize(("model_type", "first", "second"), CONFIGS)
def test_keys_and_values_of_each_row(
    model_type: str, first: dict[str, Any], second: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Absorbed and expanded, in chunks over a cached prefix, where they were loaded and in slots, on two ranks."""
    pytest.importorskip("peft")
    model = tiny_checkpoint(model_type, tmp_path / "model", with_tokenizer=False)
    adapters = {
        "a": peft_adapter(model, tmp_path / "a", 1, **first),
        "b": peft_adapter(model, tmp_path / "b", 2, **second),
    }
    folders = (adapters["a"], None, adapters["b"])
    wanted = [peft_logits(model, folder, [s])[0] for folder, s in zip(folders, SEQUENCES, strict=True)]
    for adapted, sequence in ((wanted[0], SEQUENCES[0]), (wanted[2], SEQUENCES[2])):
        assert float((adapted - peft_logits(model, None, [sequence])[0]).abs().max()) > 0.02

    def logits(group: ProcessGroup | None = None, slots: int | None = None, steps: Any = STEPS) -> list[Tensor]:
        runner: Any = load(model, group=group, adapters=adapters, adapter_slots=slots)
        if slots is not None:
            assert [runner.adapters.slots.acquire(number, lambda: (0, 1)) for number in (0, 1)] == [0, 1]
        return run_protocol(runner, SEQUENCES, 4, steps=steps, adapters=(0, BASE, 1))

    plain = run_protocol(load(model), SEQUENCES, 4)
    for is_expanded in (True, False):
        monkeypatch.setattr("model_server.attention.latent.is_expanded", lambda *_, said=is_expanded: said)
        for slots in (None, 2):
            got = logits(slots=slots)
            assert_equal_logits(got, wanted)
            for of_rank in on_ranks(2, lambda group, slots=slots: logits(group, slots)):
                assert_equal_logits(of_rank, wanted)
    monkeypatch.undo()
    for slots in (None, 2):
        chunks = [s[: len(w)] for s, w in zip(logits(slots=slots, steps=CHUNKS), wanted, strict=True)]
        assert_equal_logits(chunks, wanted)
        assert torch.equal(logits(slots=slots)[1], plain[1]), "rows of the base model keep their bits"
    merged = run_protocol(load(model, merged=adapters["a"]), SEQUENCES, 4)
    assert_equal_logits(merged[:1], wanted[:1])
