"""ModelLaunch: one model on its way from options to a plan, with the download between its checks."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from launcher.command import Command
from launcher.config import DEFAULT_MODEL_ID, LauncherConfig
from launcher.errors import ArgumentValidation, DownloadError
from launcher.planning import commands, model_info, preflight
from launcher.planning.adapters import base_id, listed_folders, read_listed
from launcher.planning.gguf_choice import check_gguf_file
from launcher.planning.hardware import Hardware
from launcher.planning.hub import check_cache, check_network
from launcher.planning.plan import Endpoints, LaunchPlan, NodePart, check_model, make_plan, resolve_num_shard
from launcher.processes.signals import Signals
from wire.adapters import adapter_sources
from wire.log import console, progress_bars
from wire.quantization import gguf
from wire.speculation.options import is_hub_speculator

logger = logging.getLogger("text_generation_launcher")

_FAILED_STEP = re.compile(r"^download exited with status \d+: ")
_SHOWN = {console.ATTRIBUTE: True}


class ModelLaunch:
    """What is known of one model before its processes start."""

    def __init__(self, config: LauncherConfig, environ: Mapping[str, str], machine: Hardware) -> None:
        """Look for the model's files.

        Args:
            config: With the model, not a word that stands for it.
            machine: All nodes together.
        """
        self.config, self._environ, self.machine = config, environ, machine
        self.model_id = config.model_id or DEFAULT_MODEL_ID
        self.directory = model_info.model_directory(self.model_id, config.revision, environ)

    def check_files(self) -> int:
        """Check what is known before a download, and return the number of shards to expect.

        Raises:
            ArgumentValidation: The model cannot be served.
        """
        is_local = model_info.is_local(self.model_id)
        if is_local and gguf.names_file(self.model_id):
            check_gguf_file(self.model_id)
        if is_local and self.directory is not None:
            model_info.check_directory(self.model_id, self.directory)
        if is_local and self.config.revision is not None:
            logger.warning("`--revision` is of models of the hub and has no effect on %s", self.model_id)
        num_shard = self._check_shards()[1]
        if self.directory is None and model_info.is_misspelt_demo(self.model_id):
            raise ArgumentValidation(f"{self.model_id}: no such directory; did you mean {model_info.DEMO}?")
        return num_shard

    def check_cache(self) -> None:
        """Raise unless a model of the hub may be kept where it is to be."""
        if not model_info.is_local(self.model_id):
            check_cache(self.model_id, self.directory, self._environ)

    def _check_shards(self) -> tuple[model_info.ModelInfo | None, int]:
        info = model_info.read(self.directory)
        check_model(self.model_id, info, self.config.quantize)
        num_shard = resolve_num_shard(self.config, self.machine, info).value
        preflight.check_memory(self.model_id, self.machine, info, num_shard, self.config.quantize)
        return info, num_shard

    @property
    def needs_download(self) -> bool:
        """Whether the download step has anything to do."""
        sources = adapter_sources(self.config.lora_adapters, ArgumentValidation)
        has_hub_adapters = any(not source.is_folder for source in sources)
        # A directory without tokenizer.json goes through the step too, which says or makes what is missing.
        is_complete = self.directory is not None and (self.directory / "tokenizer.json").is_file()
        has_hub_parts = has_hub_adapters or is_hub_speculator(self.config.speculator)
        return not model_info.is_local(self.model_id) or not is_complete or has_hub_parts

    def download(self, signals: Signals, run: Callable[[Command], int | None]) -> int | None:
        """Fetch what is missing; return an exit status if a signal ended it.

        Args:
            run: Runs the download step.

        Raises:
            DownloadError, ArgumentValidation: The step failed, in its own words where they are about the model.
        """
        try:
            status = self._fetch(signals, run)
        except DownloadError as error:
            similar = model_info.similar_cached(self.model_id, self._environ)
            similar = similar or model_info.similar_directory(self.model_id)
            if similar is None or str(error).startswith(("LoRA adapter", "--speculator")):
                raise
            raise DownloadError(f"{error}; did you mean {similar}?") from error
        if status is None:
            self.config = preflight.with_base_model(self.config, self._environ)
            self.model_id = self.config.model_id or self.model_id
            self.directory = model_info.model_directory(self.model_id, self.config.revision, self._environ)
        return status

    def _fetch(self, signals: Signals, run: Callable[[Command], int | None]) -> int | None:
        model_id = self.model_id
        logger.info("Starting check and download process for %s", model_id)
        base = base_id(model_id)
        is_absent = self.directory is None and not (base is None and model_info.is_local(model_id))
        shown = model_id if base is None else f"{base} (the base model of {model_id})"
        if is_absent and not check_network(shown, self._environ, signals):
            return 0
        if is_absent:
            logger.info("%s is downloaded now; later starts use the cache", shown, extra=_SHOWN)
        environ = self._environ
        if progress_bars.are_drawn(environ):
            environ = {**environ, progress_bars.WANTED: "1"}
        try:
            status = run(commands.download(self.config, model_id, environ))
        except DownloadError as error:
            # The step's own message is enough where it is about the model, or an adapter.
            about_other = re.search("(?:LoRA adapter `|--speculator ).*", str(error))
            if about_other is not None:
                raise DownloadError(about_other[0]) from error
            message = _FAILED_STEP.sub("", str(error).rpartition(f"--model-id {model_id}: ")[2])
            kind = ArgumentValidation if model_info.is_local(model_id) else DownloadError
            if model_id.rstrip("/") in message:
                raise kind(message) from error
            if kind is DownloadError and "/" not in model_id:
                message += f"; most ids are OWNER/NAME, and there is no directory {model_id}"
            raise kind(f"{model_id}: {message}") from error
        if status is None:
            logger.info("Successfully downloaded weights for %s", model_id)
        return status

    def check_tokenizer(self) -> None:
        """Try the tokenizer. Raises ArgumentValidation."""
        preflight.check_tokenizer(self.directory)

    def plan(
        self, meet: Callable[[Path | None, Mapping[str, Path | None], int], tuple[NodePart | None, Endpoints]]
    ) -> LaunchPlan:
        """Plan the processes, with the files that are there now.

        Args:
            meet: From the model's folder, its adapters' and the number of shards to this node's part and addresses.
        """
        info, num_shard = self._check_shards()
        adapters = listed_folders(self.config, self._environ)
        part, ends = meet(self.directory, adapters, num_shard)
        return make_plan(self.config, self.machine, info, ends, part, read_listed(adapters))


def resolved(config: LauncherConfig, environ: Mapping[str, str]) -> LauncherConfig:
    """Replace words that stand for a model, or for one of its files, by the model that is served."""
    return preflight.with_base_model(preflight.with_quantization(config, environ), environ)
