"""What `/set` changes: the sampling parameters of the requests, and how answers are shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from wire.cli.spelling import closest

DEFAULTS = {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05}
"""For a model that brings none, on a server of ours."""


def _switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise ValueError
    return text == "on"


PARAMETERS: Mapping[str, tuple[Callable[[str], Any], str]] = {
    "temperature": (float, "a number; 0 takes the most likely token"),
    "top_p": (float, "a number from 0 to 1"),
    "top_k": (int, "a whole number"),
    "min_p": (float, "a number from 0 to 1"),
    "repetition_penalty": (float, "a number; 1 is off"),
    "presence_penalty": (float, "a number from -2 to 2"),
    "frequency_penalty": (float, "a number from -2 to 2"),
    "max_tokens": (int, "a whole number of tokens"),
    "seed": (int, "a whole number"),
    "stop": (lambda text: [text], "a text at which the answer ends"),
    "reasoning_effort": (str, "none, low, medium or high"),
    "markdown": (_switch, "on or off"),
}
"""What makes a value of a text, and what a text has to be. Besides `markdown` they are fields of requests."""


@dataclass
class Settings:
    """`chosen` by the user; `defaults`: what holds besides."""

    chosen: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)

    @property
    def sampling(self) -> dict[str, Any]:
        """The fields of a request. Greedy decoding needs no defaults of others."""
        defaults = {} if self.chosen.get("temperature") == 0 else self.defaults
        return {name: value for name, value in {**defaults, **self.chosen}.items() if name != "markdown"}

    @property
    def renders_markdown(self) -> bool:
        return bool(self.chosen.get("markdown", True))

    def set(self, text: str) -> str:
        """Do what follows `/set`; return what is to be shown."""
        name, _, value = text.partition(" ")
        name = name.replace("-", "_")
        if not name:
            return self._listed()
        if name not in PARAMETERS:
            found = closest(name, PARAMETERS, letters_per_edit=3)
            return f"unknown setting {name}; " + (f"did you mean {found}?" if found else "/set lists them")
        make, wanted = PARAMETERS[name]
        if not value.strip():
            self.chosen.pop(name, None)
            return f"{name}: the server's default" if name not in self.defaults else f"{name} {self.defaults[name]}"
        try:
            self.chosen[name] = make(value.strip())
        except ValueError:
            return f"{name} takes {wanted}"
        return f"{name} {value.strip()}"

    def _listed(self) -> str:
        values = {**self.defaults, **self.chosen}
        width = max(map(len, PARAMETERS)) + 2
        lines = [
            f"{name:<{width}}{_shown(values[name]) if name in values else '–':<10}{wanted}"
            for name, (_, wanted) in PARAMETERS.items()
        ]
        return "\n".join([*lines, "–: the server's default. /set NAME VALUE sets one, /set NAME takes it back."])


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(value) if isinstance(value, list) else str(value)
