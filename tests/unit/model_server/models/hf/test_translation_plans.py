"""What several ranks divide of an encoder-decoder."""

from __future__ import annotations

import pytest
from support.tiny_types import type_config
from transformers import BartForConditionalGeneration, ProphetNetForConditionalGeneration, T5ForConditionalGeneration

from model_server.errors import StartupError
from model_server.models.hf.translation_plans import plan_of


def test_each_layer_divides_heads_and_inner_size() -> None:
    plan = plan_of(T5ForConditionalGeneration, type_config("t5"), 2)
    assert plan["decoder.block.*.layer.*.EncDecAttention.q"] == "colwise"
    assert plan["encoder.block.*.layer.*.SelfAttention.o"] == "rowwise"
    assert not any("lm_head" in name for name in plan)
    plan = plan_of(BartForConditionalGeneration, type_config("bart"), 2)
    assert plan["model.decoder.layers.*.encoder_attn.out_proj"] == "rowwise"
    assert plan["model.encoder.layers.*.fc1"] == "colwise"


def test_a_matrix_that_does_not_divide_is_refused() -> None:
    with pytest.raises(StartupError, match=r"64 numbers of .* cannot be divided among 5 shards"):
        plan_of(T5ForConditionalGeneration, type_config("t5"), 5)


def test_other_matrices_have_no_plan() -> None:
    assert plan_of(ProphetNetForConditionalGeneration, type_config("prophetnet"), 2) == {}
