"""The launcher's command line; imports what a launch needs only for a launch, so that `--help` is fast."""

from __future__ import annotations

import ipaddress
import os

from launcher.batch.config import BatchConfig
from launcher.bench.config import BenchConfig
from launcher.chat.config import ChatConfig
from launcher.clients.config import ClientConfig
from launcher.config import LauncherConfig, ServeConfig
from launcher.doctor.config import DoctorConfig
from launcher.estimate.config import EstimateConfig
from launcher.keys.config import KeysConfig
from launcher.models.config import ModelsConfig, PullConfig, RemoveConfig
from wire.cli.commands import installed_version, run_group
from wire.cli.other_servers.words import command_hint

_DESCRIPTION = "Serves a text generation model: starts, watches and stops the shards and the router."


def main() -> int:
    _forget_container_name()
    return run_group(
        {
            "serve": (ServeConfig, run),
            "chat": (ChatConfig, chat),
            "launch": (ClientConfig, launch),
            "keys": (KeysConfig, keys),
            "batch": (BatchConfig, batch),
            "bench": (BenchConfig, bench),
            "models": (ModelsConfig, models),
            "pull": (PullConfig, pull),
            "rm": (RemoveConfig, remove),
            "estimate": (EstimateConfig, estimate),
            "doctor": (DoctorConfig, doctor),
        },
        prog="launcher",
        version=installed_version,
        description=_DESCRIPTION,
        default=(LauncherConfig, run),
        remedy=_remedy,
        values={"model_id": _models},
    )


def _models() -> list[str]:
    """List the models that need no download."""
    from launcher.planning.model_info import DEMO, cached_models

    return [DEMO, *cached_models(os.environ)]


def _remedy(word: str) -> str | None:
    """Say what to do about another server's command, or a word that can only be a model."""
    if instead := command_hint(word):
        return f"use {instead}"
    is_model = word == "demo" or "/" in word or word.lower().endswith(".gguf") or os.path.isdir(word)
    return f"to serve a model: launcher serve {word}" if is_model else None


def _forget_container_name() -> None:
    """Docker and Kubernetes set HOSTNAME to the container's name, which does not say where to listen."""
    try:
        ipaddress.ip_address(os.environ.get("HOSTNAME", ""))
    except ValueError:
        os.environ.pop("HOSTNAME", None)


def batch(config: BatchConfig) -> int:
    """Answer a file of requests, as OpenAI's Batch API has them: with a running server, or with a model of its own."""
    from launcher.batch.command import run_batch

    return run_batch(config, os.environ)


def bench(config: BenchConfig) -> int:
    """Send load to a server that speaks TGI's API or OpenAI's, and report its throughput and latencies."""
    # Imported here: nothing of it is wanted for a launch.
    from launcher.bench.command import run_bench

    return run_bench(config)


def chat(config: ChatConfig) -> int:
    """Chat with a model in the terminal: with a running server, or with MODEL, which is served during the chat."""
    from launcher.chat.command import run_chat

    return run_chat(config, os.environ)


def doctor(config: DoctorConfig) -> int:
    """Check this machine: what can serve, what is missing, and the command that fixes it."""
    from launcher.doctor.command import run_doctor

    return run_doctor(config, os.environ)


def estimate(config: EstimateConfig) -> int:
    """Say what a model takes and how many tokens and requests fit; downloads no weights."""
    from launcher.estimate.command import run_estimate

    return run_estimate(config, os.environ)


def keys(config: KeysConfig) -> int:
    """Make an API key for --keys-file: prints its row, and once the key."""
    from launcher.keys.command import run_keys

    return run_keys(config)


def launch(config: ClientConfig) -> int:
    """Set up claude, codex, opencode or open-webui for a running server: show, then write, their settings."""
    from launcher.clients.command import run_client

    return run_client(config, os.environ)


def models(config: ModelsConfig) -> int:
    """List the downloaded models."""
    from launcher.models.command import run_models

    return run_models(config, os.environ)


def pull(config: PullConfig) -> int:
    """Download a model from the hub."""
    from launcher.models.command import run_pull

    return run_pull(config, os.environ)


def remove(config: RemoveConfig) -> int:
    """Remove a downloaded model."""
    from launcher.models.command import run_remove

    return run_remove(config, os.environ)


def run(config: LauncherConfig) -> int:
    """Serve MODEL; takes the options of the launcher."""
    from launcher.launch import run_launch

    return run_launch(config, os.environ)
