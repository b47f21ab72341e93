"""The image's health check: exit 0 if /health answers 200, else 1 with the reason in one line.

The port is the launcher's: its flag on the command line of the first process, else the variables, else the default.
"""

from __future__ import annotations

import http.client
import os
import ssl
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

FIRST_PROCESS = Path("/proc/1/cmdline")
TIMEOUT_S = 8.0
DEFAULT_PORT = "3000"
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def flag(argv: Sequence[str], *names: str) -> str | None:
    """The value of an option, as `--name value` or `--name=value`."""
    for index, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name in names:
            return value if equals else next(iter(argv[index + 1 :]), None)
    return None


def address(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[str, int]:
    """Where the server listens. Raises ValueError if the port is no number."""
    host = flag(argv, "--hostname") or "0.0.0.0"
    port = environ.get("AIP_HTTP_PORT") or flag(argv, "--port", "-p") or environ.get("PORT") or DEFAULT_PORT
    return _ANY_ADDRESS.get(host, host), int(flag(argv, "--aip-http-port") or port)


def main() -> int:
    try:
        argv = FIRST_PROCESS.read_text(errors="replace").split("\0")
        host, port = address(argv, os.environ)
        connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
        if flag(argv, "--ssl-certfile") or os.environ.get("SSL_CERTFILE"):
            # The certificate is for the names that clients use, not for this address.
            context = ssl._create_unverified_context()
            connection = http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=context)
        connection.request("GET", "/health")
        status = connection.getresponse().status
    except (OSError, ValueError, http.client.HTTPException) as error:
        sys.stderr.write(f"no answer: {error}\n")
        return 1
    if status != http.client.OK:
        sys.stderr.write(f"status {status}\n")
    return 0 if status == http.client.OK else 1


if __name__ == "__main__":
    sys.exit(main())
