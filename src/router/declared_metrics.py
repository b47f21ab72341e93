"""The table of all metrics, with TGI's bare names."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from router.errors import Reason
from wire.step_phases import DRAFT_KINDS, OTHER_DRAFTS, PHASES, POOLING_PHASES

_METHODS = ("method", ("prefill", "decode"))
_DRAFT_KINDS = ("kind", (*DRAFT_KINDS, OTHER_DRAFTS))
OTHER = "other"
"""The label of adapters, and of API keys, that have no series of their own."""
KeyRefusal = Literal["concurrency", "model", "requests", "scope", "tokens"]
_Label = tuple[str, tuple[str, ...]]
"""A label and all values that it can have. They are written here, never taken from a request; names of adapters are
added when the shards have answered, names of API keys when their file has been read."""


Scale = Literal["seconds", "input", "total", "step", "requests"]
"""What a histogram's edges go by: input, total and step are limits of tokens."""


@dataclass(frozen=True, slots=True)
class Declared:
    """One metric, its unit, and its labels, two at most."""

    kind: Literal["counter", "gauge", "histogram", "info"]
    """info: one series, whose labels are facts that are known once the shards have answered. Its value is 1, or where
    they change the time at which it is read."""
    help: str
    unit: str
    labels: tuple[_Label, ...] = ()
    # Of a histogram; absent: set by name.
    scale: Scale | None = None

    @property
    def keys(self) -> tuple[tuple[str, ...], ...]:
        """Return each series' label values."""
        return tuple(itertools.product(*(values for _, values in self.labels)))

    def keys_of(self, first: str) -> Iterator[tuple[str, ...]]:
        """Return the label values of the series that a value of the first label has."""
        return itertools.product((first,), *(values for _, values in self.labels[1:]))


def _counter(help: str, unit: str, *labels: _Label) -> Declared:
    return Declared("counter", help, unit, labels)


def _gauge(help: str, unit: str, *labels: _Label) -> Declared:
    return Declared("gauge", help, unit, labels)


def _histogram(help: str, unit: str, scale: Scale | None = None) -> Declared:
    return Declared("histogram", help, unit, scale=scale)


def _duration(help: str, *labels: _Label) -> Declared:
    return Declared("histogram", help, "seconds", labels, "seconds")


_KEY = ("key", (OTHER,))
OF_KEYS: dict[str, Declared] = {
    "tgi_key_requests": _counter("Requests of an API key that were let in", "requests", _KEY),
    "tgi_key_tokens": _counter(
        "Tokens of an API key; cached ones are of prompts, and counted there too",
        "tokens",
        _KEY,
        ("kind", ("prompt", "cached", "output")),
    ),
    "tgi_key_refused": _counter(
        "Requests of an API key that were refused, by reason", "requests", _KEY, ("reason", get_args(KeyRefusal))
    ),
}
"""Of the first hundred keys of a file; the others are counted together."""

_OF_BATCHES: dict[str, Declared] = {
    "tgi_batch_api_batches": _gauge(
        "Batches of the Batch API that are kept, by status",
        "batches",
        ("status", (
            "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled",
        )),
    ),
    "tgi_batch_api_requests": _counter(
        "Tries to answer requests of the Batch API, and requests that came too late",
        "requests",
        ("outcome", ("completed", "failed", "expired", "retried", "limited")),
    ),
    "tgi_batch_api_requests_waiting": _gauge("Requests of running batches without an answer", "requests"),
    "tgi_batch_api_stored_bytes": _gauge("Files of the Batch API", "bytes"),
    "tgi_batch_api_disk_errors": _counter("Failed writes of the Batch API", "writes"),
}  # fmt: skip
_OF_LOG: dict[str, Declared] = {
    "tgi_request_log_dropped": _counter("Lines that the request log has lost", "lines"),
}

