"""Commands of the model server. torch is imported only after the flags are parsed, so that --help is quick."""

from __future__ import annotations

import logging
import sys
import time
from importlib.metadata import version

from model_server.config import DownloadConfig, ServeConfig
from model_server.errors import StartupError
from wire import log_line
from wire.options import run_group

logger = logging.getLogger(__name__)


def main() -> int:
    return run_group(
        {"serve": (ServeConfig, serve), "download-weights": (DownloadConfig, download)},
        prog="model-server",
        version=version("tercet"),
        description="One shard: runs the model on one device behind the generate.v3 gRPC contract.",
    )


def serve(config: ServeConfig) -> int:
    """Load the model, bind the socket, serve until told to stop."""
    log_line.configure(config.json_output, config.logger_level, rank=config.rank if config.sharded else None)
    started = time.perf_counter()
    try:
        from model_server.shard import run_shard

        logger.info("Imported in %.2f s", time.perf_counter() - started)
        run_shard(config)
    except StartupError as error:
        logger.error("%s", error)
        return 1
    except Exception:
        logger.exception("The shard failed")
        return 1
    return 0


def download(config: DownloadConfig) -> int:
    """Fetch a hub model into the local cache."""
    log_line.configure(config.json_output, config.logger_level)
    from model_server.weights.download import download as fetch

    try:
        fetch(config.model_id, config.revision, trust_remote_code=config.trust_remote_code)
    except StartupError as error:
        logger.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
