"""What `launcher batch` was asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from wire.cli.options import argument, option


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """One file of requests."""

    requests: Path = argument(metavar="IN", help="JSON Lines of requests, as OpenAI's Batch API has them.")
    answers: Path = argument(
        metavar="OUT", help="JSON Lines of answers, as they end. If it exists, only what it lacks is asked for."
    )
    server_options: list[str] = argument(
        default=[], metavar="SERVER_OPTIONS",
        help="Options for serving --model-id, after `--`. Variables are read too.",
    )  # fmt: skip
    url: str | None = option(None, env=None, help="Server to use, any with OpenAI's API.")
    model_id: str | None = option(
        None, env=None, help="Model to serve during the batch instead: hub id, folder, GGUF file, or `demo`."
    )
    api_key: str | None = option(None, env="API_KEY", header=True, help="Bearer token of the server.")
    concurrency: int | None = option(
        None, env=None, minimum=1, maximum=10_000,
        help="Requests at the same time. Default: as many as the server takes, or 16 if it does not say.",
    )  # fmt: skip
    retries: int = option(
        3, env=None, maximum=100,
        help="How often a request is sent again that the server failed (status 5xx). After 429 it waits as the server "
        "says, which does not count.",
    )  # fmt: skip
    timeout: float = option(3600.0, env=None, minimum=1.0, help="Seconds for one request.")
