"""`launcher keys`: makes a key, and its row for the file."""

from __future__ import annotations

import sys

from launcher.keys.config import KeysConfig
from wire.keys import check_name, new_key
from wire.text.escape import as_error


def run_keys(config: KeysConfig) -> int:
    """Print the row on standard output, for `>>`, and the key, which is kept nowhere, on standard error."""
    try:
        name = check_name(config.name)
    except ValueError as error:
        sys.stderr.write(as_error(f"the name {error}") + "\n")
        return 1
    key, hashed = new_key()
    sys.stdout.write(f"- name: {name}\n  hash: {hashed}\n")
    sys.stderr.write(f"The key of {name}, which is shown only now: {key}\n")
    return 0
