"""Commands of the model server. torch is imported only after the flags are parsed, so that --help is quick."""

from __future__ import annotations

import dataclasses
import logging
import signal
import sys
import time
from functools import partial
from pathlib import Path

from model_server.config import (
    DownloadConfig,
    ServeConfig,
    check,
    draws_progress_bars,
)
from model_server.errors import FatalError, LostPeerError, MissingPeerError, StartupError
from model_server.quantize.config import QuantizeConfig, check_quantize
from wire import phases
from wire.cli.commands import installed_version, run_group, with_variables
from wire.exit_status import LOST_PEER, MISSING_PEER
from wire.log import log_setup
from wire.model_files import read_config
from wire.pooling.task import find_task
from wire.processes import stack_dump
from wire.quantization.config import by_tensors, said_of
from wire.quantization.methods import choose
from wire.rpc.local_grpc import poll_in_place
from wire.speculation.heads import heads_of, served_model
from wire.speculation.options import check_heads, is_mtp, speculator_source
from wire.text.counting import counted

logger = logging.getLogger(__name__)


def main() -> int:
    return run_group(
        {
            "serve": (ServeConfig, serve),
            "download-weights": (DownloadConfig, download),
            "quantize": (QuantizeConfig, quantize),
        },
        prog="model-server",
        version=installed_version,
        description="One shard: runs the model on one device behind the generate.v3 gRPC contract.",
    )


def serve(config: ServeConfig) -> int:
    """Load the model, open the socket, serve until a signal stops the process."""
    log_setup.configure(config.json_output, config.logger_level, rank=config.rank if config.sharded else None)
    stack_dump.answer_requests()
    started = time.perf_counter()
    # Imported here, as all that is not needed for --help.
    from model_server.distributed.peer_watch import leave_at_once

    phases.enter(phases.CHECKPOINT)
    try:
        check(config)
        from model_server.weights.checkpoint import examine
        from model_server.weights.locate import resolve_merged

        folder, adapter = resolve_merged(config.model_id, config.revision)
        found = served_model(config.model_id, config.revision, folder, config.speculator, StartupError)
        if found is not None:
            config = dataclasses.replace(
                config, model_id=found.model_id, revision=found.revision, speculator=found.speculator
            )
            check_heads(found.speculator, found.model_id, config.speculate, config.num_stage, StartupError)
            folder, adapter = resolve_merged(config.model_id, config.revision)
        task = find_task(folder, config.task, StartupError)
        checkpoint = examine(folder, adapter)
        size = checkpoint.file_bytes / 2**20
        files = counted(len(checkpoint.headers), "weight file")
        logger.info("Found %s, %.1f MiB; importing torch", files, size)
        phases.enter(phases.IMPORTING)
        poll_in_place()
        # Imported here: torch takes seconds, and there is no need of it to see that a checkpoint cannot be served.
        if task.is_pooled:
            from model_server.pooled_shard import run_pooled_shard

            logger.info("Imported in %.2f s", time.perf_counter() - started)
            run_pooled_shard(config, checkpoint, task)
            return 0
        from model_server.shard import run_shard

        logger.info("Imported in %.2f s", time.perf_counter() - started)
        run_shard(config, checkpoint)
    except StartupError as error:
        logger.error("%s", with_variables(str(error), config))
        leave_at_once(MISSING_PEER if isinstance(error, MissingPeerError) else 1)
    except FatalError as error:
        logger.error("%s", error)
        leave_at_once(LOST_PEER if isinstance(error, LostPeerError) else 1)
    except Exception as error:
        logger.exception("The shard failed: %s: %s", type(error).__name__, error)
        leave_at_once(1)
    return 0


def download(config: DownloadConfig) -> int:
    """Fetch a hub model into the local cache; with --auto-convert, convert pickled weights."""
    log_setup.configure(config.json_output, config.logger_level)
    from model_server.weights.download.adapters import download_adapters
    from model_server.weights.download.download import download as fetch

    # The default would end the process at once, and leave half-written files.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        get = partial(
            fetch,
            trust_remote_code=config.trust_remote_code,
            auto_convert=config.auto_convert,
            with_bars=draws_progress_bars(),
            check=lambda directory: _refuse_quantized(directory, config),
        )
        folder = get(config.model_id, config.revision)
        found = served_model(config.model_id, config.revision, folder, config.speculator, StartupError)
        if found is not None:
            get(found.model_id, found.revision)
        if config.speculator is not None and not is_mtp(config.speculator):
            _download_speculator(config.speculator)
        download_adapters(config.lora_adapters, with_bars=draws_progress_bars(), auto_convert=config.auto_convert)
    except StartupError as error:
        logger.error("%s", with_variables(str(error), config))
        return 1
    return 0


def _download_speculator(value: str) -> None:
    """Download the draft model; errors name it."""
    from model_server.weights.download.download import download as fetch

    place, revision = speculator_source(value, StartupError)
    try:
        fetch(place, revision, with_bars=draws_progress_bars())
    except StartupError as error:
        said = str(error).removeprefix(f"--model-id {place}: ")
        raise StartupError(f"--speculator {value}: {said}") from None


def _refuse_quantized(directory: Path, config: DownloadConfig) -> None:
    """Refuse what cannot be served as quantized, or in stages."""
    from model_server.weights.locate import index_of, weight_map

    if heads_of(directory, StartupError) is not None:
        return  # what their base is
    fields = read_config(directory / "config.json", StartupError)
    said = said_of(directory, fields, StartupError)
    if said is None and (index := index_of(directory)) is not None:
        said = by_tensors(dict.fromkeys(weight_map(index), ()))
    choice = choose(config.quantize, said, config.model_id, StartupError)
    if choice.method is not None or config.num_stage > 1:
        # Imported here: torch takes seconds.
        from model_server.models.model import check_family

        check_family(fields, config.num_stage)


def quantize(config: QuantizeConfig) -> int:
    """Write a checkpoint whose matrices are rounded to 4 or 8 bits."""
    log_setup.configure(config.json_output, config.logger_level)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        check_quantize(config)
        # Imported here: torch takes seconds.
        from model_server.quantize import command

        command.run(config)
    except StartupError as error:
        logger.error("%s", with_variables(str(error), config))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
