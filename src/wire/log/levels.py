"""Levels of the log: their names in tracing, loguru and Python, and the filter that `LOG_LEVEL` may be."""

from __future__ import annotations

import logging
import re

PACKAGES = ("launcher", "router", "model_server", "wire", "text_generation_launcher")
"""Loggers that follow the asked level; all others start at WARN."""

TRACE = 5
OFF = logging.CRITICAL + 10
TO_PYTHON = {
    "TRACE": TRACE, "DEBUG": logging.DEBUG, "INFO": logging.INFO, "SUCCESS": logging.INFO, "WARN": logging.WARNING,
    "WARNING": logging.WARNING, "ERROR": logging.ERROR, "CRITICAL": logging.CRITICAL, "FATAL": logging.CRITICAL,
    "OFF": OFF,
}  # fmt: skip
_LEVELS = TO_PYTHON | {
    "0": OFF, "1": logging.ERROR, "2": logging.WARNING, "3": logging.INFO, "4": logging.DEBUG, "5": TRACE,
}  # fmt: skip
_SPAN_FILTER = re.compile(r"\[[^\]]*\]")
_TARGET = re.compile(r"[A-Za-z_][\w.:-]*")
# TGI's names for our packages.
_TARGETS = {
    "text_generation_router": ("router",),
    "text_generation_server": ("model_server",),
    "text_generation_launcher": ("launcher", "text_generation_launcher"),
}
_KNOWN_TARGETS = frozenset(PACKAGES) | set(_TARGETS)
_RELAYS = dict.fromkeys(("router", "text_generation_router"), ("text_generation_launcher.router",)) | dict.fromkeys(
    ("model_server", "text_generation_server"), ("text_generation_launcher.shard", "text_generation_launcher.download")
)


def level_from_filter(text: str) -> str:
    """The most verbose level that a `LOG_LEVEL` filter (`debug`, `info,router=trace`) names; INFO if it names none."""
    levels = [level for _, level in _directives(text) if level is not None]
    return level_name(min(levels)) if levels else "INFO"


def _directives(text: str) -> list[tuple[str, int | None]]:
    """Return each part's target (empty: ours) and level (None: senseless), in tracing's syntax without spans."""
    found: list[tuple[str, int | None]] = []
    for part in _SPAN_FILTER.sub("", text).split(","):
        target, equals, level = (word.strip() for word in part.rpartition("="))
        if not equals and level.partition("::")[0] in _KNOWN_TARGETS:
            target, level = level, "TRACE"
        if level:
            found.append((target, _LEVELS.get(level.upper())))
    return found


def levels_of_loggers(text: str) -> tuple[int, dict[str, int], int]:
    """The level of our loggers, those of named loggers, and how many parts of the filter mean nothing."""
    directives = _directives(text)
    named: dict[str, int] = {}
    default = next((level for target, level in reversed(directives) if not target and level is not None), logging.INFO)
    num_unknown = 0
    for target, level in directives:
        if level is None or (target and not _TARGET.fullmatch(target)):
            num_unknown += 1
        elif target:
            package = target.partition("::")[0].partition(".")[0]
            for name in _TARGETS.get(package, (target.replace("::", "."),)):
                named[name] = min(level, named.get(name, level))
            # The launcher passes a child's records on through a logger of that child's.
            for child in _RELAYS.get(package, ()):
                named[child] = min(level, named.get(child, level if target == package else default))
    return default, named, num_unknown


def level_name(number: int) -> str:
    if number >= OFF:
        return "OFF"
    names = {logging.ERROR: "ERROR", logging.WARNING: "WARN", logging.INFO: "INFO", logging.DEBUG: "DEBUG"}
    return next((name for floor, name in names.items() if number >= floor), "TRACE")


def tracing_level(name: str) -> str:
    return "ERROR" if name.upper() in ("CRITICAL", "FATAL", "OFF") else level_name(TO_PYTHON[name.upper()])
