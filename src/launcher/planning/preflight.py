"""Refuses what is known to fail before anything is downloaded, and finds the launch's ports and sockets."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import ipaddress
import logging
import os
import random
import secrets
import shutil
import socket
import stat
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from launcher.config import LauncherConfig
from launcher.errors import ArgumentValidation
from launcher.http_config import http_port as asked_http_port
from launcher.planning.gguf_choice import with_chosen_file
from launcher.planning.hardware import Hardware
from launcher.planning.model_info import DEMO, ModelInfo, directory, is_made_of_gguf
from launcher.planning.plan import DEFAULT_MASTER_PORT
from wire import tokenizer_file
from wire.cli.spelling import variable_of
from wire.processes import unix_socket
from wire.processes.python_child import child_environment, module_command
from wire.quantization import gguf
from wire.quantization.methods import FOUR_BITS, ON_LOAD, only_gguf
from wire.speculation.heads import served_model
from wire.speculation.options import check_heads
from wire.text import tokenizer_trial
from wire.text.counting import counted

logger = logging.getLogger("text_generation_launcher")

_RANK_DIGITS = 5
_LONGEST_LOCK = 32
"""Bytes: a lock holds its owner's pid."""
LOOPBACK = "127.0.0.1"


def with_gguf_file(config: LauncherConfig) -> LauncherConfig:
    """Make `--model-id` name the file of `--gguf-file`, or the only one of a folder without other weights."""
    name, model_id = config.gguf_file, config.model_id
    if name is None:
        name = _single_gguf_file(model_id) if model_id else None
        if name is None:
            return config
        logger.info("%s is the only GGUF file of %s, and is served", name, model_id)
    if not model_id or gguf.names_file(model_id):
        raise ArgumentValidation("`--gguf-file` needs the folder or repository of the file as `--model-id`")
    if not gguf.names_file(name) or name.startswith(("/", "~")) or ".." in Path(name).parts:
        raise ArgumentValidation(f"`--gguf-file` {name} is no name of a GGUF file in the folder of `--model-id`")
    return dataclasses.replace(config, model_id=f"{model_id.rstrip('/')}/{name}", gguf_file=None)


def with_quantization(config: LauncherConfig, environ: Mapping[str, str]) -> LauncherConfig:
    """Choose the GGUF file of a `--model-id` such as `org/name-GGUF:Q4_K_M`.

    Raises:
        ArgumentValidation: There is no such file.
        DownloadError: The hub cannot be asked.
    """
    if config.model_id is None:
        return config
    return dataclasses.replace(config, model_id=with_chosen_file(config.model_id, config.revision, environ))


def _single_gguf_file(model_id: str) -> str | None:
    """Return the file's name if the folder has one and was not made of one."""
    folder = Path(os.path.expanduser(model_id))
    if model_id == DEMO or is_made_of_gguf(folder):
        return None
    try:
        found = only_gguf([entry.name for entry in folder.iterdir()])
    except OSError:
        return None
    return found[0] if len(found) == 1 else None


def with_base_model(config: LauncherConfig, environ: Mapping[str, str]) -> LauncherConfig:
    """Replace a `--model-id` that names local heads by their base model, and make them `--speculator`."""
    if config.model_id is None:
        return config
    folder = directory(config.model_id, config.revision, environ)
    found = served_model(config.model_id, config.revision, folder, config.speculator, ArgumentValidation)
    if found is None:
        return config
    check_heads(found.speculator, found.model_id, config.speculate, config.num_stage, ArgumentValidation)
    logger.info("%s drafts for %s, which is served", found.speculator, found.model_id)
    return dataclasses.replace(
        config,
        model_id=found.model_id,
        revision=found.revision,
        speculator=found.speculator,
        served_model_name=config.served_model_name or [config.model_id],
    )


