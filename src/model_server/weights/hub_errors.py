"""huggingface_hub's errors as one line on what to do, and whether to retry."""

from __future__ import annotations

import errno
from typing import Any

from model_server.errors import StartupError

# These say something of this machine, whatever the library makes of them; any other OSError is the network's.
_OF_THE_DISK = frozenset(
    {
        errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR,
        errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENAMETOOLONG, errno.ELOOP,
    }
)  # fmt: skip
_LONGEST_WAIT_S = 300.0


class Unreachable(Exception):
    """The network failed; retry after `wait_s`, if said."""

    def __init__(self, reason: str, *, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class Refused(StartupError):
    """The hub's final answer: unknown, private, gated."""


class NotAnId(StartupError):
    """The given text can name no model."""


class translated:
    """Turn huggingface_hub's exceptions into ours inside, except disk errors."""

    def __init__(self, model_id: str, revision: str | None) -> None:
        self._model_id, self._revision = model_id, revision

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, StartupError | Unreachable):
            return
        from huggingface_hub import errors

        if isinstance(error, errors.HFValidationError):
            raise NotAnId(f"--model-id {self._model_id}: neither a directory nor a hub id (OWNER/NAME)") from error
        if isinstance(error, UnicodeEncodeError):  # of a header, which holds nothing else of this machine
            raise Refused(
                f"--model-id {self._model_id}: the token (HF_TOKEN) has letters that no token has: copy it again"
            ) from error
        if isinstance(error, OSError) and error.errno in _OF_THE_DISK:
            return
        cause = _of_the_hub(error)
        if cause is not None:
            self._raise_for_answer(cause)
        # The transport's own errors have the base that the hub's HTTP error has; its package changes with versions.
        if isinstance(error, (OSError, *errors.HfHubHTTPError.__bases__)):
            raise Unreachable(_reason(error)) from error

    def _raise_for_answer(self, error: Any) -> None:
        """Raise Refused for final answers, else Unreachable."""
        from huggingface_hub import errors

        name, status = self._model_id, error.response.status_code
        where = f"--model-id {name}"
        if isinstance(error, errors.GatedRepoError):
            raise Refused(f"{where}: {self._gated(status)}") from error
        if isinstance(error, errors.RevisionNotFoundError):
            raise Refused(
                f"{where}: the repository has no revision {self._revision!r}; --revision takes a branch, a tag or a "
                "full commit"
            ) from error
        if isinstance(error, errors.RepositoryNotFoundError):
            raise Refused(f"{where}: {_unknown()}") from error
        if status == 401:
            raise Refused(f"{where}: the hub does not accept the token (HF_TOKEN): expired or mistyped") from error
        if status == 403:
            message = " ".join((error.response.headers.get("X-Error-Message") or "no reason given").split())[:200]
            raise Refused(
                f"{where}: the hub refuses access ({message}); does the token (HF_TOKEN) allow it?"
            ) from error
        if isinstance(error, errors.EntryNotFoundError):
            raise Refused(f"{where}: the repository has changed while it was read; try again") from error
        if status == 429:
            advice = "" if _has_token() else "; with a token (HF_TOKEN) the limit is higher"
            reason = f"the hub's rate limit is reached (HTTP 429){advice}"
            raise Unreachable(reason, wait_s=_retry_after(error.response.headers)) from error
        if status < 500 and status != 408:
            raise Refused(f"{where}: the hub answered HTTP {status}") from error
        raise Unreachable(f"the hub answered HTTP {status}", wait_s=_retry_after(error.response.headers)) from error

    def _gated(self, status: int) -> str:
        from huggingface_hub import constants

        page = f"{constants.ENDPOINT}/{self._model_id}"
        if status == 401 or not _has_token():
            return f"access is gated: accept its licence at {page}, then set HF_TOKEN to a token of that account"
        return f"access is gated, and the account of HF_TOKEN has none: accept the licence at {page}, or wait for it"


def _of_the_hub(error: BaseException) -> Any:
    """Find the hub's answer, perhaps hidden behind "not in the cache"."""
    from huggingface_hub import errors

    seen: BaseException | None = error
    for _ in range(8):
        if isinstance(seen, errors.HfHubHTTPError) and getattr(seen, "response", None) is not None:
            return seen
        seen = None if seen is None else seen.__cause__ or seen.__context__
    return None


def _unknown() -> str:
    if _has_token():
        return "the hub has no such model, or it is private and the token (HF_TOKEN) may not read it: check the id"
    return "the hub has no such model, or it is private: check the id; for a private one set HF_TOKEN"


def _has_token() -> bool:
    from huggingface_hub import get_token

    return get_token() is not None


def _retry_after(headers: Any) -> float | None:
    """Return the seconds; hubs use no dates."""
    text = str(headers.get("Retry-After") or "")
    return min(float(text), _LONGEST_WAIT_S) if text.isdecimal() else None


def _reason(error: BaseException) -> str:
    from huggingface_hub import constants

    names = {cls.__name__ for cls in type(error).__mro__}
    if "ReadTimeout" in names:
        return f"not a byte for {constants.HF_HUB_DOWNLOAD_TIMEOUT} s"
    first = (str(error).strip().splitlines() or [""])[0]
    return first or type(error).__name__
