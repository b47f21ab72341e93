"""Whether the model reads images, and what reads them."""

from __future__ import annotations

import logging

from router.config import RouterConfig
from router.errors import StartupError
from router.images.prompt import ImagePrompts
from router.images.reader import Fetcher, ImageLimits, ImageReader, NoFetcher
from router.images.store import ImageStore
from router.images.workers import ImageWorkers
from router.limits import ShardInfo
from router.metrics import Metrics
from router.server.sockets import allow_images
from router.text.model_files import ModelFiles
from router.text.tokenizer import PromptTokenizer
from router.worker.memory import keep_no_large_blocks
from wire.images.families import FAMILIES, family_name
from wire.model_files import read_optional_config

logger = logging.getLogger(__name__)

_MIB = 1 << 20
_SOURCES = {
    "off": "in data URLs",
    "public": "in data URLs or fetched from public addresses",
    "all": "in data URLs or fetched from any address",
}


async def image_prompts(
    config: RouterConfig, files: ModelFiles, tokenizer: PromptTokenizer, info: ShardInfo, metrics: Metrics
) -> ImagePrompts | None:
    """Return what reads images, if model and shards do; its `reader` is to be closed."""
    model_config = read_optional_config(files.folder / "config.json", StartupError)
    name = family_name(model_config)
    if name is None or not info.images:
        if name is not None or "vision_config" in model_config:
            logger.warning("requests with images are refused: the model server reads only the text of this model")
        return None
    family = FAMILIES[name]
    token_id = tokenizer.added_tokens.get(family.image_token)
    if token_id is None:
        logger.warning("requests with images are refused: the tokenizer has no token %s", family.image_token)
        return None
    dtype = info.dtype.removeprefix("torch.")
    most_shared = allow_images(config.max_connections) if info.shares_memory else 0
    workers = ImageWorkers(files.folder, dtype, num_workers=config.validation_workers, most_shared=most_shared)
    try:
        await workers.start()
    except StartupError as error:
        logger.warning("requests with images are refused: %s", error)
        workers.close()
        return None
    except BaseException:
        workers.close()
        raise
    keep_no_large_blocks()
    store = ImageStore(cache_bytes=config.image_cache_mib * _MIB, memory_bytes=config.max_image_memory_mib * _MIB)
    limits = ImageLimits(
        max_images=config.max_images, max_bytes=config.max_image_fetch_size, max_pixels=config.max_image_pixels
    )
    reader = ImageReader(workers, store, _fetcher(config), limits, metrics)
    bos = files.named_tokens.get("bos_token", "")
    if config.max_images:
        hosts = f"in data URLs or fetched from {', '.join(config.image_hosts)}" if config.image_hosts else None
        sources = hosts or _SOURCES[config.image_fetch]
        logger.info("images are served: up to %d in a request, %s", config.max_images, sources)
    else:
        logger.info("requests with images are refused: --max-images 0")
    return ImagePrompts(family, token_id, bos, reader)


def _fetcher(config: RouterConfig) -> Fetcher:
    if config.image_fetch == "off":
        return NoFetcher()
    from router.images.fetch.fetcher import FetcherApart, UrlFetcher  # takes a tenth of a second to import

    urls = UrlFetcher(mode=config.image_fetch, limit_s=config.image_fetch_seconds, hosts=config.image_hosts)
    return FetcherApart(urls.fetch)
