"""The front's command line: the options of the router's port, and those of several models."""

from __future__ import annotations

import logging
import signal
import sys

from router.config import check
from router.errors import StartupError
from router.front.config import FrontConfig
from wire import phases
from wire.cli.commands import run_command, with_variables
from wire.log import log_setup
from wire.processes import stack_dump

logger = logging.getLogger(__name__)


def main() -> int:
    return run_command(FrontConfig, run, prog="router.front")


def run(config: FrontConfig) -> int:
    """Serve until a signal comes."""
    log_setup.configure(config.json_output, config.log_level)
    stack_dump.answer_requests()
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # with a file of API keys it is answered once the file is read
    phases.enter(phases.IMPORTING)
    try:
        check(config)
        import uvloop

        from router.front.server import serve

        return uvloop.run(serve(config))
    except StartupError as error:
        text = with_variables(str(error), config)
        logger.error("%s", text)
        print(error.report(text), file=sys.stderr)  # noqa: T201
        return 1
    except KeyboardInterrupt:
        return 0
