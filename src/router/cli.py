"""The router's command line. Nothing heavy is imported before the options are understood."""

from __future__ import annotations

import logging
import signal
import sys
from dataclasses import dataclass

from router.config import RouterConfig, check
from router.errors import StartupError
from wire import phases
from wire.cli.commands import installed_version, run_group, with_variables
from wire.log import log_setup
from wire.processes import stack_dump
from wire.rpc.local_grpc import poll_in_place
from wire.text.escape import as_error

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PrintSchemaConfig:
    """`print-schema` has no options."""


def main() -> int:
    """Run, and return 0 after a signal, 1 for a failure, 2 for a wrong command line."""
    return run_group(
        {"print-schema": (PrintSchemaConfig, print_schema), "check-options": (RouterConfig, check_options)},
        prog="router",
        version=installed_version,
        description="Serves the HTTP API and decides which request the model shards run next.",
        default=(RouterConfig, run),
    )


def run(config: RouterConfig) -> int:
    """Serve until a signal comes."""
    log_setup.configure(config.json_output, config.log_level)
    stack_dump.answer_requests()
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # with a file of API keys it is answered once the file is read
    phases.enter(phases.IMPORTING)
    try:
        check(config)
        poll_in_place()
        import uvloop

        from router.server.server import serve

        return uvloop.run(serve(config))
    except StartupError as error:
        text = with_variables(str(error), config)
        if config.json_output:  # the cause, also for readers of the log, after the records of the end itself
            logger.error("%s", text)
        print(as_error(text) if sys.stderr.isatty() else error.report(text), file=sys.stderr)  # noqa: T201
        return 1
    except KeyboardInterrupt:
        return 0


def check_options(config: RouterConfig) -> int:
    """Check the options and variables, and start nothing."""
    try:
        check(config)
    except StartupError as error:
        print(as_error(with_variables(str(error), config)), file=sys.stderr)  # noqa: T201
        return 1
    return 0


def print_schema(config: PrintSchemaConfig) -> int:
    """Print the OpenAPI document as JSON."""
    import orjson

    from router.server.app import create_app

    text = orjson.dumps(create_app().openapi(), option=orjson.OPT_INDENT_2)
    sys.stdout.write(text.decode() + "\n")
    return 0
