"""How the launcher asks its own server."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

from launcher.command import connection_to, unix_path, unix_url, url_of


def test_a_url_is_of_a_port_or_of_a_unix_socket() -> None:
    assert unix_path(unix_url(Path("/run/x.sock"))) == "/run/x.sock"
    assert unix_path(url_of("::", 80, has_tls=True)) is None


def test_http_on_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    with socket.create_server(str(path), family=socket.AF_UNIX) as server:

        def answer() -> None:
            client, _ = server.accept()
            with client:
                client.recv(4096)
                client.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        connection = connection_to(unix_url(path), 20)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 204
        connection.close()
        thread.join()
