"""Keeps children from outliving the launcher. Run as a script by a bare interpreter: standard library only.

- `parent_watchdog.py exec PARENT argv...` has the kernel kill this process with its parent, then becomes `argv`. -
`parent_watchdog.py guard` waits for the end of standard input, then kills groups and removes directories.

Both are needed: the kernel's signal misses the child's children, and the guard may be killed.
"""

import contextlib
import os
import shutil
import signal
import sys
import time


def become(parent: int, argv: list[str]) -> None:
    """Never returns. The signal follows the parent *thread*: the launcher starts children from its main thread."""
    import ctypes

    pr_set_pdeathsig = 1
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # It exited before the request was made.
        os._exit(1)
    # Launchers ask for stacks by it (wire.processes.stack_dump), whose default kills a child that does not listen yet.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.stderr.write(f"{argv[0]}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(127)


def guard() -> None:
    """Reads `watch GROUP`, `forget GROUP` and `remove DIRECTORY`, one per line."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    groups: set[int] = set()
    directories: list[str] = []
    for line in sys.stdin:
        verb, _, value = line.rstrip("\n").partition(" ")
        if verb == "watch":
            groups.add(int(value))
        elif verb == "forget":
            groups.discard(int(value))
        elif verb == "remove":
            directories.append(value)
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    for directory in directories:
        remove(directory)


def remove(directory: str) -> None:
    """Some times over: a child that has been killed may still be making its socket there."""
    for _ in range(50):
        shutil.rmtree(directory, ignore_errors=True)
        if not os.path.lexists(directory):
            return
        time.sleep(0.1)


if __name__ == "__main__":
    if sys.argv[1] == "exec":
        become(int(sys.argv[2]), sys.argv[3:])
    else:
        guard()
