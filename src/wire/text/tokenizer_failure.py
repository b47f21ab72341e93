"""What the tokenizers library raises: bare Exception, or a panic of its Rust code, which is not an Exception."""

from __future__ import annotations


def reason_of(error: BaseException) -> str:
    """One line of what failed inside the library, for a regular expression that gave up and the like.

    Raises `error` again if the library did not raise it: an interrupt, or the end of the process.
    """
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
    return " ".join(str(error).split()) or type(error).__name__