def check_memory(
    model_id: str, hardware: Hardware, info: ModelInfo | None, num_shard: int, quantize: str | None = None
) -> None:
    """Refuse weights that cannot fit whatever their type will be."""
    # A file shrinks on loading by half at most (float32 kept as two bytes), to a quarter when it is quantized, to a
    # seventh at 4 bits.
    size = info.weight_bytes if info else None
    if size is None:
        return
    sizes = [gpu.memory_mib for gpu in hardware.gpus[:num_shard]]
    if sizes and all(sizes):
        available, where = sum(mib or 0 for mib in sizes) << 20, counted(len(sizes), "GPU")
        remedy = "use more GPUs (`--num-shard`) or a smaller model"
    elif not hardware.gpus and hardware.memory_bytes:
        available, where, remedy = hardware.memory_bytes, "this machine", "use a smaller model"
    else:
        return
    least = 7 if quantize in FOUR_BITS else 4 if quantize in ON_LOAD else 2
    if size // least > available:
        raise ArgumentValidation(
            f"`--model-id` {model_id} has {size / 2**30:.1f} GiB of weights, which cannot fit in the "
            f"{available / 2**30:.1f} GiB of {where}; {remedy}"
        )


def check_router_variables(environ: Mapping[str, str]) -> None:
    """Has the router check the variables that only it knows. Raises ArgumentValidation."""
    ours = {variable_of(field.name) for field in dataclasses.fields(LauncherConfig)}
    done = subprocess.run(
        [*module_command("router"), "check-options"],
        env={name: value for name, value in child_environment(environ).items() if name not in ours},
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace",
        start_new_session=True,  # Ctrl-C is the launcher's
    )  # fmt: skip
    if done.returncode:
        raise ArgumentValidation(done.stderr.strip().rpartition("\n")[2].removeprefix("error: "))


def check_tokenizer(directory: Path | None) -> None:
    """Loads and uses the model's tokenizer.json in a process with limits. Raises ArgumentValidation."""
    path = None if directory is None else tokenizer_file.find(directory)
    failure = None if path is None or directory is None else tokenizer_trial.failure_of(path, directory)
    if failure is not None:
        raise ArgumentValidation(failure)


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
    """Return the port that was asked for, or a free one for 0.

    Raises:
        ArgumentValidation: It cannot be bound.
    """
    flag, port = asked_http_port(config)
    return bindable_port(flag, address, port)


def http_socket(config: LauncherConfig) -> Path | None:
    """Return the path of `--uds`, if given.

    Raises:
        ArgumentValidation: Something else is there.
    """
    if config.uds is None:
        return None
    path = Path(os.path.abspath(config.uds))
    try:
        unix_socket.make_way(str(path))
    except unix_socket.PathTakenError as error:
        raise ArgumentValidation(f"`--uds`: {error}; choose another path") from None
    return path


def without_busy_metrics_port(config: LauncherConfig, address: str) -> LauncherConfig:
    """`config`, without a second port for metrics that cannot be had: they are on the HTTP port anyway."""
    if not config.prometheus_port:
        return config
    try:
        bindable_port("--prometheus-port", address, config.prometheus_port)
    except ArgumentValidation as error:
        logger.warning("%s; continuing without it: /metrics is also served on the HTTP port", error)
        return dataclasses.replace(config, prometheus_port=None)
    return config


# Below those that the kernel gives to connections: a shard listens only once it is loaded, and until then a connection
# of another process could get a port that was free.
_LASTING_PORTS = range(20_000, 32_000)
_TRIES = 20


def bindable_port(flag: str, address: str, port: int) -> int:
    """`port`, or a free one for 0. Raises ArgumentValidation, which names `flag`, if it cannot be bound."""
    if port == 0:
        for candidate in random.sample(_LASTING_PORTS, _TRIES):
            with suppress(ArgumentValidation):
                return bindable_port(flag, address, candidate)
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
    """Return where the ranks meet: the given port, else TGI's default, else a free one."""
    if num_shard == 1 or config.master_addr not in ("localhost", LOOPBACK):
        return config.master_port if config.master_port is not None else DEFAULT_MASTER_PORT
    if config.master_port is not None:
        return bindable_port("--master-port", LOOPBACK, config.master_port)
    try:
        return bindable_port("--master-port", LOOPBACK, DEFAULT_MASTER_PORT)
    except ArgumentValidation:
        return bindable_port("--master-port", LOOPBACK, 0)


