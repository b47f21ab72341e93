"""`launcher models`, `launcher pull` and `launcher rm` from their options to what they print."""

from __future__ import annotations

import dataclasses
import json
import logging
import subprocess
import sys
import time
from collections.abc import Mapping

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from launcher.errors import ArgumentValidation, LauncherError
from launcher.models.cached import CachedModel, cached_models, removal
from launcher.models.config import ModelsConfig, PullConfig, RemoveConfig
from launcher.planning.gguf_choice import with_chosen_file
from launcher.planning.hub import check_cache
from launcher.planning.model_info import directory, hub_cache, is_local, is_misspelt_demo, shown_bytes, with_hub_cache
from wire.cli.commands import with_variables
from wire.cli.spelling import to_argv
from wire.log import log_line, log_setup, progress_bars
from wire.log.levels import TO_PYTHON
from wire.log.log_line import LogLine
from wire.processes.python_child import NEUTRAL_FOLDER, child_environment, module_command
from wire.text.counting import counted
from wire.text.escape import as_error, one_line

logger = logging.getLogger("text_generation_launcher.download")

_DAY_S = 86_400


def run_models(config: ModelsConfig, environ: Mapping[str, str]) -> int:
    """Prints what is cached; returns the exit status."""
    environ = with_hub_cache(environ, config.huggingface_hub_cache)
    try:
        found = cached_models(environ)
    except LauncherError as error:
        return _refuse(error, config)
    if config.json:
        rows = [
            {
                "model": model.model_id, "revision": model.revision, "commit": model.commit, "size": model.size,
                "used_at": model.used_at, "whole": model.is_whole, "path": str(model.path),
            }
            for model in found
        ]  # fmt: skip
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
    elif not found:
        sys.stdout.write(f"No models in {hub_cache(environ)}; launcher pull MODEL downloads one.\n")
    else:
        _print_table(found)
    return 0


def _print_table(found: list[CachedModel]) -> None:
    console = Console()
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False)
    for name in ("model", "revision", "size", "used"):
        table.add_column(name, justify="right" if name == "size" else "left", overflow="fold")
    if not console.is_terminal:
        console.width = max(console.width, 200)  # a pipe has no width: no cell is cut
    for model in found:
        size = shown_bytes(model.size) + ("" if model.is_whole else " (incomplete)")
        # Names of folders: neither markup nor sequences of a terminal.
        table.add_row(Text(one_line(model.model_id)), Text(one_line(model.revision)), size, _age(model.used_at))
    console.print(table)


def _age(used_at: float) -> str:
    days = int((time.time() - used_at) // _DAY_S)
    return "today" if days <= 0 else f"{counted(days, 'day')} ago"


def run_pull(config: PullConfig, environ: Mapping[str, str]) -> int:
    """Downloads by the command that a launch uses; returns its exit status."""
    environ = with_hub_cache(environ, config.huggingface_hub_cache)
    try:
        if is_local(config.model_id):
            raise ArgumentValidation(f"{config.model_id} needs no download: launcher serve {config.model_id}")
        if is_misspelt_demo(config.model_id) and "/" not in config.model_id:
            raise ArgumentValidation(f"{config.model_id} is no model of the hub; did you mean launcher serve demo?")
        config = dataclasses.replace(config, model_id=with_chosen_file(config.model_id, config.revision, environ))
        check_cache(config.model_id, directory(config.model_id, config.revision, environ), environ)
    except LauncherError as error:
        return _refuse(error, config)
    try:
        failure = _download(config, environ)
    except KeyboardInterrupt:
        return 130  # what was fetched stays, and the next pull continues from there
    if failure is not None:
        sys.stderr.write(as_error(with_variables(failure, config)) + "\n")
        return 1
    sys.stdout.write(f"{config.model_id} is in {directory(config.model_id, config.revision, environ)}\n")
    return 0


def _download(config: PullConfig, environ: Mapping[str, str]) -> str | None:
    """Run the child with a bar on a terminal, else its log; return why it failed."""
    flags = to_argv({"revision": config.revision, "json_output": True})
    last = "the download ended without a word"
    if on_terminal := log_setup.configure(False, layout="launcher", short=True) is not None:
        environ = {**environ, progress_bars.WANTED: "1"}
    with subprocess.Popen(
        [*module_command("model_server"), "download-weights", config.model_id, *flags],
        env=child_environment(environ), cwd=NEUTRAL_FOLDER, stdout=subprocess.PIPE, text=True, errors="replace",
    ) as child:  # fmt: skip
        assert child.stdout is not None
        for text in child.stdout:
            line = log_line.parse(text) or LogLine(level="INFO", message=text)
            if line.level == "ERROR":
                last = one_line(line.message)
            elif on_terminal:
                logger.log(TO_PYTHON[line.level], "%s", line.message, extra={"log_line": line, "log_layout": None})
            else:
                sys.stdout.write(one_line(line.message) + "\n")
                sys.stdout.flush()
    return last if child.returncode else None


def run_remove(config: RemoveConfig, environ: Mapping[str, str]) -> int:
    """Remove after a question, and return the exit status: 1 if missing or declined, 130 after Ctrl-C."""
    environ = with_hub_cache(environ, config.huggingface_hub_cache)
    try:
        plan = removal(config.model_id, config.revision, environ)
        if not config.yes and not _is_wanted(config, plan.size):
            return 1
        plan.execute()
    except LauncherError as error:
        return _refuse(error, config)
    except KeyboardInterrupt:
        sys.stdout.write("\n")  # the question, or the echoed ^C, has left the cursor within a line
        return 130
    sys.stdout.write(f"Removed {_named(config)}: {shown_bytes(plan.size)} freed.\n")
    return 0


def _is_wanted(config: RemoveConfig, size: int) -> bool:
    """Raises ArgumentValidation where standard input is no terminal."""
    if not sys.stdin.isatty():
        raise ArgumentValidation("this is no terminal, so no question can be asked: give --yes to remove the model")
    sys.stdout.write(f"Remove {_named(config)} and free {shown_bytes(size)}? [y/N] ")
    sys.stdout.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _named(config: RemoveConfig) -> str:
    return config.model_id + (f" @ {config.revision}" if config.revision else "")


def _refuse(error: LauncherError, config: ModelsConfig | PullConfig | RemoveConfig) -> int:
    sys.stderr.write(as_error(with_variables(str(error), config)) + "\n")
    return 1
