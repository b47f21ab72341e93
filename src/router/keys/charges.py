"""Charges requests of batches to their API keys at the front, which they do not pass."""
# A model's router writes a line with the key's name; the front answers with the seconds to wait.

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from router.errors import RateLimitError
from router.keys.accounts import Accounts

logger = logging.getLogger(__name__)

_TIMEOUT_S = 10.0
_PAUSE_S = 1.0
"""Before a request is tried again whose front did not answer."""


async def wait_of(front: Path, name: str) -> float:
    """Charge a request to a key; return after how many seconds to try again, 0 if it is charged."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(front)
            try:
                writer.write(name.encode() + b"\n")
                return float(await reader.readline())
            finally:
                writer.close()
    except (OSError, ValueError) as error:
        logger.warning("the front does not answer for the key of a batch: %s", error)
        return _PAUSE_S


async def charging(path: Path, accounts: Accounts) -> asyncio.Server:
    """Answer the routers of all models; the server is to be closed."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            name = (await reader.readline()).decode().removesuffix("\n")
            writer.write(b"%g\n" % _charged(accounts, name))
            await writer.drain()
        except (OSError, ValueError):
            pass  # that router has ended
        finally:
            writer.close()

    return await asyncio.start_unix_server(answer, path)


def _charged(accounts: Accounts, name: str) -> float:
    account = accounts.named(name)
    if account is None:
        return 0.0  # a key that is gone: the model's router refuses the request
    try:
        account.admit(is_counted=False)
    except RateLimitError as error:
        return error.retry_after_s
    return 0.0
