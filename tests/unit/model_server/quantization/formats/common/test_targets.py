"""Which scheme of a compressed-tensors config a module has."""

from __future__ import annotations

from typing import Any

import pytest
from compressed_tensors.utils.match import match_targets
from torch import nn

from model_server.errors import StartupError
from model_server.quantization.formats.common.targets import Targets, Weights, targets_of

CONFIG = {
    "config_groups": {
        "a": {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel", "group_size": None}},
        "b": {"targets": ["re:.*down_proj$", "re:.*\\.1\\..*"], "weights": {"num_bits": 4, "group_size": 32}},
        "c": {"targets": ["model.layers.1.o_proj"], "weights": {"num_bits": 8, "block_structure": [64, 32]}},
        "d": {"targets": ["model.layers.2.o_proj"], "weights": {"num_bits": 8, "block_structure": "64x32"}},
    }
}
SCHEMES = {"Linear": Weights(8), "re": Weights(4, (1, 32)), "model": Weights(8, (64, 32))}


@pytest.mark.parametrize(
    "module",
    [
        "model.layers.0.q_proj",
        "model.layers.0.down_proj",
        "model.layers.1.o_proj",
        "model.layers.1.q_proj",
        "model.layers.2.o_proj",
        "lm_head",
    ],
)
def test_the_closest_target_as_the_library_finds_it(module: str) -> None:
    targets = [target for group in CONFIG["config_groups"].values() for target in group["targets"]]
    closest = match_targets(module, nn.Linear(1, 1), targets)[0]
    assert targets_of(CONFIG).weights_of(module) == SCHEMES[closest.replace(":", ".").split(".")[0]]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"config_groups": 3},
        {"config_groups": {"a": 3}},
        {"config_groups": {"a": {"targets": "Linear", "weights": {"num_bits": 4}}}},
        {"config_groups": {"a": {"targets": ["Linear"], "weights": None}}},
        {"config_groups": {"a": {"targets": ["Linear", 3], "weights": {"num_bits": "4", "group_size": -1}}}},
        {"config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": True, "block_structure": "all"}}}},
        {"config_groups": {"a": {"targets": ["re:("], "weights": {"num_bits": 4}}}},
    ],
)
def test_what_is_not_understood_says_nothing(config: dict[str, Any]) -> None:
    assert targets_of(config).weights_of("m") == Weights()


def test_no_config() -> None:
    assert Targets(()).weights_of("m") == Weights()


def test_a_pattern_that_takes_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model_server.quantization.formats.common.targets._MATCH_S", 0.05)
    name = "model.layers.0." + "ab" * 20 + "c"
    for pattern in ("^(([a-z_.0-9])+)+!$", "^(?:.*.*)*(?:.*.*)*(.*)\\1!$"):
        config = {"config_groups": {"a": {"targets": [f"re:{pattern}"], "weights": {"num_bits": 8}}}}
        try:
            assert targets_of(config).weights_of(name) == Weights()
        except StartupError as error:
            assert "which takes too long to match names" in str(error)
    config["config_groups"]["a"]["targets"] = ["re:" + "(a|aa)+" * 12 + "$"]
    with pytest.raises(StartupError, match="takes too long to match"):
        targets_of(config).weights_of("a" * 400 + "!")


@pytest.mark.parametrize("pattern", ["(?R)", "(?:a?(?R))*", "(?P<n>a(?&n)?)*b", "(?:a|b)?" * 2500])
def test_a_pattern_that_calls_itself_or_is_long_is_refused(pattern: str) -> None:
    """It would take all memory, in less time than is allowed, or seconds to be read."""
    targets = targets_of({"config_groups": {"a": {"targets": [f"re:{pattern}"], "weights": {"num_bits": 4}}}})
    with pytest.raises(StartupError, match="which calls itself or has more than 2,000 characters"):
        targets.weights_of("a" * 16)


def test_patterns_that_are_slow_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each name in less than the time of one, all of them in hours."""
    monkeypatch.setattr("model_server.quantization.formats.common.targets._ALL_S", 0.2)
    targets = targets_of({"config_groups": {"a": {"targets": ["re:^(a|a)+!$"], "weights": {"num_bits": 4}}}})
    with pytest.raises(StartupError, match="takes too long to match names"):
        for _ in range(100_000):
            targets.weights_of("a" * 16)
