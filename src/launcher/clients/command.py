"""`launcher launch` from its options to the file that is written, or to what it prints."""

from __future__ import annotations

import contextlib
import difflib
import http.client
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from launcher.clients.config import ClientConfig
from launcher.clients.settings import KEY_VARIABLE, PROGRAMS, Program, Server, UnreadableError, open_webui
from launcher.command import connection_to
from launcher.errors import ArgumentValidation
from launcher.http_stream import reason_of, server_url
from wire.text.escape import as_error, escape

_TIMEOUT_S = 10.0
_GENERATE = "generate"


def run_client(config: ClientConfig, environ: Mapping[str, str]) -> int:
    """Ask the server, show and write the settings, and return the exit status."""
    try:
        server = _server(config)
        if config.client == "open-webui":
            sys.stdout.write(open_webui(server))
            _say(
                "Open WebUI has no file of settings: set these variables before `open-webui serve` starts for the first"
            )
            _say("time. Later its own page has them: Admin Settings, Connections. In a shell:")
            _say('eval "$(launcher launch open-webui)" && open-webui serve')
            return 0
        program = PROGRAMS[config.client]
        place = Path(os.path.realpath(program.place(environ)))
        if config.print:
            sys.stdout.write(program.extended("", server))
            _say(f"These belong into {place}.")
            return 0
        return _write(config, program, place, server)
    except (ArgumentValidation, UnreadableError) as error:
        sys.stderr.write(as_error(str(error)) + "\n")
        return 1
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        return 130


def _server(config: ClientConfig) -> Server:
    """Raises ArgumentValidation."""
    url = server_url(config.url)
    headers = {} if config.api_key is None else {"authorization": f"Bearer {config.api_key}"}
    models = _asked(url, "/v1/models", headers)
    listed = models.get("data") if isinstance(models, dict) else None
    cards = [card for card in listed or [] if isinstance(card, dict) and isinstance(card.get("id"), str)]
    known = [card for card in cards if card.get("task", _GENERATE) == _GENERATE] if config.model is None else cards
    card = next((card for card in known if config.model in (None, card["id"])), None)
    if card is None:
        names = ", ".join(one["id"] for one in cards)
        raise ArgumentValidation(
            f"{url} has no model{f' {config.model}' if config.model else ''} (it lists: {names or 'none'})"
        )
    # Of several models each has a state, and says of itself what it is.
    info = _asked(url, f"/info?model={quote(card['id'])}" if "status" in card else "/info", headers)
    if isinstance(info, dict) and (task := info.get("task", _GENERATE)) != _GENERATE:
        raise ArgumentValidation(f"{card['id']} generates no text (its task is {task}): serve a chat model")
    if isinstance(info, dict) and info.get("has_chat_template") is False:
        raise ArgumentValidation(
            f"{card['id']} has no chat template, and {config.client} needs one: serve a chat model"
        )
    context = card.get("max_model_len")
    return Server(
        url=url, model=card["id"], context=context if isinstance(context, int) else None, api_key=config.api_key
    )


def _asked(url: str, path: str, headers: Mapping[str, str]) -> Any:
    """Raises ArgumentValidation."""
    try:
        with contextlib.closing(connection_to(url, _TIMEOUT_S)) as connection:
            connection.request("GET", path, headers=dict(headers))
            answer = connection.getresponse()
            text = answer.read()
    except OSError as error:
        raise ArgumentValidation(
            f"no server answers at {url} ({reason_of(error)}): start one with launcher serve MODEL, or give --url"
        ) from None
    except (http.client.HTTPException, ValueError, AssertionError):
        raise ArgumentValidation(f"{url} is not the address of a server") from None
    if answer.status == 401:
        raise ArgumentValidation(f"{url} wants a key: give --api-key, or API_KEY")
    try:
        return json.loads(text)
    except ValueError:
        return None


def _write(config: ClientConfig, program: Program, place: Path, server: Server) -> int:
    """Raises ArgumentValidation or UnreadableError."""
    before = _text_of(place)
    try:
        after = program.extended(before or "", server)
    except UnreadableError as error:
        raise UnreadableError(f"{place}: {error}; `--print` shows what to add by hand") from None
    if after == before:
        _say(f"{place} has these settings already.")
        return 0
    shown = difflib.unified_diff(
        (before or "").splitlines(), after.splitlines(), "before" if before else "/dev/null", str(place), lineterm=""
    )
    for line in shown:
        sys.stdout.write(escape(line) + "\n")
    sys.stdout.flush()
    if before is not None and not place.stat().st_mode & 0o222:
        raise ArgumentValidation(f"{place} is read-only: make it writable, or take the lines of `--print`")
    if not config.yes and not _is_wanted(place):
        return 1
    try:
        kept = None if before is None else _keep(place)
        _replace(place, after)
    except OSError as error:
        raise ArgumentValidation(f"{place} cannot be written: {error.strerror}") from None
    _say(f"Written: {place}" + ("." if kept is None else f"; what was there is in {kept.name} beside it."))
    if server.api_key is not None and program.reads_key:
        _say(f"Set the variable {KEY_VARIABLE} to the key of the server.")
    _say(f"Now run: {program.command}")
    return 0


def _text_of(place: Path) -> str | None:
    """Raises ArgumentValidation."""
    try:
        return place.read_text(encoding="utf-8-sig")  # editors of Windows write a mark before the text
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ArgumentValidation(f"{place} cannot be read: {reason}") from None


def _is_wanted(place: Path) -> bool:
    """Raises ArgumentValidation where standard input is no terminal."""
    if not sys.stdin.isatty():
        raise ArgumentValidation("this is no terminal, so no question can be asked: give --yes, or --print")
    sys.stdout.write(f"Write this to {place}? [y/N] ")
    sys.stdout.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _keep(place: Path) -> Path:
    """Copy a file beside itself, over no copy that is there. Raises OSError."""
    number = 1
    while (kept := place.with_name(f"{place.name}.before-tercet{'' if number == 1 else f'-{number}'}")).exists():
        number += 1
    _create(kept, place.read_bytes(), place.stat().st_mode & 0o777)
    return kept


def _replace(place: Path, text: str) -> None:
    """Raises OSError."""
    place.parent.mkdir(parents=True, exist_ok=True)
    mode = place.stat().st_mode & 0o777 if place.exists() else 0o600  # there may be a key in it
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".tercet-") as folder:
        new = Path(folder) / place.name
        _create(new, text.encode(), mode)
        new.replace(place)


def _create(path: Path, content: bytes, mode: int) -> None:
    """Raises OSError."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)


def _say(line: str) -> None:
    sys.stderr.write(escape(line) + "\n")
