"""Names that no field has: misspelt ones are found, others ignored, logged once."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable

from router.errors import FieldError
from wire.cli.spelling import closest

logger = logging.getLogger(__name__)

# Names that differ more are other names: `top_a` is not `top_p`.
_LETTERS_PER_EDIT = 5
# What a client may make us do and remember: names of one body that are compared, and names that are logged in all.
_MOST_COMPARED = 64
_MOST_LOGGED = 256
# What a parameter can be called; anything else may be text of a prompt, and is neither compared nor logged.
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,39}")

OF_OTHER_SERVERS = frozenset({"context", "min_new_tokens", "mode", "models"})
"""Parameters of other servers that look like ours and mean something else: ignored as every unknown one."""

_logged: set[str] = set()


class UnknownNames:
    """One body's unknown names, and fields that it names as other servers do."""

    def __init__(self, renamed: dict[str, str] | None = None) -> None:
        # Of ours, the client's; filled in as the body is read.
        self.renamed = {} if renamed is None else renamed
        self._seen: set[tuple[frozenset[str], str]] = set()
        self.fault: FieldError | None = None
        """What is wrong with the first misspelt name."""

    def found(self, names: Iterable[str], known: frozenset[str], elsewhere: frozenset[str] = frozenset()) -> None:
        """Gather an object's names outside of `known`; `elsewhere` belong in `parameters`."""
        for name in names:
            if len(self._seen) >= _MOST_COMPARED or self.fault is not None:
                return
            if (known, name) in self._seen or not _NAME.fullmatch(name):
                continue
            self._seen.add((known, name))
            meant = None if name in OF_OTHER_SERVERS else closest(name, known, letters_per_edit=_LETTERS_PER_EDIT)
            if meant is None:
                _log_once(name, "; its place is in `parameters`" if name in elsewhere else "")
            else:
                text = f"unknown parameter `{name}`: did you mean `{meant}`?"
                self.fault = FieldError(text, param=name, reason="unknown_field")


def _log_once(name: str, hint: str) -> None:
    if name not in _logged and len(_logged) < _MOST_LOGGED:
        _logged.add(name)
        logger.info("unknown parameter `%s` of a request is ignored%s; each name is logged once", name, hint)
