"""Which GGUF file is estimated, and the folder of its config, made as `serve` makes it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping

from launcher.config import LauncherConfig
from launcher.errors import ArgumentValidation, DownloadError
from launcher.planning import commands
from launcher.planning.gguf_choice import with_chosen_file
from launcher.planning.model_info import hub_cache
from launcher.planning.preflight import with_gguf_file
from wire.quantization import gguf


def prepared(model_id: str, revision: str | None, environ: Mapping[str, str]) -> str:
    """Return `model_id`, or the GGUF file that it means.

    Raises:
        ArgumentValidation: The file cannot be served, or none has the wanted quantization.
        DownloadError: The file has not been downloaded, or the hub cannot be asked.
    """
    chosen = with_chosen_file(model_id, revision, environ)
    meant = with_gguf_file(LauncherConfig(model_id=chosen)).model_id or chosen
    if not gguf.names_file(meant):
        return model_id
    if gguf.file_of(meant, revision, hub_cache(environ)) is None:
        if gguf.in_repository(meant) is None:
            raise ArgumentValidation(f"{meant}: no such file")
        raise DownloadError(f"{meant} is not on this machine, and is estimated by what is in it: launcher pull {meant}")
    if gguf.found_folder(meant, revision, hub_cache(environ)) is None:
        command = commands.download(LauncherConfig(model_id=meant, revision=revision), meant, environ)
        done = subprocess.run(
            command.argv, env=command.env, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
        )
        if done.returncode:
            raise ArgumentValidation(_error_in(done.stdout + done.stderr) or f"{meant} cannot be read")
    return meant


def _error_in(log: str) -> str | None:
    """Return the message of the last record of a log in JSON that is an error."""
    for line in reversed(log.splitlines()):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and record.get("level") == "ERROR":
            return str(record.get("message"))
    return None
