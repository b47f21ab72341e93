"""What a fake shard checks about KV blocks, and the memory that they stand for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence


class BlockWatch:
    """Who may write which KV block, and from when on a block may be given to somebody else."""

    def __init__(self, violations: list[str]) -> None:
        self._violations = violations
        self._owners: dict[int, set[int]] = {}  # block -> requests
        self._forbidden: dict[int, set[int]] = {}  # block -> calls that must be answered before it is used again

    def take(self, name: str, request_id: int, blocks: Iterable[int], shared: Collection[int] = ()) -> None:
        """`shared`: blocks that hold a prompt's beginning already."""
        for block in blocks:
            owners = self._owners.setdefault(block, set())
            if block == 0 or (owners and block not in shared):
                self._violations.append(f"{name}: block {block} is reserved or in use")
            owners.add(request_id)

    def release(self, request_id: int, blocks: Iterable[int], pending: Iterable[int]) -> None:
        """The shard has forgotten the request."""
        blocks = list(blocks)
        for block in blocks:
            self._owners.get(block, set()).discard(request_id)
        self.forbid(blocks, pending)

    def forbid(self, blocks: Iterable[int], pending: Iterable[int]) -> None:
        """The request has ended: until the calls in flight now are answered, nobody else may get its blocks."""
        for block in blocks:
            self._forbidden.setdefault(block, set()).update(pending)

    def check_reuse(self, blocks: Iterable[int], pending: Iterable[int]) -> None:
        """A call that gives these blocks to a request has arrived."""
        for block in blocks:
            unanswered = self._forbidden.pop(block, set()) & set(pending)
            if unanswered:
                self._violations.append(f"block {block} is reused while calls {unanswered} are in flight")


class KvMemory:
    """Which token every slot holds, so that a row that reads somebody else's is caught."""

    def __init__(self, violations: list[str]) -> None:
        self._violations = violations
        self._tokens: dict[int, int] = {}  # slot -> token id

    def step(self, name: str, ids: Sequence[int], slots: Sequence[int], start: int, end: int) -> None:
        """A row computes the positions start..end and reads all before them."""
        for position in range(start):
            held = self._tokens.get(slots[position])
            if held != ids[position]:
                self._violations.append(f"{name}: position {position} holds {held}, not {ids[position]}")
                break
        for position in range(start, end):
            self._tokens[slots[position]] = ids[position]
