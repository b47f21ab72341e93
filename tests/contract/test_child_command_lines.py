"""What the launcher writes for its children, read by the children's own configs."""

from __future__ import annotations

from typing import Any

import pytest

from launcher import config
from launcher.command import Command
from launcher.config import LauncherConfig
from launcher.planning import commands
from launcher.planning.hardware import Hardware
from launcher.planning.plan import Endpoints, LaunchPlan, make_plan
from model_server.config import DownloadConfig, ServeConfig
from router.config import RouterConfig
from wire.cli.options import Option, options_of
from wire.cli.parsing import parse

ASKED = {opt.name: opt for opt in options_of(LauncherConfig)}
ONLY_OF_TGI = {"max_total_tokens"}
"""Variables that TGI's shards read and ours do not."""


def plan(**fields: Any) -> LaunchPlan:
    ends = Endpoints(hostname="127.0.0.1", port=3001, uds_prefix="/run/x/shard", master_port=29501)
    return make_plan(LauncherConfig(**{"model_id": "demo"} | fields), Hardware(cores=4), None, ends)


def served(command: Command) -> ServeConfig:
    return parse(ServeConfig, command.argv[5:], command.env)


def routed(command: Command) -> RouterConfig:
    return parse(RouterConfig, command.argv[4:], command.env)


def downloaded(command: Command) -> DownloadConfig:
    return parse(DownloadConfig, command.argv[5:], command.env)


def other_than_default(opt: Option) -> Any:
    """A value that nobody has by default."""
    if opt.item is bool:
        return True
    if opt.choices:
        return next(choice for choice in reversed(opt.choices) if choice != opt.default)
    one = {int: 7, float: 0.25}.get(opt.item) or opt.item("/-x y,z")
    return [one, one] if opt.is_repeated else one


@pytest.mark.parametrize("name", [*config.ROUTER_FLAGS, *config.ROUTER_VARIABLES])
def test_the_router_gets_what_was_asked_for(name: str) -> None:
    value = other_than_default(ASKED[name])
    found = getattr(routed(commands.router(plan(**{name: value}), {})), name)
    assert (list(found) if isinstance(value, list) else str(found)) == (
        value if isinstance(value, list) else str(value)
    )


@pytest.mark.parametrize(
    "name",
    [name for name in (*config.SHARD_FLAGS, *config.SHARD_VARIABLES, *config.PROFILE_FLAGS)
     if name not in ONLY_OF_TGI],
)  # fmt: skip
def test_a_shard_gets_what_was_asked_for(name: str) -> None:
    asked = {"profile": "/profiles", name: other_than_default(ASKED[name])}
    if name == "stage_layers":
        asked["num_stage"] = len(asked[name])
    found = getattr(served(commands.shard(plan(**asked), 0, {})), name)
    assert str(found) == str(asked[name])


@pytest.mark.parametrize("name", config.DOWNLOAD_FLAGS)
def test_a_download_gets_what_was_asked_for(name: str) -> None:
    asked = plan(**{name: other_than_default(ASKED[name])}).asked
    assert getattr(downloaded(commands.download(asked, "m", {})), name) == getattr(asked, name)


def test_what_the_plan_decides_arrives() -> None:
    made = plan(
        num_shard=2, max_input_tokens=5, max_batch_total_tokens=5000, prometheus_port=9001, rope_factor=2.5,
        enable_prefill_logprobs=True, graceful_termination_timeout=90, log_level="warn", cuda_graphs=[8, 0, 16],
    )  # fmt: skip
    shard = served(commands.shard(made, 1, {}))
    assert (shard.model_id, str(shard.uds_path), shard.logger_level) == ("demo", "/run/x/shard", "WARNING")
    assert (shard.sharded, shard.rank, shard.world_size, shard.master_port) == (True, 1, 2, 29501)
    assert (shard.max_input_tokens, shard.request_logprobs, shard.cuda_graphs) == (5, True, [8, 16])
    assert (shard.rope_scaling, shard.rope_factor, shard.json_output) == ("linear", 2.5, True)
    router = routed(commands.router(made, {}))
    assert (router.tokenizer_name, router.master_shard_uds_path) == ("demo", "/run/x/shard-0")
    assert (router.hostname, router.port, router.prometheus_port) == ("127.0.0.1", 3001, 9001)
    assert (router.max_input_tokens, router.max_batch_prefill_tokens) == (5, made.max_batch_prefill_tokens)
    assert (router.request_logprobs, router.graceful_termination_timeout, router.json_output) == (True, 88, True)
    assert downloaded(commands.download(made.asked, "m", {})).model_id == "m"


def test_a_shard_of_tgi_is_given_no_flag_that_it_does_not_know() -> None:
    """`serve` of text-generation-server 3.3, and one flag of ours that only an operator who names it causes."""
    known = {"revision", "dtype", "trust-remote-code", "uds-path", "logger-level", "json-output", "otlp-endpoint",
             "otlp-service-name", "max-input-tokens", "sharded"}  # fmt: skip
    words = commands.shard(plan(num_shard=2, max_input_tokens=5, dtype="float16", revision="r"), 0, {}).argv
    assert {word.removeprefix("--") for word in words[5:] if word.startswith("--")} <= known
