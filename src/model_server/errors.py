"""The model server's exceptions.

ModelServerError
├── RequestError          the call is invalid; the shard continues
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
    """Base of everything the model server raises on purpose."""


def public_text(error: BaseException) -> str:
    """What the router may pass on to a client: our own words on what a call asked for.

    What ends the process, and what torch, gloo or anything else says, may name paths and addresses: that is for the
    log, to which the caller writes it.
    """
    if isinstance(error, ModelServerError) and not isinstance(error, FatalError):
        return str(error)
    return "the model server failed; its log says why"


class RequestError(ModelServerError):
    """The call asks for something that cannot be done. Batches that it named may be lost (`BatchStore`)."""


class BatchGoneError(RequestError):
    """The batch was lost to an error that has already been reported."""

    def __init__(self, batch_id: int) -> None:
        super().__init__(f"Batch ID {batch_id} is gone: an earlier step of it failed.")


class StepFailedError(ModelServerError):
    """Another stage of the pipeline failed in this step, with this text."""


class OutOfMemoryError(ModelServerError):
    """The device ran out of memory in one step."""


class StartupError(ModelServerError):
    """Start-up is not possible; `str(error)` is the one line the user sees."""


class MissingPeerError(StartupError):
    """Names the ranks that this one has waited for in vain."""


class WarmUpMemoryError(StartupError):
    """Every rank says so, and is ready for another warm-up."""


class FatalError(ModelServerError):
    """The process must end; the launcher decides what follows."""


class LostPeerError(FatalError):
    """Never the cause: the rank that is named in it is, or has said why it left."""


def parts_ranks(error: BaseException) -> bool:
    """Whether a call failed for lack of something that only this rank lacks: the others have continued without it.

    Other exceptions come of what is asked, which is the same everywhere: the call fails alike on all ranks.
    """
    return isinstance(error, (MemoryError, OSError))
