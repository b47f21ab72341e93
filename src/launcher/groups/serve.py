"""Serves several models at one address: starts the front, and each model's processes as they are wanted."""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from launcher.command import Command, unix_url, url_of
from launcher.config import LauncherConfig
from launcher.config_checks import check
from launcher.errors import ArgumentValidation, LauncherError, WebserverCannotStart, WebserverFailed
from launcher.group_config import num_nodes
from launcher.groups.control import Control
from launcher.groups.front import front_command
from launcher.groups.group import Group
from launcher.groups.models_file import ModelEntry, read_models
from launcher.groups.pool import Member, Pool
from launcher.groups.sizes import divide, memory_of
from launcher.http_config import check_http
from launcher.model_launch import ModelLaunch, resolved
from launcher.planning import preflight
from launcher.planning.hardware import Hardware
from launcher.planning.model_info import shown_bytes, with_hub_cache
from launcher.pool_config import check_pool
from launcher.processes.child import Child, Guard, start_child
from launcher.processes.failures import cause, headline, report_crash
from launcher.processes.model_processes import ModelState
from launcher.processes.signals import Signals
from launcher.processes.stopping import SHOWN, KillRequested, announced, end_all, kill_all
from launcher.processes.supervisor import Supervisor
from launcher.processes.timeouts import Timeouts
from launcher.terminal import Terminal, how_to_ask
from wire.pooling.task import find_task
from wire.text.counting import counted

logger = logging.getLogger("text_generation_launcher")

_POLL_S = 1.0
"""A child's end and a message of the front interrupt the wait; the poll is for idle times."""


def serve_models(
    config: LauncherConfig,
    signals: Signals,
    environ: Mapping[str, str],
    machine: Hardware,
    terminal: Terminal | None,
) -> int:
    """Serve until a signal, and return the exit status. Raises LauncherError."""
    entries = read_models(config)
    check_pool(config, num_models=len(entries))
    _check(config)
    uds = preflight.http_socket(config)
    address = preflight.listening_address(config)
    port = preflight.http_port(config, address) if uds is None else config.port
    environ = with_hub_cache(environ, config.huggingface_hub_cache)
    models = [_checked(entry, environ, machine) for entry in entries]
    url = unix_url(uds) if uds is not None else url_of(address, port, has_tls=config.ssl_certfile is not None)
    with (
        contextlib.closing(Guard()) as guard,
        preflight.private_directory(environ, guard.remove_at_end) as folder,
    ):
        groups = []
        for number, (entry, model) in enumerate(zip(entries, models, strict=True)):
            status = _fetch(entry, model, signals, guard)
            if status is not None:
                return status
            assert model.directory is not None
            task = find_task(model.directory, model.config.task, ArgumentValidation).task
            groups.append(Group(entry, model, task, guard, environ, folder / f"m{number}", terminal=terminal))
        server = _Server(config, groups, signals, guard, machine, folder, terminal)
        command = front_command(config, address, port, uds, url, server.control.path, entries, environ)
        return server.run(command)


def _check(config: LauncherConfig) -> None:
    """Refuse options that do not go with several models."""
    check_http(config)
    for flag, is_given in (
        ("--nnodes", num_nodes(config) > 1),
        ("--placement", config.placement is not None),
        ("--prometheus-port", bool(config.prometheus_port)),
        ("--shard-uds-path", config.shard_uds_path is not None),
        ("--master-port", config.master_port is not None),
    ):
        if is_given:
            raise ArgumentValidation(f"`{flag}` is for one model alone: leave it out to serve several")


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Begin errors with the model's name."""
    try:
        yield
    except LauncherError as error:
        raise type(error)(f"{name}: {error}") from error


def _checked(entry: ModelEntry, environ: Mapping[str, str], machine: Hardware) -> ModelLaunch:
    with _naming(entry.name):
        config = preflight.with_gguf_file(entry.config)
        check(config)
        model = ModelLaunch(resolved(config, environ), environ, machine)
        model.check_files()
        model.check_cache()
        return model


def _fetch(entry: ModelEntry, model: ModelLaunch, signals: Signals, guard: Guard) -> int | None:
    """Download a model if it is not there; return an exit status if a signal ended it."""
    with _naming(entry.name):
        if model.needs_download:
            supervisor = Supervisor(signals, guard, Timeouts(graceful_s=0))
            try:
                status = model.download(signals, supervisor.download)
            finally:
                supervisor.kill_all()
            if status is not None:
                return status
        try:
            model.check_tokenizer()
        except ArgumentValidation:
            if signals.pop():  # it has ended the trial as well
                return 0
            raise
    return None


class _StopRequested(Exception):
    """A first signal."""


