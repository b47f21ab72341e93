"""Which child failed first, and how its failure is reported."""

from __future__ import annotations

import logging
import signal

from launcher.processes.child import Child, Exit
from wire.exit_status import LOST_PEER, MISSING_PEER
from wire.log import console

logger = logging.getLogger("text_generation_launcher")


def exit_of(child: Child) -> Exit:
    assert child.exit is not None
    return child.exit


def blame_order(child: Child) -> int:
    """Sort ended children: a killed one, one that gave up, a shard that lost another."""
    end = exit_of(child)
    return 0 if end.is_signal else {MISSING_PEER: 2, LOST_PEER: 3}.get(end.returncode, 1)


def headline(child: Child, verb: str = "crashed") -> str:
    """TGI's words."""
    return "Webserver Crashed" if child.command.rank is None else f"Shard {child.command.rank} {verb}"


def cause(child: Child) -> str:
    said = child.logs.last_error.strip().partition("\n")[0]
    if not said and not exit_of(child).is_signal:
        said = child.logs.errors.last.strip()
    return f"{child.title} {exit_of(child)}" + (f": {said}" if said else "")


def is_orderly(end: Exit) -> bool:
    """Whether a shard's exit during a stop is a failure: service managers signal every process."""
    return end.returncode in (0, -signal.SIGTERM, 128 + signal.SIGTERM)


def rank_field(child: Child) -> dict[str, int | str]:
    command = child.command
    fields: dict[str, int | str] = {} if command.rank is None else {"rank": command.rank}
    return fields | ({"model": command.model} if command.model else {})


def report_crash(child: Child, headline: str) -> None:
    """For the log; a short one leaves it out, since the launch's own error follows."""
    for index, text in enumerate(child.logs.errors.chunks()):
        title = f"{child.command.name.capitalize()} complete standard error output:" if not index else "..."
        logger.error("%s\n%s", title, text, extra=rank_field(child) | {console.ATTRIBUTE: False})
    logger.error("%s: %s", headline, exit_of(child), extra=rank_field(child) | {console.ATTRIBUTE: False})
