"""What the server will really do, resolved from the options and from what the shards answered at warm-up."""

from __future__ import annotations

from dataclasses import dataclass

from router.request import SamplingParameters


@dataclass(frozen=True, kw_only=True)
class ServingLimits:
    """Resolved limits; `RouterConfig` holds what was asked for. All token counts are per request unless said."""

    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_top_n_tokens: int
    max_client_batch_size: int
    max_input_tokens: int
    max_total_tokens: int
    max_batch_prefill_tokens: int  # per prefill
    max_batch_total_tokens: int  # KV capacity of the server in tokens, block 0 included
    max_batch_size: int | None
    max_waiting_tokens: int  # answered decode steps
    waiting_served_ratio: float


@dataclass(frozen=True, kw_only=True)
class ShardInfo:
    """What the shards say of themselves (Info), the same on every rank."""

    requires_padding: bool
    dtype: str
    device_type: str
    window_size: int | None
    speculate: int
    support_chunking: bool
    use_prefix_caching: bool
    attention_impl: str
    block_size: int
    extensions: frozenset[str]

    def unsupported(self, sampling: SamplingParameters) -> tuple[str, ...]:
        """Names of the parameters in use that these shards cannot honour; validation refuses such a request.

        A stock TGI shard announces no extensions. `stop_anywhere` is not asked for here: without it a shard matches
        stop text at token boundaries, which is TGI's behaviour.
        """
        missing = []
        if "openai_penalties" not in self.extensions:
            if sampling.presence_penalty:
                missing.append("presence_penalty")
            if sampling.absolute_frequency_penalty:
                missing.append("frequency_penalty")
            if sampling.min_p:
                missing.append("min_p")
        if "logit_bias" not in self.extensions and sampling.logit_bias:
            missing.append("logit_bias")
        if not self.extensions and sampling.grammar_kind == "json":
            missing.append("grammar")  # a stock router compiles schemas to regexes before its shards see them
        return tuple(missing)
