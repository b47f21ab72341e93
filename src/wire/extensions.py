"""What our router and our shards can do beyond TGI's protocol, by the names that `Info` and `Warmup` carry."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum


class Extension(StrEnum):
    """A shard announces what it offers in `InfoResponse.extensions`; the router answers in `WarmupRequest.extensions`
    with those that it will use. A peer that names none is one of TGI's own."""

    RUN_AHEAD = "run_ahead"  # numbered calls are executed in order; a request leaves its batch the moment it ends
    COLUMNS = "columns"  # plain token rows come as packed arrays
    ROW_ERRORS = "row_errors"  # one request of a batch may fail alone
    STOP_ANYWHERE = "stop_anywhere"  # stop texts match anywhere, not at token boundaries only
    OPENAI_PENALTIES = "openai_penalties"  # presence and frequency penalties over generated tokens, and min_p
    LOGIT_BIAS = "logit_bias"
    LARK_GRAMMAR = "lark_grammar"  # grammars with tokens by id, around JSON schemas
    MIN_TOKENS = "min_tokens"  # nothing ends an answer that is shorter
    STOP_TOKEN_IDS = "stop_token_ids"  # further tokens end an answer
    TOKEN_IDS = "token_ids"  # prompts travel as the router's token ids
    GROW = "grow"  # a running request may get more KV blocks
    WINDOWS = "windows"  # a row with several tokens may come in columns too
    LORA = "lora"  # adapters are loaded and dropped while the shard serves, and a request names one by its load id
    IMAGES = "images"  # prompts have images, as the arrays of their towers
    SHARED_MEMORY = "shared_memory"  # large arrays of images stay in memory of the router, which the shard opens
    PREDICTION = "prediction"  # a request may foretell its answer, where drafts are searched

    @classmethod
    def known(cls, names: Collection[str]) -> frozenset[Extension]:
        """Those of `names` that this version knows; a newer peer may name others."""
        return frozenset(one for one in cls if one in names)
