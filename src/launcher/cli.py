"""LauncherConfig → checks → plan → children. The one place that knows the order of the launch."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import io
import logging
import os
from collections.abc import Mapping

from launcher import commands, env_report, hardware, model_info, preflight
from launcher.bench.config import BenchConfig
from launcher.child import Guard
from launcher.config import DEFAULT_MODEL_ID, SECRETS, LauncherConfig, check
from launcher.errors import DownloadError, LauncherError
from launcher.output import Output, claim_standard_descriptors
from launcher.plan import LaunchPlan, make_plan, resolve_num_shard
from launcher.signals import Signals
from launcher.supervisor import Patience, Supervisor
from wire import log_line
from wire.commands import run_group

logger = logging.getLogger("text_generation_launcher")

_DESCRIPTION = "Serves a text generation model: starts, watches and stops the shards and the router."
_LAST_WORDS_S = 2.0


def main() -> int:
    # Docker and Kubernetes set HOSTNAME to the container's name, which is no wish about where to listen.
    if not preflight.is_ip_address(os.environ.get("HOSTNAME", "")):
        os.environ.pop("HOSTNAME", None)
    version = importlib.metadata.version("tercet")
    return run_group(
        {"bench": (BenchConfig, bench)},
        prog="launcher",
        version=version,
        description=_DESCRIPTION,
        default=(LauncherConfig, run),
    )


def bench(config: BenchConfig) -> int:
    """Send load to a server that speaks TGI's native API or OpenAI's, and report its throughput and latencies."""
    # Imported here: nothing of it is wanted for a launch.
    from launcher.bench.command import run_bench

    return run_bench(config)


def run(config: LauncherConfig) -> int:
    """Launches; returns the exit status."""
    claim_standard_descriptors()
    stdout, stderr = Output(1, json_lines=config.json_output), Output(2)
    log_line.configure(config.json_output, config.log_level, layout="launcher", stream=stdout)
    try:
        with Signals() as signals:
            return _launch(config, signals, os.environ)
    except LauncherError as error:
        if config.json_output:
            logger.error("%s", error.report())
        stderr.write(error.report() + "\n")
        return 1
    except Exception:
        logger.exception("The launcher itself failed")
        stderr.write("Error: the launcher itself failed, see the log\n")
        return 1
    finally:
        logging.shutdown()
        stdout.finish(_LAST_WORDS_S)
        stderr.finish(_LAST_WORDS_S)


def _launch(config: LauncherConfig, signals: Signals, environ: Mapping[str, str]) -> int:
    machine = hardware.detect(environ)
    if config.env:
        logger.info("%s", env_report.report(machine, environ))
        if config.model_id is None:
            return 0
    logger.info("%s", _redacted(config))
    check(config)
    if config.api_key is None:
        logger.debug("No API key: every client that reaches the port is served")
    if config.trust_remote_code:
        logger.warning("`--trust-remote-code`: code from the model's repository will run on this machine")
    if config.model_id is None:
        logger.warning(
            "NO MODEL WAS GIVEN: serving TGI's default %s. Give one with --model-id (or MODEL_ID); "
            "`--model-id demo` serves the embedded model without any download",
            DEFAULT_MODEL_ID,
        )
    model_id = config.model_id or DEFAULT_MODEL_ID
    if config.huggingface_hub_cache is not None:
        environ = {**environ, "HUGGINGFACE_HUB_CACHE": str(config.huggingface_hub_cache)}
    is_local = model_info.is_local(model_id)
    directory = model_info.directory(model_id, config.revision, environ)
    if is_local and directory is not None:
        model_info.check_directory(model_id, directory)
    # What is known already is checked already: before a download, not after it.
    info = model_info.read(directory)
    resolve_num_shard(config, machine, info)
    address = preflight.listening_address(config)
    port = preflight.http_port(config, address)

    guard = Guard()
    patience = Patience(graceful_s=config.graceful_termination_timeout, startup_s=config.startup_timeout)
    supervisor = Supervisor(signals, guard, patience, age_s=hardware.process_age_s())
    try:
        if not is_local:
            status = _download(config, model_id, supervisor, environ)
            if status is not None:
                return status
            info = model_info.read(model_info.directory(model_id, config.revision, environ))
        num_shard, _ = resolve_num_shard(config, machine, info)
        with preflight.endpoints(config, num_shard, address=address, port=port) as ends:
            if config.shard_uds_path is None:
                guard.remove_at_end(os.path.dirname(ends.uds_prefix))
            plan = make_plan(config, machine, info, ends)
            shards = [commands.shard(plan, rank, environ) for rank in range(plan.num_shard)]
            return supervisor.serve(shards, commands.router(plan, environ), on_started=lambda: _announce(plan))
    finally:
        supervisor.kill_all()
        guard.close()


def _download(config: LauncherConfig, model_id: str, supervisor: Supervisor, environ: Mapping[str, str]) -> int | None:
    logger.info("Starting check and download process for %s", model_id)
    try:
        status = supervisor.download(commands.download(config, model_id, environ))
    except DownloadError as error:
        hint = "without a network, `--model-id demo` serves the embedded model"
        if not model_id.count("/"):
            hint = f"there is no directory {model_id} either; {hint}"
        raise DownloadError(f"{model_id}: {error}; {hint}") from error
    if status is None:
        logger.info("Successfully downloaded weights for %s", model_id)
    return status


def _redacted(config: LauncherConfig) -> str:
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    values |= {name: "<hidden>" for name in SECRETS if values[name] is not None}
    return "Options: " + ", ".join(f"{name}={value!r}" for name, value in values.items() if value is not None)


def _announce(plan: LaunchPlan) -> None:
    """The plan as one record: a table for people, fields for machines."""
    for note in plan.notes:
        logger.warning("%s", note)
    if plan.num_shard > 1:
        logger.info("Sharding model on %d processes", plan.num_shard)
    if plan.asked.json_output:
        logger.info("Launch plan", extra={"plan": dict(plan.rows())})
    else:
        logger.info("Launch plan\n%s", _table(plan.rows()))


def _table(rows: list[tuple[str, str]]) -> str:
    # Imported here: it takes 50 ms, which pass while the shards load.
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.ROUNDED, show_header=False)
    for name, value in rows:
        table.add_row(name, Text(value))
    text = io.StringIO()
    Console(file=text, width=110, color_system=None).print(table)
    return text.getvalue().rstrip()
