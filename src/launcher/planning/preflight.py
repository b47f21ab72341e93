"""What can be known to fail is refused here, in a second, before anything is downloaded or loaded.

Finds the addresses of this launch: the HTTP port, the rendezvous port, the place of the shards' sockets.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import ipaddress
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from launcher.config import LauncherConfig
from launcher.config import http_port as asked_http_port
from launcher.errors import ArgumentValidation
from launcher.planning.hardware import Hardware
from launcher.planning.model_info import ModelInfo
from launcher.planning.plan import DEFAULT_MASTER_PORT

logger = logging.getLogger("text_generation_launcher")

_LONGEST_SOCKET_PATH = 107
_RANK_DIGITS = 5
LOOPBACK = "127.0.0.1"


def check_memory(model_id: str, hardware: Hardware, info: ModelInfo | None, num_shard: int) -> None:
    """Refuses weights that cannot fit whatever their type will be. Raises ArgumentValidation.

    A file may shrink on loading by half at most, when float32 is kept as two bytes.
    """
    size = info.weight_bytes if info else None
    if size is None:
        return
    sizes = [gpu.memory_mib for gpu in hardware.gpus[:num_shard]]
    if sizes and all(sizes):
        available, where = sum(mib or 0 for mib in sizes) << 20, f"{len(sizes)} GPUs"
        remedy = "use more GPUs (`--num-shard`) or a smaller model"
    elif not hardware.gpus and hardware.memory_bytes:
        available, where, remedy = hardware.memory_bytes, "this machine", "use a smaller model"
    else:
        return
    if size // 2 > available:
        raise ArgumentValidation(
            f"`--model-id` {model_id} has {size / 2**30:.1f} GiB of weights, which cannot fit in the "
            f"{available / 2**30:.1f} GiB of {where}; {remedy}"
        )


def is_ip_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def listening_address(config: LauncherConfig) -> str:
    """`--hostname` as an IP address. Raises ArgumentValidation if the name has none."""
    if is_ip_address(config.hostname):
        return config.hostname
    try:
        return str(socket.getaddrinfo(config.hostname, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):
        raise ArgumentValidation(f"`--hostname` {config.hostname} is neither an IP address nor a known name") from None


def http_port(config: LauncherConfig, address: str) -> int:
    """The port that was asked for, or a free one for 0. Raises ArgumentValidation if it cannot be bound."""
    flag, port = asked_http_port(config)
    return _bindable(flag, address, port)


def without_busy_metrics_port(config: LauncherConfig, address: str) -> LauncherConfig:
    """`config`, without a second port for metrics that cannot be had: they are on the HTTP port anyway."""
    if not config.prometheus_port:
        return config
    try:
        _bindable("--prometheus-port", address, config.prometheus_port)
    except ArgumentValidation as error:
        logger.warning("%s; going on without it, /metrics is on the HTTP port too", error)
        return dataclasses.replace(config, prometheus_port=None)
    return config


def _bindable(flag: str, address: str, port: int) -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As the HTTP server does: a port whose last connections are still closing is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
            probe.listen(1)
        except OSError as error:
            reason = {
                errno.EADDRINUSE: "is in use by another process; choose another",
                errno.EACCES: "needs privileges; choose one above 1023",
                errno.EADDRNOTAVAIL: f"cannot be opened: this machine has no address {address} (`--hostname`)",
            }.get(error.errno or 0, f"cannot be opened: {error.strerror}")
            raise ArgumentValidation(f"`{flag}` {port} {reason}") from None
        return int(probe.getsockname()[1])


def rendezvous_port(config: LauncherConfig, num_shard: int) -> int:
    """Where the ranks meet: the operator's port, else TGI's default if it is free, else a free one."""
    if num_shard == 1 or config.master_addr not in ("localhost", LOOPBACK):
        return config.master_port if config.master_port is not None else DEFAULT_MASTER_PORT
    if config.master_port is not None:
        return _bindable("--master-port", LOOPBACK, config.master_port)
    try:
        return _bindable("--master-port", LOOPBACK, DEFAULT_MASTER_PORT)
    except ArgumentValidation:
        return _bindable("--master-port", LOOPBACK, 0)


@contextmanager
def socket_prefix(config: LauncherConfig, num_shard: int, environ: Mapping[str, str]) -> Iterator[str]:
    """The prefix of the shards' sockets, ours alone until the end of the block.

    Not given: in a directory that only we may enter, removed at the end. Given: locked, so that a second launch on the
    same path is refused; dead sockets there are replaced, live ones never.
    """
    if config.shard_uds_path is None:
        with private_directory(environ) as directory:
            yield str(directory / "shard")
        return
    prefix = os.path.abspath(config.shard_uds_path)
    if len(os.fsencode(prefix)) + 1 + _RANK_DIGITS > _LONGEST_SOCKET_PATH:
        raise ArgumentValidation(f"`--shard-uds-path` {prefix} is too long for a socket; use a shorter path")
    with _locked(prefix):
        for rank in range(num_shard):
            _clear_dead_socket(f"{prefix}-{rank}")
        try:
            yield prefix
        finally:
            for rank in range(num_shard):
                Path(f"{prefix}-{rank}").unlink(missing_ok=True)


@contextmanager
def private_directory(environ: Mapping[str, str]) -> Iterator[Path]:
    # Not under TMPDIR: that may be too deep for a socket path.
    directory = _made_in(["/tmp", environ.get("TMPDIR") or "/var/tmp", "/dev/shm"])
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _made_in(folders: list[str]) -> Path:
    """A new private folder in the first of these that takes one. Raises ArgumentValidation if none does."""
    reasons = []
    for folder in folders:
        try:
            directory = Path(tempfile.mkdtemp(prefix="tercet-", dir=folder))
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror}")
            continue
        if len(os.fsencode(directory)) + len("/shard-") + _RANK_DIGITS <= _LONGEST_SOCKET_PATH:
            return directory
        directory.rmdir()
        reasons.append(f"{folder}: too long for a socket")
    raise ArgumentValidation(
        f"no folder for the shards' sockets ({'; '.join(reasons)}); make /tmp writable or give `--shard-uds-path`"
    )


@contextmanager
def _locked(prefix: str) -> Iterator[None]:
    path = f"{prefix}.lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ArgumentValidation(f"`--shard-uds-path` {prefix} cannot be used: {error.strerror} ({path})") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.read(descriptor, 32).decode("ascii", "replace").strip() or "unknown"
            raise ArgumentValidation(
                f"`--shard-uds-path` {prefix} is in use by the launcher with pid {owner}; give each its own path"
            ) from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        yield
    finally:
        # The file stays: removing it would let two launches hold locks on two files of one name.
        os.close(descriptor)


def _clear_dead_socket(path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            Path(path).unlink(missing_ok=True)
            return
        except OSError as error:
            raise ArgumentValidation(f"`--shard-uds-path`: {path} cannot be used: {error}") from None
    raise ArgumentValidation(f"`--shard-uds-path`: a process is listening on {path}; give this launch another path")
