"""The limits that hold, by options and the shards' warm-up."""

from __future__ import annotations

from dataclasses import dataclass

MAX_CHOICES = 128
"""OpenAI's."""


@dataclass(frozen=True, kw_only=True)
class ServingLimits:
    """Resolved limits, per request unless said."""

    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_top_n_tokens: int
    max_client_batch_size: int  # prompts of a request
    max_input_tokens: int
    max_total_tokens: int
    max_batch_prefill_tokens: int  # of one step
    default_prefill_tokens: int  # of one step's prompts unless there is a backlog; at most the above
    max_batch_total_tokens: int  # KV capacity of the server in tokens, block 0 included
    max_batch_size: int | None
    max_waiting_tokens: int  # answered decode steps
    waiting_served_ratio: float
    has_priorities: bool = False  # requests may say whose turn it is

    @property
    def max_choices(self) -> int:
        """Return OpenAI's most generations of a request."""
        return min(MAX_CHOICES, self.max_concurrent_requests)


@dataclass(frozen=True, kw_only=True)
class ShardInfo:
    """What all shards say in Info."""

    dtype: str
    device_type: str
    speculate: int  # tokens that a step may draft for a request
    chunks: bool  # prompts may be split, and newcomers share a step with the running requests
    shares_prefixes: bool  # KV blocks of equal prompt beginnings may be shared
    attention_impl: str
    block_size: int
    pipeline_depth: int  # Decodes of one batch that may be in flight
    micro_batches: int = 1  # batches that run side by side, on the stages of a pipeline
    kv_cache_dtype: str
    quantize: str | None  # method of the weights; None: they are plain
    speculator: str | None = None  # what guesses tokens; None: nothing, or they do not say
    adapters: tuple[str, ...] = ()  # names of LoRA adapters that requests may ask for
    adapter_slots: int | None = None  # most adapters among the requests of all batches; None: any number
    task: str = "generate"  # or what the shards compute instead: "embed", "rerank" or "classify"
    image_reserve: int = 0  # positions that a request needs for each of its images besides those of its tokens
    grows: bool = False  # a running request may get more KV blocks
    loads_adapters: bool = False  # LoRA adapters come and go while the shards serve
    images: bool = False  # prompts may have images
    shares_memory: bool = False  # the shards open memory of this process
    state_slots: int = 0  # states that layers keep at once, of requests and saved; 0: they keep none
    state_bytes: int = 0  # of a slot, on the rank with the most
    state_grid: int = 0  # states are saved at multiples of so many tokens
    decoder_prefix: int = 0  # tokens of a decoder with blocks of its own before the first generated one

    @property
    def overlaps(self) -> bool:
        """Whether steps are queued while one computes, and late calls leave the device idle."""
        return self.device_type != "cpu"

    @property
    def saves_states(self) -> bool:
        """Whether prompts can continue from saved states only."""
        return bool(self.state_slots)

    @property
    def can_grow(self) -> bool:
        """Whether requests need not reserve all blocks."""
        return self.grows and self.chunks
