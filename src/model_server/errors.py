"""The model server's exceptions.

ModelServerError
├── RequestError          the call is invalid; the shard continues
│   ├── GrammarError          a request's grammar cannot be used, or takes too much time
│   └── BatchGoneError        a batch that was dropped because an earlier step of it failed
├── StepFailedError       another stage failed in a step; its batch is dropped, the shard continues
├── OutOfMemoryError      a step did not fit; its batch is dropped, the shard continues
├── StartupError          the shard cannot start; one line that names the cause and the flag to change
│   ├── MissingPeerError      another rank did not connect
│   └── WarmUpMemoryError     the warm-up needs too much memory; a smaller one may fit
└── FatalError            the shard cannot continue (device fault, broken call order); the process exits
    └── LostPeerError         another rank has exited, and this one exits because of that
"""

from __future__ import annotations


class ModelServerError(Exception):
    """Base of what the model server raises on purpose."""


def public_text(error: BaseException) -> str:
    """Return what a client may read: our words on its call."""
    # What ends the process, and what torch or gloo says, may name paths and addresses: that is for the log.
    if isinstance(error, ModelServerError) and not isinstance(error, FatalError):
        return str(error)
    return "the model server failed; its log says why"


class RequestError(ModelServerError):
    """The call cannot be done; batches that it named may be lost (`BatchStore`)."""


class GrammarError(RequestError):
    """A request's grammar is at fault, and so is the client."""


class BatchGoneError(RequestError):
    """The batch was lost to a reported error."""

    def __init__(self, batch_id: int) -> None:
        super().__init__(f"Batch ID {batch_id} is gone: an earlier step of it failed.")


class StepFailedError(ModelServerError):
    """Another stage failed in this step, with this text."""


class OutOfMemoryError(ModelServerError):
    """The device lacked memory in one step."""


class StartupError(ModelServerError):
    """The shard cannot start; `str(error)` is the line for the user."""


class MissingPeerError(StartupError):
    """Names ranks that did not come."""


class WarmUpMemoryError(StartupError):
    """Raised by every rank, ready for another warm-up."""


class FatalError(ModelServerError):
    """The process must end."""


class LostPeerError(FatalError):
    """Another rank, which it names, is the cause."""


def parts_ranks(error: BaseException) -> bool:
    """Whether a call failed on this rank alone, for lack of something."""
    # Other exceptions come of what is asked, and fail on all ranks alike.
    return isinstance(error, (MemoryError, OSError))
