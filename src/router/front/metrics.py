"""The front's metrics, and those of all models in one text, with the label `model`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from router.declared_metrics import DECLARED, OF_KEYS, Declared
from router.metrics import Metrics
from wire.text.escape import shown

_MODEL: tuple[str, tuple[str, ...]] = ("model", ())
"""A label whose values are added when the launcher has said the models' names."""
_STATES = ("unloaded", "loading", "loaded", "unloading", "failed")
FRONT: dict[str, Declared] = {
    "tgi_models": Declared("gauge", "Models", "models", (("state", _STATES),)),
    "tgi_model_starts": Declared("counter", "Starts of a model", "starts", (_MODEL, ("outcome", ("loaded", "failed")))),
    "tgi_model_requests_waiting": Declared(
        "gauge", "Requests that wait for their model to start", "requests", (_MODEL,)
    ),
    "tgi_model_start_duration": Declared("histogram", "Start of a model in seconds", "seconds", (_MODEL,)),
    "tgi_request_refused": DECLARED["tgi_request_refused"],
    **OF_KEYS,
}
"""Of the front, beside those of each model."""
_OF_MODELS = ("tgi_key_requests", "tgi_key_tokens")
_SERIES = re.compile(rb"([a-zA-Z_:][a-zA-Z0-9_:]*)(\{)?(.*)", re.DOTALL)


class FrontMetrics(Metrics):
    """Counts what happens before a request is with its model."""

    def __init__(self) -> None:
        self._start(FRONT)
        self._set_edges("tgi_model_start_duration", [2.0**power for power in range(-2, 12)])
        # The models' routers count these themselves.
        self._declared = {name: one for name, one in FRONT.items() if name not in _OF_MODELS}

    def count_starts(self, name: str, num_loaded: int, num_failed: int, took_s: float) -> None:
        """Count what the launcher says has happened."""
        self.count("tgi_model_starts", num_loaded, model=name, outcome="loaded")
        self.count("tgi_model_starts", num_failed, model=name, outcome="failed")
        if num_loaded:
            self.observe("tgi_model_start_duration", took_s, model=name)

    def set_states(self, states: Sequence[str]) -> None:
        for state in _STATES:
            self.gauge("tgi_models", states.count(state), state=state)

    def set_waiting(self, name: str, num_waiting: int) -> None:
        self.gauge("tgi_model_requests_waiting", num_waiting, model=name)


def merged(own: bytes, texts: Mapping[str, bytes]) -> bytes:
    """Return one text of the front's metrics and of each model's, whose series get the label `model`."""
    heads: dict[bytes, list[bytes]] = {}
    lines: dict[bytes, list[bytes]] = {}
    for name, text in (("", own), *texts.items()):
        label = b'model="%b"' % _escaped(name)
        family, is_new = b"", True
        heads.setdefault(family, [])
        lines.setdefault(family, [])
        for line in text.split(b"\n"):
            if line.startswith(b"# HELP "):
                family = line.split(b" ", 3)[2]
                is_new = family not in heads
                heads.setdefault(family, [])
                lines.setdefault(family, [])
            if line.startswith(b"#"):
                heads[family] += [line] if is_new else []
            elif line:
                lines[family].append(_labelled(line, label) if name else line)
    parts = [b"\n".join([*heads[family], *lines[family], b""]) for family in heads]
    return b"\n".join(filter(None, parts))


def _labelled(line: bytes, label: bytes) -> bytes:
    found = _SERIES.fullmatch(line)
    if found is None:
        return line
    name, has_labels, rest = found.groups()
    return b"%b{%b,%b" % (name, label, rest) if has_labels else b"%b{%b}%b" % (name, label, rest)


def _escaped(name: str) -> bytes:
    return shown(name).replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ").encode()
