"""What a fake shard checks about KV blocks."""

from __future__ import annotations

from collections.abc import Iterable

from wire.v3 import generate_pb2 as pb


class BlockWatch:
    """Who may write which KV block, and from when on a block may be given to somebody else."""

    def __init__(self, violations: list[str]) -> None:
        self._violations = violations
        self._owners: dict[int, int] = {}  # block -> request
        self._forbidden: dict[int, set[int]] = {}  # block -> calls that must be answered before it is used again

    def take(self, name: str, request: pb.Request) -> None:
        for block in request.blocks:
            if block == 0 or block in self._owners:
                self._violations.append(f"{name}: block {block} is reserved or in use")
            self._owners[block] = request.id

    def release(self, request: pb.Request, pending: Iterable[int]) -> None:
        """The shard has forgotten the request."""
        for block in request.blocks:
            if self._owners.get(block) == request.id:
                del self._owners[block]
        self.forbid(request, pending)

    def forbid(self, request: pb.Request, pending: Iterable[int]) -> None:
        """The request has ended: until the calls in flight now are answered, nobody else may get its blocks."""
        for block in request.blocks:
            self._forbidden.setdefault(block, set()).update(pending)

    def check_reuse(self, request: pb.PrefillRequest, pending: Iterable[int]) -> None:
        """A Prefill has arrived."""
        for new in request.batch.requests:
            for block in new.blocks:
                unanswered = self._forbidden.pop(block, set()) & set(pending)
                if unanswered:
                    self._violations.append(f"block {block} is reused while calls {unanswered} are in flight")
