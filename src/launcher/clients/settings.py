"""Where each program keeps its settings, and what they say for our server. Reads and writes no file."""

from __future__ import annotations

import contextlib
import copy
import json
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAME = "tercet"
KEY_VARIABLE = "TERCET_API_KEY"
"""Where codex and opencode find the key: their files do not hold it."""
_NO_KEY = "none"
"""For programs that refuse to start without a key."""
_TABLE = re.compile(r"^[ \t]*\[", re.M)
_OWN_TABLE = re.compile(rf"^\[ *model_providers *\. *([\"']?){NAME}\1 *\][^\n]*\n(?:(?![ \t]*\[).*\n?)*", re.M)
_TEXT = r'("(?:[^"\\]|\\.)*")'
_COMMENT = re.compile(_TEXT + r"|//[^\n]*|/\*.*?\*/", re.S)
_LAST_COMMA = re.compile(_TEXT + r"|,(?=\s*[}\]])", re.S)
_OF_ANOTHER_SERVER = ("CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX", "CLAUDE_CODE_USE_FOUNDRY")
"""Claude Code asks these before any address."""
_CONTEXT = "CLAUDE_CODE_MAX_CONTEXT_TOKENS"
_OF_ANOTHER_MODEL = ("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL")
_REPLACED = ("model", "model_provider", "model_context_window", "profile")
"""Of Codex's file; the profile that it names may choose another model."""


class UnreadableError(Exception):
    """The file that is there cannot be extended; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """A running server. context: the longest prompt and answer together, None if it does not say."""

    url: str
    model: str
    context: int | None = None
    api_key: str | None = None

    @property
    def openai_url(self) -> str:
        return f"{self.url}/v1"


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program with a file of settings."""

    command: str
    # The file, by the environment.
    place: Callable[[Mapping[str, str]], Path]
    # Adds a server's settings to the file's text; raises UnreadableError.
    extended: Callable[[str, Server], str]
    # Whether the program takes the key from KEY_VARIABLE.
    reads_key: bool


def _claude_place(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("CLAUDE_CONFIG_DIR") or "~/.claude").expanduser() / "settings.json"


def _claude(text: str, server: Server) -> str:
    settings = _object(text)
    before = copy.deepcopy(settings)
    env = _member(settings, "env")
    for name in ("ANTHROPIC_API_KEY", *_OF_ANOTHER_SERVER):  # a key beside a token would be sent too
        env.pop(name, None)
    env |= {name: server.model for name in _OF_ANOTHER_MODEL if name in env}
    env |= {"ANTHROPIC_BASE_URL": server.url, "ANTHROPIC_AUTH_TOKEN": server.api_key or _NO_KEY}
    env |= {f"ANTHROPIC_DEFAULT_{size}_MODEL": server.model for size in ("OPUS", "SONNET", "HAIKU")}
    # Without these it takes a context of a million tokens for granted, shortens no conversation before the server
    # refuses it, and asks its maker for news.
    env |= {"CLAUDE_CODE_DISABLE_1M_CONTEXT": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    env.pop(_CONTEXT, None)
    if server.context is not None:
        env[_CONTEXT] = str(server.context)
    return text if settings == before else _json(settings)


def _codex_place(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("CODEX_HOME") or "~/.codex").expanduser() / "config.toml"


def _codex(text: str, server: Server) -> str:
    """Edit the lines, to keep comments, and compare the values of the result with what is wanted."""
    before = _toml(text)
    top: dict[str, Any] = {"model": server.model, "model_provider": NAME}
    if server.context is not None:
        top["model_context_window"] = server.context
    provider = {"name": "Tercet", "base_url": server.openai_url, "wire_api": "responses"}
    if server.api_key is not None:
        provider["env_key"] = KEY_VARIABLE
    rest = _OWN_TABLE.sub("", text)
    start = found.start() if (found := _TABLE.search(rest)) else len(rest)
    head, tables = rest[:start], rest[start:]
    for name in _REPLACED:
        head = re.sub(rf"^[ \t]*([\"']?){name}\1[ \t]*=.*\n?", "", head, flags=re.M)
    lines = [*_assignments(top), head.strip("\n"), tables.strip("\n"), f"\n[model_providers.{NAME}]"]
    after = "\n".join([line for line in lines if line] + _assignments(provider)) + "\n"
    wanted = {name: value for name, value in before.items() if name not in _REPLACED} | top
    wanted["model_providers"] = before.get("model_providers", {}) | {NAME: provider}
    with contextlib.suppress(UnreadableError):
        if _toml(after) == wanted:
            return after
    raise UnreadableError("its form is not one that can be extended line by line")


def _opencode_place(environ: Mapping[str, str]) -> Path:
    folder = Path(environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "opencode"
    commented = folder / "opencode.jsonc"
    return commented if commented.is_file() else folder / "opencode.json"


def _opencode(text: str, server: Server) -> str:
    settings = _object(text)
    before = copy.deepcopy(settings)
    model: dict[str, Any] = {"name": server.model}
    if server.context is not None:
        # What is reserved for an answer counts against the conversation, which is summarized sooner.
        model["limit"] = {"context": server.context, "output": max(1, server.context // 4)}
    key = _NO_KEY if server.api_key is None else f"{{env:{KEY_VARIABLE}}}"
    settings.setdefault("$schema", "https://opencode.ai/config.json")
    providers = _member(settings, "provider")
    providers[NAME] = {
        "npm": "@ai-sdk/openai-compatible", "name": "Tercet",
        "options": {"baseURL": server.openai_url, "apiKey": key}, "models": {server.model: model},
    }  # fmt: skip
    settings["model"] = f"{NAME}/{server.model}"
    return text if settings == before else _json(settings)


PROGRAMS: Mapping[str, Program] = {
    "claude": Program(command="claude", place=_claude_place, extended=_claude, reads_key=False),
    "codex": Program(command="codex", place=_codex_place, extended=_codex, reads_key=True),
    "opencode": Program(command="opencode", place=_opencode_place, extended=_opencode, reads_key=True),
}


def open_webui(server: Server) -> str:
    """Open WebUI has no file of settings: variables for its first start, as lines of a shell."""
    values = {
        "OPENAI_API_BASE_URL": server.openai_url, "OPENAI_API_KEY": server.api_key or _NO_KEY,
        "ENABLE_OLLAMA_API": "false",
    }  # fmt: skip
    return "".join(f"export {name}={_quoted(value)}\n" for name, value in values.items())


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _without_comments(text: str) -> str:
    """Return the JSON of a file that may have comments and commas before closing brackets."""
    text = _COMMENT.sub(lambda found: found[1] or " ", text)
    return _LAST_COMMA.sub(lambda found: found[1] or "", text)


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(_without_comments(text)) if text.strip() else {}
    except ValueError as error:
        raise UnreadableError(f"it is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise UnreadableError("it is not a JSON object")
    return found


def _member(settings: dict[str, Any], name: str) -> dict[str, Any]:
    """Return an object in `settings`, made where there is none."""
    if settings.get(name) is None:
        settings[name] = {}
    found = settings[name]
    if not isinstance(found, dict):
        raise UnreadableError(f"`{name}` in it is not an object")
    return found


def _json(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, indent=2, ensure_ascii=False) + "\n"


def _toml(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UnreadableError(f"it is not TOML ({error})") from None


def _assignments(values: Mapping[str, Any]) -> list[str]:
    """A JSON string of ASCII is a TOML string too."""
    return [f"{name} = {json.dumps(value)}" for name, value in values.items()]
