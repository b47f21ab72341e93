"""The server under attack: every bound is small, so that each is reached."""

from __future__ import annotations

import contextlib
import ssl
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import trustme
from hostile import loop_watch
from hostile.punctual import ARRIVAL_S, PunctualTransport
from support.launched import sabotaged
from support.running_server import RunningServer, free_port, running_server

KEY = "key-marker-5b1f0c"
"""In every request; never in an answer or in the log."""
CONCURRENT = 96
ANSWER_LIMIT_S = 240.0
"""Longer means a hang."""
_OPTIONS = (
    "--api-key", KEY, "--dtype", "float32", "--max-concurrent-requests", str(CONCURRENT), "--max-total-tokens", "1600",
    "--max-input-tokens", "1000", "--max-batch-prefill-tokens", "1600", "--max-batch-total-tokens", "3200",
    "--response-store", "50",
)  # fmt: skip
_ENVIRON = {
    "HEAD_TIMEOUT_SECONDS": str(ARRIVAL_S),
    "BODY_TIMEOUT_SECONDS": str(ARRIVAL_S),
    "STALLED_CLIENT_SECONDS": "5",
    "MAX_UNREAD_BYTES": "100000",
    "KEEP_ALIVE_SECONDS": "10",
    "KSERVE_API": "true",
}


# A request that fits with 1024 new tokens reserves them all and is never preempted. With fewer, requests of some
# hundred tokens run out of blocks, many times a second.
_RESERVE_LESS = """
import sys
if "router" in sys.orig_argv:
    from router.scheduling.queue import request_queue
    request_queue.RESERVED_NEW_TOKENS = 64
"""


@dataclass(frozen=True)
class Target:
    """What an attack needs to know."""

    server: RunningServer
    image_port: int = 0
    """Of this machine, from which the server fetches images: an attack may listen there."""
    image_tls_port: int = 0
    image_tls: ssl.SSLContext | None = None
    """The same over TLS, with a certificate that the server trusts."""
    holds: Path | None = None
    """Where the router writes for how long its event loop was held."""

    @property
    def port(self) -> int:
        return self.server.port

    @property
    def raw_headers(self) -> str:
        """Of a request written by hand."""
        return f"authorization: Bearer {KEY}\r\n"

    def client(self) -> httpx.AsyncClient:
        """With as many connections as are asked for, none of them kept as long as the server keeps them."""
        limits = httpx.Limits(max_connections=None, keepalive_expiry=2.0)
        return httpx.AsyncClient(
            base_url=self.server.url,
            timeout=ANSWER_LIMIT_S,
            headers={"authorization": f"Bearer {KEY}"},
            transport=PunctualTransport(limits=limits),
        )


_TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)


@contextlib.contextmanager
def vision_target() -> Iterator[Target]:
    """A tiny model that reads images, sixteen tokens for each."""
    from support.vision_models import write_vision_checkpoint

    with tempfile.TemporaryDirectory(prefix="tercet-hostile-vision-") as name:
        folder = Path(name)
        write_vision_checkpoint(folder, "llava")
        (folder / "chat_template.jinja").write_text(_TEMPLATE)
        port, tls_port = free_port(), free_port()
        hosts = [f"--image-hosts=127.0.0.1:{one}" for one in (port, tls_port)]
        authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(context)
        authority.cert_pem.write_to_path(folder / "authority.pem")
        environ = _ENVIRON | _watched(folder) | {"SSL_CERT_FILE": str(folder / "authority.pem")}
        limits = ("--image-fetch-seconds", "5", "--image-cache-mib", "4")
        with running_server(folder, *_OPTIONS, *hosts, *limits, environ=environ) as server:
            yield Target(server, port, tls_port, context, loop_watch.file_in(folder))


@contextlib.contextmanager
def target() -> Iterator[Target]:
    """The demo model with a cache that four long answers fill."""
    with tempfile.TemporaryDirectory(prefix="tercet-hostile-") as folder:
        environ = _ENVIRON | _watched(Path(folder), _RESERVE_LESS)
        with running_server("demo", *_OPTIONS, environ=environ) as server:
            yield Target(server, holds=loop_watch.file_in(Path(folder)))


def _watched(folder: Path, code: str = "") -> dict[str, str]:
    """Variables with which the router writes down for how long its event loop was held, and runs the code."""
    watched = sabotaged(folder, Path(loop_watch.__file__).read_text() + code)
    return {**watched, loop_watch.VARIABLE: str(loop_watch.file_in(folder))}
