"""The server that a benchmark measures."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time

import uvloop

from launcher.bench.apis import Sampling, TgiApi
from launcher.bench.load import Load, Target
from launcher.bench.results import Cell

# The last lines of the launcher that are shown when it does not start.
LOG_BYTES = 3000


class Server:
    """The launcher as a child process on a port of its own."""

    def __init__(
        self, port: int, dtype: str, *, model: str = "demo", arguments: tuple[str, ...] = (), **environ: str
    ) -> None:
        """arguments: further ones of the launcher; environ: variables beside those of this process.

        Returns when the server listens. Raises SystemExit with the launcher's last words if it ends.
        """
        self.url = f"http://127.0.0.1:{port}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # open while the server runs
        started = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "launcher", "--model-id", model, "--hostname", "127.0.0.1", "--port", str(port),
             "--dtype", dtype, *arguments],
            stdin=subprocess.DEVNULL, stdout=self._log, env=os.environ | environ,
        )  # fmt: skip
        try:
            uvloop.run(self._until_ready())
        except BaseException:
            if self.process.poll() is None:
                self.stop()
            raise
        self.start_s = time.perf_counter() - started

    async def _until_ready(self) -> None:
        port = int(self.url.rsplit(":", 1)[1])
        while self.process.poll() is None:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.02)
                continue
            writer.close()
            return
        raise SystemExit(f"the launcher ended with status {self.process.returncode}: {self.last_words()}")

    def last_words(self) -> str:
        """The end of what the launcher wrote."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - LOG_BYTES))
        return self._log.read().decode(errors="replace")

    def stop(self, timeout_s: float = 30) -> int:
        """Ask it to end; its exit status. Killed, with an exception, if it does not."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()  # its guard ends what it has started
            self.process.wait()
            raise


def closed_cell(url: str, prompts: list[str], concurrency: int, num_tokens: int) -> Cell:
    """Greedy answers of exactly `num_tokens` to all prompts, by `concurrency` clients of /generate_stream."""
    target = Target(url=url, api=TgiApi(Sampling(None, ignore_eos=True)))
    return uvloop.run(Load(target, num_tokens).closed(prompts, concurrency))
