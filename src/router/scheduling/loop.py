"""The one task that calls the shards and delivers results. (Interface; the body follows.)

The scheduler counts `tgi_request_failure` with err="generation" and err="dropped"; every other request metric belongs
to the front desk.
"""

from __future__ import annotations

from router.request import ValidRequest
from router.scheduling.entry import Entry


class Scheduler:
    """Owns queue, blocks and the running batch.

    `run` is the one task. It returns after `drain` or `close`; if it had to give up, `failure` says why, every entry
    has got `Failed`, and the process should exit non-zero.
    """

    failure: Exception | None

    def submit(self, request: ValidRequest) -> Entry:
        """Queue a request. Never blocks; raises `UnhealthyError` if the loop has ended or is ending."""
        raise NotImplementedError

    async def run(self) -> None:
        """Serve until closed, drained or failed. Does not raise for failures: see `failure`."""
        raise NotImplementedError

    async def check_health(self) -> bool:
        """Whether the shards answer (and, after a failed generation, still generate); False if the loop is stuck."""
        raise NotImplementedError

    async def drain(self) -> None:
        """Refuse new requests, let the queued and running ones end, then end `run`."""
        raise NotImplementedError

    async def close(self) -> None:
        """End `run` now; whatever is left gets `Failed`."""
        raise NotImplementedError

    def can_ever_fit(self, input_length: int, max_new_tokens: int) -> bool:
        """Whether an otherwise idle server could run such a request; if not, validation answers 422."""
        raise NotImplementedError

    @property
    def estimated_wait_s(self) -> float:
        """For Retry-After: how long a request queued now would wait, from the observed drain of the queue."""
        raise NotImplementedError

    @property
    def queue_length(self) -> int:
        """Requests that wait for a batch."""
        raise NotImplementedError

    @property
    def num_running(self) -> int:
        """Requests in a batch."""
        raise NotImplementedError
