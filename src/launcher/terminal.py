"""What a terminal shows of a launch: a line for each starting child, then what is served."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.command import connection_to, unix_path
from wire.log.console import Console

_REDRAW_S = 0.1
_INFO_TIMEOUT_S, _METRICS_TIMEOUT_S = 2.0, 0.5
_FEW_RANKS = 4
_NAME_WIDTH = 10


class Terminal:
    """Prints lasting lines with `say`, and replaced ones with `show_starting`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._drawn: set[str] = set()
        self._drawn_at = 0.0

    def say(self, text: str) -> None:
        self._console.say(text)

    def show_starting(self, children: Sequence[tuple[str, str]], *, of: int) -> None:
        """Show name and phase of the children that are not ready, shortened to fit the screen."""
        if children and time.monotonic() - self._drawn_at < _REDRAW_S:
            return
        self._drawn_at = time.monotonic()
        most = _FEW_RANKS + of // 2
        wanted = {f"{index:4}": f"{name:<{_NAME_WIDTH}} {phase}" for index, (name, phase) in enumerate(children[:most])}
        if len(children) > most:
            wanted["more"] = f"{'':<{_NAME_WIDTH}} and {len(children) - most} more that are not ready"
        for key in self._drawn - wanted.keys():
            self._console.lines.remove(key)
        for key, text in wanted.items():
            self._console.lines.show(key, text)
        self._drawn = set(wanted)

    def show_serving(self, rows: Sequence[tuple[str, str]]) -> None:
        """The end of the start: from now on children's errors are shown as they come."""
        self.show_starting([], of=0)
        self._console.filter.is_starting = False
        for name, value in rows:
            self.say(f"{name:<{_NAME_WIDTH}} {value}")


def info_of(url: str) -> Mapping[str, Any]:
    """What the router's /info answers; empty where it does not."""
    try:
        answer = json.loads(_get(url, "/info", _INFO_TIMEOUT_S))
    except (OSError, ValueError, http.client.HTTPException):
        return {}
    return answer if isinstance(answer, dict) else {}


def unfinished_requests(url: str) -> int | None:
    """How many requests the router runs or has queued; None where it does not say."""
    try:
        counts = re.findall(
            rb"^tgi_(?:queue|batch_current)_size (\d+)", _get(url, "/metrics", _METRICS_TIMEOUT_S), re.M
        )
    except (OSError, http.client.HTTPException):
        return None
    return sum(map(int, counts)) if counts else None


def _get(url: str, path: str, timeout_s: float) -> bytes:
    """Raises OSError or HTTPException."""
    with contextlib.closing(connection_to(url, timeout_s)) as connection:
        connection.request("GET", path)
        return connection.getresponse().read()


_ASKED = {
    "generate": ("/generate", '{"inputs": "Hello"}'),
    "embed": ("/embed", '{"inputs": "Hello"}'),
    "rerank": ("/rerank", '{"query": "Hello", "texts": ["Good morning"]}'),
    "classify": ("/predict", '{"inputs": "Hello"}'),
}


def how_to_ask(
    url: str, *, has_page: bool, needs_key: bool, model: str = "", task: str = "generate"
) -> list[tuple[str, str]]:
    """Address, page, a request to copy (to one of several models), and whether it needs a key."""
    route, asked = _ASKED.get(task, _ASKED["generate"])
    route = f"/models/{model}{route}" if model else route
    has_page = has_page and task == "generate"
    header = " -H 'authorization: Bearer YOUR_KEY'" if needs_key else ""
    body = f"-H 'content-type: application/json' -d '{asked}'"
    socket = unix_path(url)
    if socket is not None:
        url, has_page = "http://localhost", False
    where = "" if socket is None else f"--unix-socket {socket} "
    return [
        ("address", (socket or url) + (" (in a browser: a page to try the model)" if has_page else "")),
        ("try", f"curl {where}{'-k ' if url.startswith('https') else ''}{url}{route}{header} {body}"),
        (
            "key",
            "required: that of --api-key, or one of --keys-file" if needs_key else "not required (--api-key sets one)",
        ),
    ]
