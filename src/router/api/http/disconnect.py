"""Notices disconnected clients, which the framework does for streams only."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect

T = TypeVar("T")
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


async def left(receive: Receive) -> None:
    """Return when the client has disconnected, after the whole body."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return `work`'s result, or cancel it and raise ClientDisconnect."""
    me = asyncio.current_task()
    assert me is not None
    is_over = has_left = False

    def client_left(gone: asyncio.Future[None]) -> None:
        nonlocal has_left
        if not is_over:  # so this task waits for `work`, and that is what is cancelled
            has_left = True
            me.cancel()

    gone = asyncio.ensure_future(left(receive))
    gone.add_done_callback(client_left)
    try:
        return await work
    except asyncio.CancelledError:
        if has_left and me.uncancel() == 0:
            raise ClientDisconnect from None
        raise
    finally:
        is_over = True
        gone.cancel()
