"""Which files of tests go to one process: those that ask the same server, so that it is started once in a run."""

from __future__ import annotations

import functools
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
SERVERS = ("server", "llama_server", "scripted")
"""Fixtures of a session, each in the conftest.py of the folder whose files ask for it."""


@functools.cache
def scope_of(file: str) -> str:
    """Return the name of the group to which a file belongs: the server that it shares, else its own name.

    Args:
        file: As in the name of a test, from the folder above `tests` on.
    """
    path = TESTS.parent / file
    if not path.is_file():
        return file
    text = path.read_text()
    for folder in path.parents[: len(Path(file).parents) - 1]:
        conftest = folder / "conftest.py"
        shared = conftest.read_text() if conftest.is_file() else ""
        for server in SERVERS:
            if _is_made_once(server, shared) and any(_asks(text, name) for name in (server, *_users(server, shared))):
                return f"{conftest.relative_to(TESTS.parent)}::{server}"
    return file


def _is_made_once(server: str, conftest: str) -> bool:
    return f'@pytest.fixture(scope="session")\ndef {server}(' in conftest


def _users(server: str, conftest: str) -> list[str]:
    """Return the fixtures of a conftest.py that ask for its server."""
    return re.findall(rf"^@pytest\.fixture.*\ndef (\w+)\([^)]*\b{server}:", conftest, re.MULTILINE)


def _asks(text: str, fixture: str) -> bool:
    """Whether a test or a fixture asks for this one, and the file has none of its own with the name."""
    asked = re.search(
        rf"^(?:(?:async )?def test_\w+|@pytest\.fixture.*\ndef \w+)\([^)]*\b{fixture}:", text, re.MULTILINE
    )
    return asked is not None and re.search(rf"^def {fixture}\(", text, re.MULTILINE) is None