class _Server:
    """The front and all groups, from their start to their end."""

    def __init__(
        self,
        config: LauncherConfig,
        groups: list[Group],
        signals: Signals,
        guard: Guard,
        machine: Hardware,
        folder: Path,
        terminal: Terminal | None,
    ) -> None:
        self._config, self._signals, self._guard, self._terminal = config, signals, guard, terminal
        self._groups = {group.entry.name: group for group in groups}
        self._timeouts = Timeouts(graceful_s=config.graceful_termination_timeout)
        bounds = divide(groups, machine, config.models_memory, config.max_loaded_models)
        members = [
            Member(
                name=group.entry.name,
                processes=group,
                memory=memory_of(group, machine),
                preload=group.entry.preload,
                keep_alive_s=group.entry.keep_alive_s,
            )
            for group in groups
        ]
        for member in members:
            logger.info("%s counts for %s of %s", member.name, shown_bytes(member.memory), shown_bytes(bounds.memory))
        self.control = Control(folder / "control", signals.wake)
        self._pool = Pool(members, bounds, self._ask_release, autoload=not config.no_autoload)
        self._front: Child | None = None
        self._told: object = None
        self._waits: dict[int, tuple[str, bool]] = {}
        """Number of a message → the model, and whether it is to be loaded."""
        self._is_listening = self._has_announced = False
        self._began = time.monotonic()

    def run(self, front: Command) -> int:
        """Serve until a signal, and return the exit status. Raises LauncherError."""
        try:
            self._front = start_child(front, self._guard, WebserverCannotStart)
            while True:
                self._step()
        except _StopRequested:
            return self._stop()
        finally:
            self.control.close()
            kill_all(
                [*filter(None, [self._front]), *(child for one in self._groups.values() for child in one.children)]
            )

    def _step(self) -> None:
        assert self._front is not None
        if self._front.poll() is not None:
            report_crash(self._front, headline(self._front))
            raise (WebserverFailed if self._is_listening else WebserverCannotStart)(cause(self._front))
        for message in self.control.receive():
            self._handle(message)
        for name, group in self._groups.items():
            self._pool.report_batches(name, has_batches=group.has_batches)
        self._pool.step()
        pause_s = min(group.step() for group in self._groups.values())
        self._pool.step()
        self._tell()
        self._answer()
        if self._is_listening and self._pool.is_well and not self._has_announced:
            self._announce()
        self._signals.wait(min(pause_s, _POLL_S))
        if self._signals.pop():
            raise _StopRequested
        if self._signals.pop_change():
            self._front.read_again()
            for group in self._groups.values():
                group.read_keys_again()

    # The front

    def _ask_release(self, name: str, may_wait: bool) -> None:
        self.control.send(release=name, may_wait=may_wait)

    def _handle(self, message: Mapping[str, object]) -> None:
        match message:
            case {"usage": dict() as usage}:
                for name, (active, waiting, idle_s) in usage.items():
                    self._pool.report(name, active, waiting, idle_s)
            case {"released": str(name)}:
                self._pool.released(name)
            case {"kept": str(name)}:
                self._pool.kept(name)
            case {"load": str(name), "number": int(number)}:
                self._pool.load(name)
                self._waits[number] = name, True
            case {"unload": str(name), "number": int(number)}:
                self._pool.unload(name)
                self._waits[number] = name, False
            case {"listening": _}:
                self._is_listening = True

    def _answer(self) -> None:
        """Tell the front which loads and unloads are done."""
        for number, (name, is_load) in list(self._waits.items()):
            member = self._pool.members[name]
            if is_load:
                is_done = member.state is ModelState.READY and not member.is_released
                has_failed = member.state is ModelState.FAILED and member.retry_at > time.monotonic()
                is_done = is_done or has_failed
            else:
                is_done = not member.takes_room
            if is_done:
                self.control.send(done=number, error=member.error if is_load else "")
                del self._waits[number]

    def _tell(self) -> None:
        """Tell the front what has changed."""
        now, models = time.monotonic(), {}
        for name, group in self._groups.items():
            member = self._pool.members[name]
            models[name] = {
                "aliases": group.entry.aliases,
                "adapters": group.entry.adapters,
                "task": group.task,
                "preload": member.preload,
                "socket": str(group.uds),
                "state": member.state.value,
                "since": member.since,
                "error": member.error,
                "retry_at": member.retry_at if member.retry_at > now else 0.0,
                "num_loaded": member.num_loaded,
                "num_failed": member.num_failed,
                "took_s": member.took_s,
            }
        told = {"models": models, "is_well": self._pool.is_well}
        if self.control.is_connected and told != self._told:
            self._told = told
            self.control.send(**told)

    def _announce(self) -> None:
        """Say where it is served, once all that is loaded at the start is."""
        self._has_announced = True
        assert self._front is not None
        url, seconds = self._front.command.url or "", time.monotonic() - self._began
        logger.info("Ready on %s after %.2f s: %s", url, seconds, counted(len(self._groups), "model"))
        if self._terminal is None:
            return
        config = self._config
        rows = [("models", "")] + [
            (f"  {name}", f"{group.model.model_id} ({group.state.value})") for name, group in self._groups.items()
        ]
        name = next((one for one, group in self._groups.items() if group.task == "generate"), "")
        needs_key = bool(config.api_key or config.keys_file)
        asks = how_to_ask(url, has_page=not config.no_playground, needs_key=needs_key, model=name)
        self._terminal.show_serving(rows + asks)
        self._terminal.say(f"Ready after {seconds:.1f} s. Ctrl-C stops the server.")

    # The end

    def _stop(self) -> int:
        """Let the front answer what it still can, then end all models at the same time."""
        why = signal.Signals(self._signals.received[0]).name
        num_requests = sum(member.num_active + member.num_waiting for member in self._pool.members.values())
        text = announced(num_requests, self._timeouts.graceful_s, self._signals.remark)
        logger.info("%s: %s", why, text, extra=SHOWN)
        try:
            deadline = time.monotonic() + self._timeouts.graceful_s
            assert self._front is not None
            for pause_s in end_all([self._front], self._timeouts.graceful_s, self._timeouts):
                self._pause(min(pause_s, *(one.step() for one in self._groups.values())))
            for group in self._groups.values():
                group.limit(max(1.0, deadline - time.monotonic()))
                group.stop(f"{why}, {group.entry.name}")
            while any(group.is_running for group in self._groups.values()):
                self._pause(min(_POLL_S, *(one.step() for one in self._groups.values())))
        except KillRequested:
            number = self._signals.received[-1]
            logger.warning("%s: killing everything now", signal.Signals(number).name)
            return 128 + number
        return 0

    def _pause(self, pause_s: float) -> None:
        self._signals.wait(pause_s)
        if self._signals.pop():
            raise KillRequested
