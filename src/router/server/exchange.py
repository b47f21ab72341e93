"""What a client sends and gets, for the request log."""

from __future__ import annotations

from typing import Any

from starlette.types import Message, Receive, Send


class Exchange:
    """The body and the answer of a request, as they pass."""

    __slots__ = ("_answer", "_body", "num_bytes")

    def __init__(self) -> None:
        self._body: list[bytes] = []
        self._answer: list[bytes] = []
        self.num_bytes = 0

    def receiving(self, receive: Receive) -> Receive:
        """Return `receive`, listened to."""

        async def receive_and_keep() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                self._keep(self._body, message)
            return message

        return receive_and_keep

    def sending(self, send: Send) -> Send:
        """Return `send`, listened to."""

        async def send_and_keep(message: Message) -> None:
            if message["type"] == "http.response.body":
                self._keep(self._answer, message)
            await send(message)

        return send_and_keep

    def _keep(self, pieces: list[bytes], message: Message) -> None:
        if piece := message.get("body", b""):
            pieces.append(piece)
            self.num_bytes += len(piece)

    def fields(self) -> dict[str, Any]:
        """Return both as texts: to read their JSON again would take the interpreter from the event loop."""
        body, answer = (b"".join(pieces).decode(errors="replace") for pieces in (self._body, self._answer))
        return {"body": body, "answer": answer}
