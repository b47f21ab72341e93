"""How options are declared."""

from __future__ import annotations

import dataclasses

import pytest
from support.option_configs import Config

from wire.cli.options import options_of


def test_options_are_described() -> None:
    options = {opt.name: opt for opt in options_of(Config)}
    assert options["max_batch_size"].flag == "--max-batch-size"
    assert options["max_batch_size"].env == "MAX_BATCH_SIZE"
    assert options["report"].env is None
    assert options["dtype"].choices == ("float16", "bfloat16")
    assert not options["sharded"].is_switch
    assert options["convert"].is_negatable


def test_a_field_without_declaration_is_a_mistake_of_ours() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Bad:
        size: int = 1

    with pytest.raises(TypeError, match="size"):
        options_of(Bad)
