"""Options of servers whose task is embed, rerank or classify; others refuse them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from wire.cli.options import option
from wire.pooling.task import AskedTask, PoolingName


class Preset(int):
    """The default of an option that has another one where the model's task is not to generate text."""


PANEL = "Embeddings, rerank, classification"
_U32 = 2**32 - 1


@dataclass(frozen=True, kw_only=True)
class PoolingOptions:
    """Options of launcher, router and shards."""

    task: AskedTask = option(
        "auto",
        env="TERCET_TASK",
        panel=PANEL,
        help="What the model is served for: generate, embed, rerank or classify. Default: what its files say.",
    )
    pooling: PoolingName | None = option(
        None,
        panel=PANEL,
        help="How an embedding is made of the tokens: cls, mean, last-token or splade. Default: what the files say.",
    )


@dataclass(frozen=True, kw_only=True)
class TextOptions(PoolingOptions):
    """Options of launcher and router."""

    max_batch_tokens: int | None = option(
        None, panel=PANEL, unit="tokens", minimum=1, maximum=_U32,
        help="Tokens of a step over texts; a longer text is a step of its own. Default: 512 on a CPU, 16384 on a GPU.",
    )  # fmt: skip
    max_queue_tokens: int = option(
        4_194_304, panel=PANEL, unit="tokens", minimum=1,
        help="Tokens of texts that may wait for a step; more are refused with 429.",
    )  # fmt: skip
    auto_truncate: Literal["true", "false"] = option(
        "true", panel=PANEL, alone="true",
        help="Cut texts that are too long, where a request does not say it.",
    )  # fmt: skip
    default_prompt_name: str | None = option(
        None, panel=PANEL,
        help="Prompt of the model's files that is put in front of texts where a request names none. Default: the one "
        "that they name.",
    )  # fmt: skip
    default_prompt: str | None = option(
        None, panel=PANEL, help="A text that is put in front of texts where a request names no prompt."
    )
    rerank_template: str | None = option(
        None, panel=PANEL,
        help="File with a Jinja template of `query`, `document` and `instruction`, for rerankers that answer with a "
        "token. Default: that of Qwen3-Reranker.",
    )  # fmt: skip
    rerank_instruction: str | None = option(
        None, panel=PANEL, help="Instruction of such rerankers where a request gives none."
    )


TEXT_FLAGS = (
    "max_queue_tokens", "auto_truncate", "default_prompt_name", "default_prompt", "rerank_template",
    "rerank_instruction",
)  # fmt: skip


def check_prompts(config: TextOptions, error: type[Exception]) -> None:
    """Raises `error` for options that contradict each other."""
    if config.default_prompt is not None and config.default_prompt_name is not None:
        raise error("`--default-prompt` and `--default-prompt-name` exclude each other: leave one out")
