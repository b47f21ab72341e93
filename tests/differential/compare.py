"""One changed config.json: what transformers computes with it, and what this project does."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from parity.protocol import PagedBatch, prompts
from support.loading import load
from support.tiny_models import tiny_config
from support.tiny_types import auto_class_of, name_as_published, type_config
from support.vision_models import mend_llama4
from torch import Tensor

from model_server.errors import StartupError
from model_server.models.families.vision import TEXT_TYPES

# Beyond every window, chunk and original length of `fields.changes`; and within, where these change rotations.
LENGTHS = (39, 7)
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Outcome:
    """kind: equal, refused, different, crashed, or invalid, where transformers does not compute it either."""

    kind: str
    detail: str = ""


def base_fields(model_type: str) -> dict[str, Any]:
    """A small config of a type as older files have it: rotations in fields of their own."""
    if model_type in TEXT_TYPES:
        sections = {"rope_parameters": {"mrope_section": [1, 2, 1], "partial_rotary_factor": 0.5}}
        config = type_config(model_type, text_config=sections if model_type in ("glm4v", "glm46v") else {})
    else:
        config = tiny_config(model_type)
        if hasattr(config, "index_n_heads"):
            # With few of them keys score exactly 0, and of equal ones transformers chooses any.
            config.index_n_heads = 32
    fields: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    _make_older(fields)
    if model_type in TEXT_TYPES:
        _make_older(fields["text_config"])
    return fields


def _make_older(fields: dict[str, Any]) -> None:
    for name in ("dtype", "transformers_version", "architectures", "_name_or_path", "id2label", "label2id"):
        fields.pop(name, None)
    block = fields.get("rope_parameters")
    if isinstance(block, dict) and "rope_theta" in block and set(block) <= {
        "rope_theta", "rope_type", "partial_rotary_factor"
    }:  # fmt: skip
        del fields["rope_parameters"]
        fields["rope_theta"] = block["rope_theta"]
        if "partial_rotary_factor" in block:
            fields["partial_rotary_factor"] = block["partial_rotary_factor"]


def with_change(base: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """`base` with one field changed, and without what is derived from it. name: `text_config.NAME` within one."""
    outer, _, inner = name.rpartition(".")
    if outer:
        return {**base, outer: with_change(base[outer], inner, value)}
    fields = {**base, name: value}
    if name == "rope_parameters":
        old = base.get("rope_parameters") or {}
        fields[name] = {**{part: old[part] for part in ("mrope_section", "mrope_interleaved") if part in old}, **value}
        fields.pop("rope_theta", None)
        fields.pop("partial_rotary_factor", None)
    if name in ("sliding_window_pattern", "max_window_layers", "use_sliding_window"):
        fields.pop("layer_types", None)
    if name in ("no_rope_layer_interval",):
        fields.pop("no_rope_layers", None)
        fields.pop("layer_types", None)
    if name == "num_hidden_layers":
        for other in ("layer_types", "no_rope_layers", "moe_layers"):
            if isinstance(fields.get(other), list):
                fields[other] = fields[other][:value]
    if name == "interleave_moe_layer_step":
        fields.pop("moe_layers", None)
    return fields


def compare(fields: dict[str, Any], folder: Path) -> dict[str, Outcome]:
    """What comes of a config.json as it is, and as transformers writes it."""
    shutil.rmtree(folder, ignore_errors=True)
    raw, written = folder / "raw", folder / "written"
    raw.mkdir(parents=True)
    (raw / "config.json").write_text(json.dumps(fields))
    text = fields.get("text_config", fields)
    lengths = LENGTHS if text.get("rope_parameters") or text.get("rope_scaling") else LENGTHS[:1]
    sequences = prompts(min(int(text["vocab_size"]), 500), lengths)
    try:
        expected = _truth(raw, written, sequences)
    except Exception as error:  # whatever it is that transformers says
        return {"raw": Outcome("invalid", f"{type(error).__name__}: {error}".splitlines()[0][:120])}
    for path in written.glob("*.safetensors*"):
        shutil.copy(path, raw)
    found = {name: _served(path, sequences, expected) for name, path in (("raw", raw), ("written", written))}
    shutil.rmtree(folder)
    return found


def _truth(raw: Path, written: Path, sequences: list[Tensor]) -> list[Tensor]:
    """The logits of a model with random weights, which is written to `written`."""
    from transformers import AutoConfig

    mend_llama4()
    with contextlib.redirect_stderr(io.StringIO()), torch.random.fork_rng(devices=[]):
        config = AutoConfig.from_pretrained(raw)
        torch.manual_seed(0)
        auto = auto_class_of(config)
        make = getattr(auto, "from_config", None) or auto._from_config
        model = make(config, attn_implementation=_attention(config))
        generator = torch.Generator().manual_seed(0)
        with torch.inference_mode():
            for parameter in model.parameters():
                if not parameter.requires_grad:  # computed, and not saved
                    continue
                noise = torch.randn(parameter.shape, generator=generator)
                _ = parameter.copy_(noise * 0.15) if parameter.dim() >= 2 else parameter.add_(noise * 0.1)
            model.eval()
            logits = [model(input_ids=one.unsqueeze(0), use_cache=False).logits[0].float() for one in sequences]
        model.save_pretrained(written)
        name_as_published(config.model_type, written)
    if any(not one.isfinite().all() for one in logits):
        raise ValueError("the logits are no numbers")
    return logits


def _attention(config: Any) -> str:
    """Falcon's eager path adds ALiBi's biases twice."""
    return "sdpa" if config.model_type == "falcon" and config.alibi else "eager"


def _served(path: Path, sequences: list[Tensor], expected: list[Tensor]) -> Outcome:
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            got = []
            for one in sequences:
                runner = load(path)
                got += PagedBatch(runner, [one], 4).step([len(one)])
    except StartupError as error:
        return Outcome("refused", str(error)[:160])
    except Exception as error:
        return Outcome("crashed", f"{type(error).__name__}: {error}"[:160])
    worst = 0.0
    for ours, theirs in zip(got, expected, strict=True):
        if ours.shape != theirs.shape:
            return Outcome("different", f"shape {list(ours.shape)} for {list(theirs.shape)}")
        if not ours.isfinite().all():
            return Outcome("different", "no numbers")
        worst = max(worst, float((ours - theirs).abs().max() / theirs.abs().max()))
    return Outcome("equal") if worst <= TOLERANCE else Outcome("different", f"relative error {worst:.1e}")