DECLARED: dict[str, Declared] = {
    "tgi_request_count": _counter("Requests received", "requests"),
    "tgi_request_success": _counter("Generations finished", "generations"),
    "tgi_request_finished": _counter(
        "Generations ended, by reason",
        "generations",
        ("reason", ("length", "eos_token", "stop_sequence", "cancelled", "error")),
    ),
    "tgi_request_failure": _counter(
        "Requests that failed, by kind of error",
        "requests",
        ("err", ("validation", "overloaded", "generation", "incomplete", "dropped", "template")),
    ),
    "tgi_request_refused": _counter("Requests that were refused, by reason", "requests", ("reason", get_args(Reason))),
    "tgi_batch_inference_count": _counter("Calls that ran the model", "calls", _METHODS),
    "tgi_batch_inference_success": _counter("Calls that ran the model and succeeded", "calls", _METHODS),
    "tgi_batch_inference_failure": _counter("Calls that ran the model and failed", "calls", _METHODS),
    "tgi_batch_concat": _counter(
        "Prefills that joined a running batch", "batches", ("reason", ("backpressure", "wait_exceeded", "chunking"))
    ),
    "tgi_speculation_drafted_tokens": _counter("Tokens that were drafted", "tokens", _DRAFT_KINDS),
    "tgi_speculation_accepted_tokens": _counter("Drafted tokens that were right", "tokens", _DRAFT_KINDS),
    "tgi_encoder_cache_hits": _counter("Images of prompts that were already encoded", "images"),
    "tgi_encoder_cache_misses": _counter("Images of prompts that had to be encoded", "images"),
    "tgi_prefix_cache_query_tokens": _counter("Prompt tokens of finished generations", "tokens"),
    "tgi_prefix_cache_hit_tokens": _counter("Those of them that the prefix cache had", "tokens"),
    "tgi_request_preempted": _counter("Requests that gave up their KV blocks and began again", "requests"),
    "tgi_state_saves": _counter("States of layers that prompts saved", "states"),
    "tgi_state_restores": _counter("Prompts that continued from a saved state", "prompts"),
    "tgi_state_recomputed_tokens": _counter("Known prompt tokens computed again behind a saved state", "tokens"),
    "tgi_state_slots": _gauge("Slots for states of layers", "slots", ("use", ("live", "saved", "free"))),
    "tgi_lora_requests": _counter(
        "Requests for LoRA adapters, by the first hundred names", "requests", ("adapter", (OTHER,))
    ),
    "tgi_lora_slot_loads": _counter("Copies of LoRA adapters into slots of a GPU", "adapters"),
    "tgi_lora_evictions": _counter("LoRA adapters that left the shards' memory for others", "adapters"),
    "tgi_lora_adapters": _gauge("LoRA adapters", "adapters", ("state", ("registered", "host", "slot"))),
    "tgi_lora_requests_waiting": _gauge("Requests whose LoRA adapter is being loaded", "requests"),
    "tgi_lora_requests_info": Declared("info", "LoRA adapters of running and of waiting requests", "adapters"),
    "tgi_lora_load_duration": _duration("Loading of a LoRA adapter on all shards in seconds"),
    "tgi_image_count": _counter("Images in requests", "images"),
    "tgi_queue_size": _gauge("Requests that wait for a batch", "requests"),
    "tgi_replicas": _gauge("Replicas of the model", "replicas", ("state", ("ready", "failed"))),
    "tgi_replica_queue_size": _gauge("Requests that wait for a batch of a replica", "requests", ("replica", ("0",))),
    "tgi_batch_current_size": _gauge("Requests in the running batch", "requests"),
    "tgi_batch_current_max_tokens": _gauge("Tokens that the running batch may grow to", "tokens"),
    "tgi_batch_max_total_tokens": _gauge("Token capacity of the server", "tokens"),
    "tgi_speculation_window": _gauge("Longest draft that the last step checked", "tokens"),
    "tgi_kv_blocks_free": _gauge("KV blocks that no request uses", "blocks"),
    "tgi_kv_blocks_cached": _gauge("Free KV blocks that hold the beginning of earlier requests", "blocks"),
    "tgi_kv_blocks_live": _gauge("KV blocks that requests hold", "blocks"),
    "tgi_kv_cache_usage": _gauge("Share of the KV blocks that requests hold, 0 to 1", "ratio"),
    "tgi_cache_config_info": Declared("info", "Tokens of a KV block and number of blocks", "blocks"),
    "tgi_image_encode_duration": _duration("Encoding of the images of a step in seconds"),
    "tgi_request_duration": _duration("Whole request in seconds"),
    "tgi_request_validation_duration": _duration("From arrival to the queue in seconds"),
    "tgi_request_queue_duration": _duration("From the queue to a batch in seconds"),
    "tgi_request_inference_duration": _duration("From the batch to the last token in seconds"),
    "tgi_request_mean_time_per_token_duration": _duration("Inference time per generated token in seconds"),
    "tgi_request_time_to_first_token_duration": _duration("From arrival to the first token in seconds"),
    "tgi_request_inter_token_duration": _duration("Between two tokens of a request in seconds"),
    "tgi_batch_inference_duration": _duration("Call that ran the model in seconds", _METHODS),
    "tgi_batch_forward_duration": _duration("Forward pass in seconds", _METHODS),
    "tgi_batch_decode_duration": _duration("Choosing and decoding tokens in seconds", _METHODS),
    "tgi_batch_phase_duration": _duration("Part of a step on the shard in seconds", ("phase", PHASES)),
    "tgi_batch_filter_duration": _duration("Delivering tokens and filtering the batch in seconds", _METHODS),
    # TGI's only value, also for what joins within a prefill.
    "tgi_batch_concat_duration": _duration("Joining batches in seconds", ("method", ("decode",))),
    "tgi_image_fetch_duration": _duration("Fetching an image in seconds"),
    "tgi_image_prepare_duration": _duration("Preparing an image that was not known in seconds"),
    "tgi_image_tokens": _histogram("Tokens of an image", "tokens", scale="input"),
    "tgi_batch_next_size": _histogram("Requests in a new prefill", "requests", scale="requests"),
    "tgi_request_input_length": _histogram("Prompt tokens of a request", "tokens", scale="input"),
    "tgi_request_generated_tokens": _histogram("Generated tokens of a request", "tokens", scale="total"),
    "tgi_request_max_new_tokens": _histogram(
        "Token budget that a request asked for, at most 1024", "tokens", scale="total"
    ),
    "tgi_request_skipped_tokens": _histogram(
        "Speculated tokens accepted in one step of a request", "tokens", scale="step"
    ),
    **_OF_LOG,
    **_OF_BATCHES,
    **OF_KEYS,
    "tgi_key_queue_size": _gauge("Requests of an API key that wait for a batch", "requests", _KEY),
}


