"""A server for one chat or batch: a launcher that is started and ended with it."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from launcher.chat.client import ChatError, no_template
from launcher.command import Command, url_of
from launcher.config import ServeConfig
from launcher.processes.child import Child, Guard
from wire.cli.parsing import UsageError, parse
from wire.model_files import read_optional_object
from wire.processes.python_child import child_environment, module_command
from wire.quantization.gguf import names_file

_POLL_S = 0.05
_LOOPBACK = "127.0.0.1"
_NOT_INHERITED = ("AIP_HTTP_PORT", "SSL_CERTFILE", "SSL_KEYFILE")
# The key of a template, before which there may be a vocabulary.
_GGUF_TEMPLATE, _GGUF_METADATA = b"tokenizer.chat_template", 1 << 26
_REPORT = re.compile(r'Error: \w+\("(.*)"\)')


class Server:
    """One that runs already."""

    def __init__(self, url: str) -> None:
        self.url = url

    def failure(self) -> str | None:
        """Why it does not answer any more, if it is one of ours that has ended."""
        return None


class _OwnServer(Server):
    def __init__(self, url: str, child: Child) -> None:
        super().__init__(url)
        self._child = child

    def failure(self) -> str | None:
        return None if self._child.poll() is None else _reason(self._child)


@contextlib.contextmanager
def served(
    model_id: str,
    options: Sequence[str],
    environ: Mapping[str, str],
    show: Callable[[str], None],
    *,
    needs_template: bool = True,
) -> Iterator[Server]:
    """Serve `model_id` until the block ends, or is interrupted.

    Args:
        show: Called with what the server says while it starts.
        needs_template: Whether a model without a chat template is refused.

    Raises:
        ChatError: It did not start, or the model has no chat template.
    """
    if needs_template and not {"CHAT_TEMPLATE", "TOKENIZER_CONFIG_PATH"} & environ.keys() and _lacks_template(model_id):
        raise ChatError(no_template(model_id, f"serve this one for single prompts: launcher serve {model_id}"))
    logger = logging.getLogger("text_generation_launcher.server")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False  # its log would run through the conversation
    with contextlib.closing(Guard()) as guard:
        child = Child(_command(model_id, options, environ), guard)
        try:
            while not child.is_ready():
                if child.poll() is not None:
                    raise ChatError(_reason(child))
                show(child.logs.last_message)
                time.sleep(_POLL_S)
            yield _OwnServer(child.command.url or "", child)
        finally:
            _end(child)


def _lacks_template(model_id: str) -> bool:
    """Whether a model id is a folder with a tokenizer, or a GGUF file, without a chat template."""
    folder = Path(os.path.expanduser(model_id))
    if names_file(model_id) and folder.is_file():
        with folder.open("rb") as file:
            start = file.read(_GGUF_METADATA)
        return start.startswith(b"GGUF") and _GGUF_TEMPLATE not in start
    if not (folder / "tokenizer.json").is_file() or (folder / "adapter_config.json").exists():
        return False
    if (folder / "chat_template.jinja").exists() or (folder / "additional_chat_templates").exists():
        return False
    configs = ("tokenizer_config.json", "chat_template.json", "processor_config.json")
    return not any(read_optional_object(folder / name, ChatError).get("chat_template") for name in configs)


def _command(model_id: str, options: Sequence[str], environ: Mapping[str, str]) -> Command:
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        port = int(probe.getsockname()[1])
    inherited = {name: value for name, value in child_environment(environ).items() if name not in _NOT_INHERITED}
    address = ("--hostname", _LOOPBACK, "--port", str(port))
    with contextlib.suppress(UsageError):  # the server will say so itself
        if parse(ServeConfig, [model_id, *address, *options], inherited).ssl_certfile is not None:
            raise ChatError("this server listens on this machine only: leave --ssl-certfile out")
    return Command(
        name="server",
        argv=(*module_command("launcher"), "serve", model_id, *address, *options),
        env=inherited | {"JSON_OUTPUT": "true"},
        url=url_of(_LOOPBACK, port, has_tls=False),
    )


def _reason(child: Child) -> str:
    """Why it ended: its last line, without TGI's name of the error."""
    last = child.logs.errors.last
    report = _REPORT.fullmatch(last)
    if report is not None:
        return report[1].replace('\\"', '"').replace("\\\\", "\\")
    return last.removeprefix("error: ") or f"the server {child.exit}"


def _end(child: Child) -> None:
    try:
        child.terminate()
        while child.poll() is None:
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        child.kill()
        while child.poll() is None:
            time.sleep(_POLL_S)
