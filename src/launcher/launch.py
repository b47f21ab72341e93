"""LauncherConfig → checks → plan → children. The one place that knows the order of the launch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.config import DEFAULT_MODEL_ID, SECRETS, LauncherConfig, ServeConfig
from launcher.config_checks import check
from launcher.errors import ArgumentValidation, DownloadError, LauncherError, NotEnoughCUDADevices
from launcher.group_config import check_placement, num_nodes, supervisor_variables, with_supervisor
from launcher.model_launch import ModelLaunch, resolved
from launcher.planning import commands, hardware, model_info, preflight
from launcher.planning.hardware import Hardware
from launcher.planning.plan import Endpoints, LaunchPlan, NodePart
from launcher.planning.shown_plan import plan_rows, served_rows
from launcher.pool_config import has_pool
from launcher.processes.child import Guard
from launcher.processes.output import Output, claim_standard_descriptors
from launcher.processes.signals import Signals
from launcher.processes.supervisor import Supervisor
from launcher.processes.timeouts import Timeouts
from launcher.terminal import Terminal, how_to_ask, info_of
from wire.cli.commands import with_variables
from wire.log import console, log_setup
from wire.log.levels import level_from_filter
from wire.text.escape import without_passwords

if TYPE_CHECKING:
    from launcher.nodes.node_group import NodeGroup

logger = logging.getLogger("text_generation_launcher")

_FLUSH_TIMEOUT_S = 2.0
_SHOWN = {console.ATTRIBUTE: True}


def run_launch(config: LauncherConfig, environ: Mapping[str, str]) -> int:
    """Launches, in `environ`; returns the exit status."""
    claim_standard_descriptors()
    stdout, stderr = Output(1, json_lines=config.json_output), Output(2)
    is_short = not config.verbose and not config.verbose_startup and level_from_filter(config.log_level) == "INFO"
    short_log = log_setup.configure(
        config.json_output, config.log_level, layout="launcher", stream=stdout, short=is_short
    )
    terminal = None if short_log is None else Terminal(short_log)
    status, final_text = 1, ""
    try:
        status = _run(config, environ, terminal)
    except LauncherError as error:
        status = error.exit_status
        if config.json_output:
            logger.error("%s", error.report())
        for_person = stderr.isatty() and not config.json_output
        final_text = (error.for_terminal(is_short=terminal is not None) if for_person else error.report()) + "\n"
    except Exception:
        logger.exception("The launcher itself failed")
        final_text = "Error: the launcher itself failed, see the log\n"
    finally:
        logging.shutdown()
        if terminal is not None:
            terminal.show_starting([], of=0)
        stdout.finish(_FLUSH_TIMEOUT_S)
        stderr.write(final_text)  # After the log, also where both go to one file.
        stderr.finish(_FLUSH_TIMEOUT_S)
    return status


def _run(config: LauncherConfig, environ: Mapping[str, str], terminal: Terminal | None) -> int:
    try:
        if config.placement == "ray":
            return _run_on_ray(config, environ)
        with Signals() as signals:
            return _Launch(config, signals, environ, terminal).run()
    except (ArgumentValidation, DownloadError, NotEnoughCUDADevices) as error:
        filled = {} if config.placement else supervisor_variables(config, environ)
        raise type(error)(with_variables(str(error), config, filled)) from error


def _run_on_ray(config: LauncherConfig, environ: Mapping[str, str]) -> int:
    check_placement(config)
    try:
        from launcher.placement import ray_nodes
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ArgumentValidation("`--placement ray` needs Ray: pip install 'tercet[ray]'") from None
    return ray_nodes.run_on_ray(config, environ)


class _Interrupted(Exception):
    """A request to stop while this node waits for others."""


class _Launch:
    """One launch, from the options to the end of the children."""

    def __init__(
        self,
        config: LauncherConfig,
        signals: Signals,
        environ: Mapping[str, str],
        terminal: Terminal | None = None,
    ) -> None:
        """`terminal`: what shows the launch instead of the log."""
        self._config, self._signals, self._environ = config, signals, environ
        self._terminal = terminal
        self._group: NodeGroup | None = None
        """None: one node serves alone."""
        self._age_s = hardware.process_age_s()
        self._phases = [("process start and imports", self._age_s)]
        """Name and seconds of what has been done so far."""
        self._phase_began = time.monotonic()

    def run(self) -> int:
        """Returns the exit status. Raises LauncherError."""
        config = self._config
        if self._terminal is not None:
            self._terminal.show_starting([("launcher", "checking the machine and the model")], of=1)
        machine = hardware.detect(self._environ)
        self._end_phase("check of the machine")
        if config.env:
            from launcher.planning import env_report

            logger.info("Runtime environment:\n%s", env_report.report(machine, self._environ))
            if config.model_id is None and config.models is None:
                return 0
        config = with_supervisor(config, self._environ)
        if has_pool(config) or (isinstance(config, ServeConfig) and config.more_models):
            return self._serve_models(config, machine)
        self._config = config = preflight.with_gguf_file(config)
        logger.info("%s", redacted(config))
        check(config)
        preflight.check_router_variables(self._environ)
        self._environ = model_info.with_hub_cache(self._environ, config.huggingface_hub_cache)
        self._config = resolved(config, self._environ)
        return self._serve(machine) if num_nodes(config) == 1 else self._serve_in_group(machine)

    def _serve_models(self, config: LauncherConfig, machine: Hardware) -> int:
        # Imported here: one model alone needs none of it.
        from launcher.groups.serve import serve_models

        logger.info("%s", redacted(config))
        preflight.check_router_variables(self._environ)
        return serve_models(config, self._signals, self._environ, machine, self._terminal)

    def _serve_in_group(self, machine: Hardware) -> int:
        # Imported here: a node alone needs none of it, and gRPC takes 0.2 s.
        from launcher.nodes import group as nodes

        log_setup.name_node(self._config.node_rank or 0)
        try:
            self._group = nodes.open_group(self._config, machine, self._signals, self._pause)
            self._config = self._group.join(
                self._config, lambda config: nodes.commit_of(config, self._environ), self._pause
            )
            self._end_phase("meeting of the nodes")
            self._config = nodes.with_shards(self._config, machine)
            check(self._config)
            return self._serve(nodes.whole(machine, num_nodes(self._config)))
        except _Interrupted:
            if self._group is not None:
                self._group.may_stop_shards()
            return 0
        except LauncherError as error:
            if self._group is None:
                raise
            raise self._group.end(error) from error
        finally:
            if self._group is not None:
                self._group.close()

    def _pause(self, timeout_s: float) -> None:
        """Waits for something of the other nodes. Raises _Interrupted on a signal, NodeLost if a node is lost."""
        self._signals.wait(timeout_s)
        if self._signals.pop() or (self._group is not None and self._group.wants_stop()):
            raise _Interrupted
        if self._group is not None:
            self._group.check()

    @property
    def _leads(self) -> bool:
        """Whether this node has the router."""
        return not self._config.node_rank

    def _serve(self, machine: Hardware) -> int:
        """machine: all nodes together."""
        config = self._config
        self._warn()
        model = ModelLaunch(config, self._environ, machine)
        # What is known already is checked already: before a download, not after it.
        expected = model.check_files()
        address, port, uds = config.hostname, config.port, None
        if self._leads:
            uds = preflight.http_socket(config)
            address = preflight.listening_address(config)
            port = preflight.http_port(config, address) if uds is None else port
            model.config = preflight.without_busy_metrics_port(config, address)
        model.check_cache()
        with (
            contextlib.closing(Guard()) as guard,
            preflight.socket_prefix(config, expected, self._environ, guard.remove_at_end) as prefix,
        ):
            self._end_phase("checks")
            ends = Endpoints(hostname=address, port=port, uds=uds, uds_prefix=prefix, master_port=0)
            return self._run_children(model, guard, ends)

    def _warn(self) -> None:
        config = self._config
        if config.trust_remote_code:
            logger.warning("`--trust-remote-code`: code from the model's repository will run on this machine")
        if config.model_id is None:
            empty = " (the variable MODEL_ID is set, but empty)" if "MODEL_ID" in self._environ else ""
            logger.warning(
                "NO MODEL WAS GIVEN%s: serving TGI's default %s. Give one with --model-id (or MODEL_ID); "
                "`launcher serve demo` serves the embedded model without any download",
                empty,
                DEFAULT_MODEL_ID,
            )

    def _run_children(self, model: ModelLaunch, guard: Guard, ends: Endpoints) -> int:
        config = self._config
        timeouts = Timeouts(graceful_s=config.graceful_termination_timeout, startup_s=config.startup_timeout)
        supervisor = Supervisor(
            self._signals,
            guard,
            timeouts,
            age_s=hardware.process_age_s(),
            own_phases=self._phases if config.verbose_startup else None,
            terminal=self._terminal,
            group=self._group,
        )
        try:
            if model.needs_download:
                if self._group is not None:
                    self._group.show_progress("downloading the model")
                status = model.download(self._signals, supervisor.download)
                if status is not None:
                    return status
                self._end_phase("download")
            self._config = model.config
            try:
                model.check_tokenizer()
            except ArgumentValidation:
                if self._signals.pop():  # it has ended the trial as well
                    return 0
                raise
            self._end_phase("trial of the tokenizer")
            plan = model.plan(functools.partial(self._meet, ends))
            log_reasons(plan)
            shards = commands.shards(plan, self._environ)
            router = None
            if self._leads:
                router = commands.router(plan, self._environ, logs_requests=self._terminal is not None)
            return supervisor.serve(
                shards,
                router,
                on_started=lambda: self._announce(plan),
                on_ready=lambda url, seconds: self._show_serving(plan, url, seconds),
            )
        finally:
            supervisor.kill_all()

    def _meet(
        self, ends: Endpoints, directory: Path | None, adapters: Mapping[str, Path | None], num_shard: int
    ) -> tuple[NodePart | None, Endpoints]:
        """This node's part, and its addresses with the port where the ranks meet."""
        if self._group is None or directory is None:
            return None, dataclasses.replace(ends, master_port=preflight.rendezvous_port(self._config, num_shard))
        from launcher.nodes import group as nodes

        there = {name: folder for name, folder in adapters.items() if folder is not None}
        part, port = nodes.meet(self._config, self._group, directory, there, num_shard, ends.uds_prefix, self._pause)
        self._end_phase("meeting of the nodes")
        return part, dataclasses.replace(ends, master_port=port)

    def _announce(self, plan: LaunchPlan) -> None:
        """The plan as one record, a table for people, fields for machines. Made while the shards load."""
        self._end_phase("plan, start of the shards")
        if plan.on_gpu and not hardware.has_compiled_kernels(self._environ):
            logger.info(
                "Kernels are compiled now, at the first start on this machine; later starts reuse them", extra=_SHOWN
            )
        if plan.asked.json_output:
            logger.info("Launch plan", extra={"plan": dict(plan_rows(plan))})
        else:
            logger.info("Launch plan\n%s", _table(plan_rows(plan)))

    def _show_serving(self, plan: LaunchPlan, url: str, seconds: float) -> None:
        if self._terminal is None:
            return
        if not self._leads:
            self._terminal.show_serving([])
            return
        needs_key = plan.asked.api_key is not None or plan.asked.keys_file is not None
        info = info_of(url)
        task = str(info.get("task", "generate"))
        asks = how_to_ask(url, has_page=not plan.asked.no_playground, needs_key=needs_key, task=task)
        self._terminal.show_serving(served_rows(plan, info) + asks)
        self._terminal.say(f"Ready after {seconds:.1f} s. Ctrl-C stops the server.")

    def _end_phase(self, name: str) -> None:
        now = time.monotonic()
        self._phases.append((name, now - self._phase_began))
        self._phase_began = now


def redacted(config: LauncherConfig) -> str:
    """All options that have a value, without the secrets among them."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    values |= {name: "<hidden>" for name in SECRETS if values[name] is not None}
    given = ", ".join(f"{name}={value!r}" for name, value in values.items() if value is not None)
    return f"Options: {without_passwords(given)}"


def log_reasons(plan: LaunchPlan) -> None:
    """Logs what was resolved and by which rule, before the first shard is started."""
    for note in plan.notes:
        logger.warning("%s", note)
    if plan.num_shard > 1:
        logger.info("Sharding model on %d processes", plan.num_shard)
    for reason in plan.reasons:
        logger.info("%s", reason)


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
