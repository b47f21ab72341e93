"""What `launcher bench` was asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from wire.cli.options import option

ApiName = Literal["auto", "tgi", "openai", "openai-chat"]


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """One run: every concurrency and every rate is a cell of the table."""

    url: str = option(
        "http://127.0.0.1:3000", env=None, help="Server to measure; a path in it is put before the routes"
    )
    api: ApiName = option(
        "auto", env=None, help="tgi: /generate_stream; openai: /v1/completions; openai-chat: /v1/chat/completions; "
        "auto: tgi if the server answers /info as TGI does, else openai",
    )  # fmt: skip
    model: str | None = option(None, env=None, help="Name sent as `model` to an OpenAI route; unset: the first listed")
    api_key: str | None = option(None, env="API_KEY", header=True, help="Bearer token of the server")
    concurrency: list[int] = option(
        [1, 8, 32], env=None, separator=",", minimum=1, maximum=10_000,
        help="Closed loop: number of clients, each of which sends its next request when its last one has ended",
    )  # fmt: skip
    rate: list[float] = option(
        [], env=None, separator=",", minimum=0.001,
        help="Open loop: requests per second that arrive at random moments (Poisson), answered or not; "
        "replaces --concurrency",
    )  # fmt: skip
    replay: Path | None = option(
        None, env=None,
        help="Send the requests of a request log (--request-log-level trace or full) or of a trace in Mooncake's form, "
        "each when it came; replaces --concurrency, --rate and lengths",
    )  # fmt: skip
    speed: float = option(
        1.0,
        env=None,
        minimum=0.001,
        maximum=1e6,
        help="With --replay: how much faster than they came requests are sent",
    )
    prompt: int = option(128, env=None, minimum=1, maximum=1_000_000, help="Length of a prompt in tokens")
    output: int = option(64, env=None, minimum=1, maximum=1_000_000, help="Tokens to generate for each request")
    num_requests: int | None = option(
        None,
        env=None,
        minimum=1,
        help="Requests of a cell; unset: 3 for each client, at least 16; open loop: 64; with --replay: all",
    )
    warmup: int = option(1, env=None, help="Requests of each client before a cell is measured")
    repeats: int = option(1, env=None, minimum=1, help="How often each cell is measured; the report has the median")
    temperature: float | None = option(None, env=None, minimum=0.0, help="Unset: greedy")
    ignore_eos: bool = option(
        True,
        env=None,
        help="Ask the server to continue after the end-of-sequence token; all outputs are then equally long",
    )
    tokenizer: Path | None = option(
        None, env=None,
        help="tokenizer.json to make prompts of an exact length; unset: the server's /tokenize, or its usage field",
    )  # fmt: skip
    seed: int = option(0, env=None, help="Seed of the prompts and of the arrivals")
    timeout: float = option(600.0, env=None, minimum=1.0, help="Seconds for one request")
    label: str = option("", env=None, help="Name of the server in the report; unset: what the server calls itself")
    compare: list[Path] = option(
        [], env=None, separator=",",
        help="One bench.json: compare this run with it. Two, A.json,B.json: compare these, and measure nothing",
    )  # fmt: skip
    table: bool = option(False, env=None, help="Print the table as Markdown on a terminal too, to paste it elsewhere")
    out: Path = option(
        Path("bench-results"), env=None, help="Folder for bench.json (figures), bench.md (table) and bench.svg (chart)"
    )
