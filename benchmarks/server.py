"""The server that a benchmark measures."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time


class Server:
    """The launcher as a child process on a port of its own."""

    def __init__(self, port: int, dtype: str, **environ: str) -> None:
        """environ: variables beside those of this process. Returns when the server listens."""
        self.url = f"http://127.0.0.1:{port}"
        started = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "launcher", "--model-id", "demo", "--hostname", "127.0.0.1", "--port", str(port),
             "--dtype", dtype],
            stdout=subprocess.DEVNULL, env=os.environ | environ,
        )  # fmt: skip
        asyncio.run(self._until_ready())
        self.start_s = time.perf_counter() - started

    async def _until_ready(self) -> None:
        port = int(self.url.rsplit(":", 1)[1])
        while self._process.poll() is None:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.02)
                continue
            writer.close()
            return
        raise SystemExit(f"the launcher ended with status {self._process.returncode}")

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(30)
