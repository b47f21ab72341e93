"""The command of the front, which answers clients for all models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launcher.command import Command, Environment
from launcher.config import LauncherConfig
from launcher.groups.group import LIMITS_SOCKET
from launcher.groups.models_file import ModelEntry
from launcher.planning.commands import drain_seconds, handed_on, inherited
from wire.cli.spelling import to_argv, to_environment, variable_of
from wire.processes.python_child import module_command

_FLAGS = (
    "keys_file", "cors_allow_origin", "ssl_certfile", "ssl_keyfile", "no_playground", "root_path", "error_format",
    "default_model",     "no_autoload", "model_start_timeout", "max_waiting_requests",
)  # fmt: skip
_VARIABLES = ("log_level", "api_key")
_PAYLOAD_LIMIT = 32 << 20
"""At least; each model's router has its own limit."""


def front_command(
    config: LauncherConfig,
    address: str,
    port: int,
    uds: Path | None,
    url: str,
    control: Path,
    entries: Sequence[ModelEntry],
    environ: Environment,
) -> Command:
    """Return how to start the front.

    Args:
        address: An IP address.
        uds: Listened on instead of the port.
        control: The launcher's socket.
    """
    flags = {
        "hostname": address,
        "port": port,
        "uds": uds,
        "uds_mode": None if uds is None else config.uds_mode,
        "control": control,
        "front_uds": control.with_name(LIMITS_SOCKET),
        "payload_limit": max(_PAYLOAD_LIMIT, *(entry.config.payload_limit for entry in entries)),
        "json_output": True,
        **handed_on(config, _FLAGS),
    }
    variables = {
        "graceful_termination_timeout": drain_seconds(config.graceful_termination_timeout),
        **handed_on(config, _VARIABLES),
    }
    env = inherited(environ, without={*map(variable_of, flags), "AIP_HTTP_PORT", "PROMETHEUS_PORT"})
    return Command(
        name="front", argv=(*module_command("router.front"), *to_argv(flags)), env=env | to_environment(variables),
        url=url,
    )  # fmt: skip