@contextmanager
def socket_prefix(
    config: LauncherConfig, num_shard: int, environ: Mapping[str, str], announce: Callable[[str], None]
) -> Iterator[str]:
    """Own the prefix of the shards' sockets until the end of the block.

    A given path is locked and its stale sockets are replaced; else a private directory is made, whose path goes to
    `announce` first so that it is removed even if this process is killed.
    """
    if config.shard_uds_path is None:
        with private_directory(environ, announce) as directory:
            yield str(directory / "shard")
        return
    prefix = os.path.abspath(config.shard_uds_path)
    if len(os.fsencode(prefix)) + 1 + _RANK_DIGITS > unix_socket.LONGEST_PATH:
        raise ArgumentValidation(f"`--shard-uds-path` {prefix} is too long for a socket; use a shorter path")
    paths = [f"{prefix}-{rank}" for rank in range(num_shard)]
    with _locked(prefix):
        try:
            for path in paths:
                unix_socket.make_way(path)
        except unix_socket.PathTakenError as error:
            raise ArgumentValidation(f"`--shard-uds-path`: {error}; give this launch another path") from None
        try:
            yield prefix
        finally:
            for path in paths:
                with suppress(unix_socket.PathTakenError):
                    unix_socket.make_way(path)


@contextmanager
def private_directory(environ: Mapping[str, str], announce: Callable[[str], None]) -> Iterator[Path]:
    # Not under TMPDIR: that may be too deep for a socket path.
    directory = _made_in(["/tmp", environ.get("TMPDIR") or "/var/tmp", "/dev/shm"], announce)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _made_in(folders: list[str], announce: Callable[[str], None]) -> Path:
    """A new private folder in the first of these that takes one. Raises ArgumentValidation if none does."""
    reasons = []
    for folder in folders:
        directory = Path(folder, f"tercet-{secrets.token_urlsafe(6)}")  # a name that nothing has yet
        if len(os.fsencode(directory)) + len("/shard-") + _RANK_DIGITS > unix_socket.LONGEST_PATH:
            reasons.append(f"{folder}: too long for a socket")
            continue
        announce(str(directory))
        try:
            directory.mkdir(mode=0o700)
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror}")
            continue
        return directory
    raise ArgumentValidation(
        f"no folder can hold the shards' sockets ({'; '.join(reasons)}); make /tmp writable or give `--shard-uds-path`"
    )


def _owner(lock: int) -> str | None:
    """Read the pid in a lock's file: `unknown` in a new one, None for another kind of file."""
    if not stat.S_ISREG(os.fstat(lock).st_mode):
        return None
    text = os.pread(lock, _LONGEST_LOCK, 0).decode("ascii", "replace").strip()
    return text if text.isdecimal() else None if text else "unknown"


@contextmanager
def _locked(prefix: str) -> Iterator[None]:
    path = f"{prefix}.lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        raise ArgumentValidation(f"`--shard-uds-path` {prefix} cannot be used: {error.strerror} ({path})") from None
    try:
        owner = _owner(descriptor)
        if owner is None:
            raise ArgumentValidation(
                f"`--shard-uds-path`: {path} exists and is not a lock file; give this launch another path"
            )
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ArgumentValidation(
                f"`--shard-uds-path` {prefix} is in use by the launcher with pid {owner}; give each its own path"
            ) from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        yield
    finally:
        # The file stays: removing it would let two launches hold locks on two files of one name.
        os.close(descriptor)
