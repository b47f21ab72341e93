"""What requests may ask for beside text, through the whole server: the tokens of the same server on the CPU."""

from __future__ import annotations

import base64
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import all_at_once, answer, on_card, on_cpu, said, small
from support.metrics_text import metrics_of
from support.peft_adapters import peft_adapter
from support.pictures import picture
from support.running_server import RunningServer
from support.tiny_drafters import eagle3, medusa, mlp_speculator, with_mtp
from support.tiny_models import VOCAB_SIZE, tiny_checkpoint, write_tokenizer
from support.tiny_types import type_checkpoint
from support.vision_models import write_vision_checkpoint

pytestmark = pytest.mark.e2e

PROMPTS = ("The quick brown fox jumps", "Numbers: 0 1 2 3 0 1 2 3 0 1")
DRAFTED = 3
CHEAP_STEPS = str(Path(__file__).with_name("cheap_steps.py"))
# Of models that compute each prompt in one step.
WHOLE_PROMPTS: dict[str, int | None] = {"max_step_prefill_tokens": None}
Asked = list[tuple[str, dict[str, Any]]]


def _metrics(server: RunningServer) -> dict[str, float]:
    return metrics_of(httpx.get(f"{server.url}/metrics").text)


def _on_cpu(model: Path, asked: Asked, *options: str) -> list[Any]:
    with on_cpu(model, *small(), *options) as server:
        return [said(answer(server, inputs, **parameters)) for inputs, parameters in asked]


# ---- Drafts


def _heads(write: Callable[..., Path], folder: Path) -> list[str]:
    return ["--speculator", str(write(folder / "heads"))]


def _mtp(folder: Path) -> list[str]:
    with_mtp(folder / "model")
    return ["--speculator", "mtp"]


# Found in the text, by heads, by a layer with keys of its own, and by a whole model.
DRAFTS: dict[str, Callable[[Path], list[str]]] = {
    "lookup": lambda folder: [],
    "mlp": partial(_heads, partial(mlp_speculator, number=DRAFTED)),
    "medusa": partial(_heads, partial(medusa, number=DRAFTED)),
    "eagle": partial(_heads, partial(eagle3, eagle_aux_hidden_state_layer_ids=[0, 2, 3])),
    "mtp": _mtp,
    "model": partial(_heads, partial(tiny_checkpoint, "llama", num_hidden_layers=1, vocab_size=320)),
}


@pytest.mark.parametrize("kind", DRAFTS)
def test_drafts(kind: str, order: str, tmp_path: Path) -> None:
    """Greedy, drawn, penalised and under a grammar, all at once: the tokens are those without drafts."""
    model = tiny_checkpoint("llama", tmp_path / "model", num_hidden_layers=4, vocab_size=320)
    options = [*DRAFTS[kind](tmp_path), "--speculate", str(DRAFTED)]
    more = {"max_new_tokens": 16, "ignore_eos": True}
    asked: Asked = [
        (PROMPTS[1], more),
        (PROMPTS[1], {**more, "do_sample": True, "seed": 4, "temperature": 0.8}),
        (PROMPTS[0], {**more, "repetition_penalty": 1.3}),
        (PROMPTS[0], {"grammar": {"type": "regex", "value": "(abc ){5}"}, "max_new_tokens": 20}),
    ]
    expected = _on_cpu(model, asked)
    with on_card(model, tmp_path / "reports", *small(), *options, order=order, FAKE_CARD_ALSO=CHEAP_STEPS) as server:
        assert all_at_once(server, asked) == expected
        found = _metrics(server)
    assert sum(value for name, value in found.items() if name.startswith("tgi_speculation_drafted_tokens")) > 0


# ---- Adapters


def test_adapters_in_slots(order: str, tmp_path: Path) -> None:
    """Two of three adapters at a time, beside requests for the base model."""
    model = tiny_checkpoint("llama", tmp_path / "model")
    names = ["poems", "prose", "odes"]
    folders = [
        peft_adapter(model, tmp_path / names[0], 1),
        peft_adapter(model, tmp_path / names[1], 2, r=16, target_modules=["q_proj", "up_proj"]),
        peft_adapter(model, tmp_path / names[2], 3, use_dora=True),
    ]
    adapters = ",".join(f"{name}={folder}" for name, folder in zip(names, folders, strict=True))
    asked: Asked = [(prompt, {"adapter_id": name, "ignore_eos": True}) for prompt in PROMPTS for name in [None, *names]]
    expected = _on_cpu(model, asked, "--lora-adapters", adapters)
    options = [*small(), "--lora-adapters", adapters, "--lora-slots", "2"]
    with on_card(model, tmp_path / "reports", *options, order=order) as server:
        assert all_at_once(server, asked) == expected


# ---- Pictures


@pytest.mark.parametrize("name", ["qwen2_vl", "gemma3", "mllama"])
def test_pictures(name: str, order: str, tmp_path: Path) -> None:
    """Read in chunks where the model lets them be cut, beside a prompt without one; mllama reads them by layers of
    cross attention, with a state for each request."""
    model = tmp_path / "model"
    if name == "mllama":
        from parity.cross_scene import CrossScene

        model.mkdir()
        CrossScene(model, name)
    else:
        write_vision_checkpoint(model, name)
    shown = base64.b64encode(picture(60, 80, 1)).decode()
    asked: Asked = [(f"See ![](data:image/png;base64,{shown}) here", {"ignore_eos": True}), (PROMPTS[0], {})]
    limits: dict[str, int | None] = {
        "max_input_tokens": 200, "max_total_tokens": 240, "max_batch_prefill_tokens": 200,
        "max_batch_total_tokens": 1024,
    }  # fmt: skip
    options = small(**limits, **(WHOLE_PROMPTS if name == "mllama" else {}))
    with on_cpu(model, *options) as server:
        expected = [said(answer(server, inputs, **parameters)) for inputs, parameters in asked]
    with on_card(model, tmp_path / "reports", *options, order=order) as server:
        assert all_at_once(server, asked) == expected
        assert _metrics(server)["tgi_encoder_cache_misses"] >= 1


# ---- A model that transformers computes


@pytest.mark.parametrize("kind", ["olmo", "rwkv", "t5"])
def test_a_model_that_transformers_computes(kind: str, tmp_path: Path, order: str) -> None:
    """Paged, whose steps are captured where they ask the device for nothing; with a state for each request; with an
    encoder, whose keys and values are kept.
    """
    model = tmp_path / "model"
    type_checkpoint(kind, model, vocab_size=VOCAB_SIZE)
    write_tokenizer(model, vocab_size=VOCAB_SIZE)
    asked: Asked = [(prompt, {"ignore_eos": True}) for prompt in PROMPTS]
    options = small(**({} if kind == "olmo" else WHOLE_PROMPTS))
    with on_cpu(model, *options) as server:
        expected = [said(answer(server, inputs, **parameters)) for inputs, parameters in asked]
    with on_card(model, tmp_path / "reports", *options, order=order) as server:
        assert all_at_once(server, asked) == expected
