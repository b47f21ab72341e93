"""The options that hold for all nodes: node 0 sends them, and no other node may contradict them."""

from __future__ import annotations

import dataclasses
from typing import Any

from launcher.config import SECRETS, LauncherConfig
from launcher.errors import ArgumentValidation
from wire.cli.options import Option, options_of
from wire.cli.parsing import UsageError, parse
from wire.cli.spelling import spell, to_argv

_OF_A_NODE = SECRETS | {
    "placement", "node_rank", "node_addr", "master_addr", "master_port", "shard_port", "insecure_group", "join_timeout",
    "group_tls_cert", "group_tls_key", "group_tls_ca",
    "huggingface_hub_cache", "shard_uds_path", "config", "env", "profile", "profile_steps",
    "json_output", "log_level", "verbose", "verbose_startup",
}  # fmt: skip
"""Options that each node has for itself."""
_FILES_OF_THE_ROUTER = ("tokenizer_config_path", "generation_config", "ssl_certfile", "ssl_keyfile")
"""Options whose files only node 0 needs."""


def to_words(config: LauncherConfig) -> list[str]:
    """What holds for all nodes, as a command line; what has its default is left out."""
    return to_argv({opt.name: _spelled(opt, getattr(config, opt.name)) for opt in _shared() if _is_given(opt, config)})


def merged(own: LauncherConfig, words: list[str], leader: str) -> LauncherConfig:
    """Return node 0's config with what is this node's own.

    Raises:
        ArgumentValidation: An option given here differs from node 0's.
    """
    try:
        theirs = parse(LauncherConfig, words, {})
    except UsageError as error:
        raise ArgumentValidation(f"{leader} has options that this node does not understand: {error}") from None
    for opt in _shared():
        ours, common = getattr(own, opt.name), getattr(theirs, opt.name)
        if _is_given(opt, own) and ours != common:
            has = f"has {spell(common)}" if _is_given(opt, theirs) else "does not have it"
            raise ArgumentValidation(
                f"`{opt.flag}` {spell(ours)} of this node contradicts {leader}, which {has}: leave it out here"
            )
    values = {name: getattr(own, name) for name in _OF_A_NODE} | dict.fromkeys(_FILES_OF_THE_ROUTER)
    return dataclasses.replace(theirs, **values)


def _shared() -> list[Option]:
    return [opt for opt in options_of(LauncherConfig) if opt.name not in _OF_A_NODE]


def _is_given(opt: Option, config: LauncherConfig) -> bool:
    return bool(getattr(config, opt.name) != opt.default)


def _spelled(opt: Option, value: Any) -> Any:
    """A value as `to_argv` takes it: only a switch is given by being there."""
    return value if opt.is_switch or not isinstance(value, bool) else spell(value)
