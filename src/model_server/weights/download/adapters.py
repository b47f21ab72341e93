"""`--lora-adapters` of the hub: configs and safetensors, brought into the cache, which serves alone too."""

from __future__ import annotations

import logging
import threading
from functools import partial
from pathlib import Path

from model_server.errors import StartupError
from model_server.weights.conversion.weights import convert_adapter
from model_server.weights.download import disk
from model_server.weights.download.download import WAIT_S, HubDownload
from model_server.weights.download.hub import Hub, HuggingFaceHub
from model_server.weights.download.progress import interval
from model_server.weights.hub_cache import cache
from wire.adapters import AdapterSource, adapter_sources

logger = logging.getLogger(__name__)


def download_adapters(
    value: str | None,
    *,
    hub: Hub | None = None,
    wait_s: float = WAIT_S,
    with_bars: bool = False,
    auto_convert: bool = False,
) -> None:
    """Make the adapters present; folders are already.

    Args:
        auto_convert: Convert folders with pickled tensors only.

    Raises:
        StartupError: One line that names the adapter.
    """
    stop = threading.Event()
    for source in adapter_sources(value, StartupError):
        if source.is_folder:
            if auto_convert:
                convert_adapter(Path(source.place).expanduser())
            continue
        wanted = _AdapterDownload(source, hub or HuggingFaceHub(stop), stop, wait_s, interval(with_bars))
        try:
            wanted.run()
        except OSError as error:
            raise disk.explained(error, cache()) from error


class _AdapterDownload(HubDownload):
    def __init__(self, source: AdapterSource, hub: Hub, stop: threading.Event, wait_s: float, every_s: float) -> None:
        super().__init__(source.place, source.revision, False, False, hub, stop, wait_s, every_s, None)
        self._source = source

    @property
    def _where(self) -> str:
        place = self._source.place
        return f"LoRA adapter `{self._source.name}`" + ("" if place == self._source.name else f" ({place})")

    @property
    def _instead(self) -> str:
        return "give a folder, as in `name=path`"

    def _cached(self) -> Path | None:
        return self._cached_adapter()

    def _from_hub(self, *, is_cached: bool) -> Path:
        ask = partial(self._hub.repository, self._model_id, self._revision)
        found = ask() if is_cached else self._patiently("The hub", ask)
        logger.info("%s at revision %s is commit %s", self._model_id, self._revision or "main", found.commit)
        return self._fetch_adapter(found)
