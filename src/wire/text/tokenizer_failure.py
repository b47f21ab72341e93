"""What the tokenizers library raises: bare Exception, or Rust's panic."""

from __future__ import annotations


def reason_of(error: BaseException) -> str:
    """Return a failure's line, or raise `error` again if it is not the library's."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
    return " ".join(str(error).split()) or type(error).__name__
