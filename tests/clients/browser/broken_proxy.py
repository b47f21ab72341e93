"""A proxy on loopback that spoils answers, as what stands between a browser and a server can."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

SPOILED = b"<html><body>502 <b>Bad Gateway</b></body></html>"


class BrokenProxy(ThreadingHTTPServer):
    """Passes GET on. `how` says what becomes of POST: `cut` and `end` pass on `num_bytes` of the answer and break
    off when `break_off` is set, one without and one with a proper end; `gateway` is a 502 and `html` a 200 of somebody
    else; `pass` passes it on. Paths begin with `prefix`, which the server behind does not see."""

    daemon_threads = True

    def __init__(self, upstream: str, prefix: str = "") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = urlsplit(upstream).netloc
        self.prefix = prefix
        self.how = "pass"
        self.num_bytes = 2000
        self.break_off = threading.Event()
        self.connections: list[socket.socket] = []
        self.url = f"http://127.0.0.1:{self.server_port}{prefix}"

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        self.connections.append(connection)
        return connection, address


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: BrokenProxy

    def do_GET(self) -> None:
        self._pass_on(None)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.server.how in ("gateway", "html"):
            self.send_response(502 if self.server.how == "gateway" else 200)
            self.send_header("content-type", "text/html")
            self.send_header("content-length", str(len(SPOILED)))
            self.end_headers()
            self.wfile.write(SPOILED)
            return
        self._pass_on(body)

    def _pass_on(self, body: bytes | None) -> None:
        connection = http.client.HTTPConnection(self.server.upstream, timeout=60)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection")}
        connection.request(self.command, self.path.removeprefix(self.server.prefix), body, headers)
        answer = connection.getresponse()
        self.send_response(answer.status)
        for name in ("content-type", "content-security-policy"):
            if (value := answer.getheader(name)) is not None:
                self.send_header(name, value)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        breaks_off = body is not None and self.server.how in ("cut", "end")
        self._chunk(answer.read(self.server.num_bytes if breaks_off else None))
        if breaks_off:
            self.server.break_off.wait(60)
        if breaks_off and self.server.how == "cut":
            self.close_connection = True
        else:
            self.wfile.write(b"0\r\n\r\n")
        connection.close()

    def _chunk(self, data: bytes) -> None:
        if data:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
            self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:
        """Not on the test's output."""


@contextlib.contextmanager
def broken_proxy(upstream: str, prefix: str = "") -> Iterator[BrokenProxy]:
    with BrokenProxy(upstream, prefix) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
            thread.join()
            for connection in proxy.connections:  # the idle ones too: nothing answers any more
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