_REQUESTS = ("method", ("single", "batch"))
_FAILURES = ("batch_size", "dropped", "inference", "model_type", "overloaded", "tokenization", "validation")
POOLING: dict[str, Declared] = {
    "te_request_count": _counter("Requests received", "requests", _REQUESTS),
    "te_request_success": _counter("Requests answered", "requests", _REQUESTS),
    "te_request_failure": _counter("Requests that failed, by kind of error", "requests", ("err", _FAILURES)),
    "te_request_duration": _duration("Whole request in seconds"),
    "te_request_tokenization_duration": _duration("Cutting a request into tokens in seconds"),
    "te_request_queue_duration": _duration("From the queue to the first step in seconds"),
    "te_request_inference_duration": _duration("From the first step to the last in seconds"),
    "te_request_input_length": _histogram("Tokens of a text", "tokens"),
    "te_embed_count": _counter("Texts to be embedded", "texts"),
    "te_embed_success": _counter("Texts that were embedded", "texts"),
    "te_embed_duration": _duration("Embedding of a request in seconds"),
    "te_embed_tokenization_duration": _duration("Its tokens in seconds"),
    "te_embed_queue_duration": _duration("Its wait in seconds"),
    "te_embed_inference_duration": _duration("Its steps in seconds"),
    "te_predict_count": _counter("Texts or pairs to be scored", "texts"),
    "te_predict_success": _counter("Texts or pairs that were scored", "texts"),
    "te_predict_duration": _duration("Scores of a request in seconds"),
    "te_predict_tokenization_duration": _duration("Its tokens in seconds"),
    "te_predict_queue_duration": _duration("Its wait in seconds"),
    "te_predict_inference_duration": _duration("Its steps in seconds"),
    "te_batch_next_size": _histogram("Texts of a step", "texts"),
    "te_batch_next_tokens": _histogram("Tokens of a step", "tokens"),
    "te_queue_size": _gauge("Texts that wait for a step", "texts"),
    "tgi_queue_size": _gauge("Texts that wait for a step, for autoscalers", "texts"),
    "tgi_batch_phase_duration": _duration("Part of a step on the shard in seconds", ("phase", POOLING_PHASES)),
    **_OF_LOG,
    **_OF_BATCHES,
    **OF_KEYS,
}
"""Of a server whose task is embed, rerank or classify."""
