"""What `launcher chat` was asked to do."""

from __future__ import annotations

from dataclasses import dataclass

from wire.cli.options import argument, option

DEFAULT_URL = "http://127.0.0.1:3000"


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """One conversation."""

    model_id: str | None = argument(
        default=None, metavar="MODEL", has_flag=True,
        help="Model to serve during the chat: hub id, folder, GGUF file, or `demo`. Default: none; the chat uses the "
        "server at --url.",
    )  # fmt: skip
    server_options: list[str] = argument(
        default=[], metavar="SERVER_OPTIONS",
        help="Options for serving MODEL, after `--`: launcher chat demo -- --num-shard 2. Variables are read too.",
    )  # fmt: skip
    url: str | None = option(None, env=None, help=f"Server to use, any with OpenAI's chat API. Default: {DEFAULT_URL}.")
    api_key: str | None = option(None, env="API_KEY", header=True, help="Bearer token of the server.")
    model: str | None = option(
        None, env=None, help="Name sent as `model`, for a server with several models. Default: the first that it lists."
    )
    system: str | None = option(None, env=None, help="System prompt.")
    max_tokens: int | None = option(
        None, env=None, unit="tokens", minimum=1, help="Longest answer. Default: the server's."
    )
    temperature: float | None = option(
        None, env=None, minimum=0.0, help="0 is greedy. Default: the model's, or 0.7 if it brings none."
    )
    top_p: float | None = option(
        None,
        env=None,
        minimum=0.0,
        maximum=1.0,
        help="Sample among the most likely tokens with this total probability. Default: the model's, or 0.95 if it "
        "brings none.",
    )
    seed: int | None = option(None, env=None, help="The same seed gives the same answer to the same conversation.")

    @property
    def sampling(self) -> dict[str, float]:
        """The parameters of each request, by OpenAI's names, without those that the server chooses."""
        names = ("max_tokens", "temperature", "top_p", "seed")
        return {name: value for name in names if (value := getattr(self, name)) is not None}
