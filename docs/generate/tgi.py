"""What text-generation-inference 3.3 has: options, variables, routes, errors, metrics. Facts, no opinion on them.

The reference marks by it what is ours, and tests hold docs/migrating-from-tgi.md to it.
"""

from __future__ import annotations

from typing import NamedTuple

QUANTIZE = (
    "awq", "compressed-tensors", "eetq", "exl2", "gptq", "marlin",
    "bitsandbytes", "bitsandbytes-nf4", "bitsandbytes-fp4", "fp8",
)  # fmt: skip


class Flag(NamedTuple):
    """A launcher option. `default` as its help spells it; empty: none. `choices`: the only values."""

    default: str
    short: str = ""
    choices: tuple[str, ...] = ()


_OFF = "false"
LAUNCHER: dict[str, Flag] = {
    "--model-id": Flag("bigscience/bloom-560m"),
    "--revision": Flag(""),
    "--validation-workers": Flag("2"),
    "--sharded": Flag("", choices=("true", "false")),
    "--num-shard": Flag(""),
    "--quantize": Flag("", choices=QUANTIZE),
    "--speculate": Flag(""),
    "--dtype": Flag("", choices=("float16", "bfloat16")),
    "--kv-cache-dtype": Flag("", choices=("fp8_e4m3fn", "fp8_e5m2")),
    "--trust-remote-code": Flag(_OFF),
    "--max-concurrent-requests": Flag("128"),
    "--max-best-of": Flag("2"),
    "--max-stop-sequences": Flag("4"),
    "--max-top-n-tokens": Flag("5"),
    "--max-input-tokens": Flag(""),
    "--max-input-length": Flag(""),
    "--max-total-tokens": Flag(""),
    "--waiting-served-ratio": Flag("0.3"),
    "--max-batch-prefill-tokens": Flag(""),
    "--max-batch-total-tokens": Flag(""),
    "--max-waiting-tokens": Flag("20"),
    "--max-batch-size": Flag(""),
    "--cuda-graphs": Flag(""),
    "--hostname": Flag("0.0.0.0"),
    "--port": Flag("3000", short="-p"),
    "--prometheus-port": Flag("9000"),
    "--shard-uds-path": Flag("/tmp/text-generation-server"),
    "--master-addr": Flag("localhost"),
    "--master-port": Flag("29500"),
    "--huggingface-hub-cache": Flag(""),
    "--weights-cache-override": Flag(""),
    "--disable-custom-kernels": Flag(_OFF),
    "--cuda-memory-fraction": Flag("1"),
    "--rope-scaling": Flag("", choices=("linear", "dynamic")),
    "--rope-factor": Flag(""),
    "--json-output": Flag(_OFF),
    "--otlp-endpoint": Flag(""),
    "--otlp-service-name": Flag("text-generation-inference.router"),
    "--cors-allow-origin": Flag(""),
    "--api-key": Flag(""),
    "--watermark-gamma": Flag(""),
    "--watermark-delta": Flag(""),
    "--ngrok": Flag(_OFF),
    "--ngrok-authtoken": Flag(""),
    "--ngrok-edge": Flag(""),
    "--tokenizer-config-path": Flag(""),
    "--disable-grammar-support": Flag(_OFF),
    "--env": Flag(_OFF, short="-e"),
    "--max-client-batch-size": Flag("4"),
    "--lora-adapters": Flag(""),
    "--usage-stats": Flag("on", choices=("on", "off", "no-stack")),
    "--payload-limit": Flag("2000000"),
    "--enable-prefill-logprobs": Flag(_OFF),
    "--graceful-termination-timeout": Flag("90", short="-g"),
}
"""The launcher's 54 options. Each but `--env` is also read from the variable of its name."""

ROUTER = frozenset({
    "--max-concurrent-requests", "--max-best-of", "--max-stop-sequences", "--max-top-n-tokens", "--max-input-tokens",
    "--max-total-tokens", "--waiting-served-ratio", "--max-batch-prefill-tokens", "--max-batch-total-tokens",
    "--max-waiting-tokens", "--max-batch-size", "--hostname", "--port", "--prometheus-port", "--master-shard-uds-path",
    "--tokenizer-name", "--tokenizer-config-path", "--revision", "--trust-remote-code", "--validation-workers",
    "--api-key", "--json-output", "--otlp-endpoint", "--otlp-service-name", "--cors-allow-origin", "--ngrok",
    "--ngrok-authtoken", "--ngrok-edge", "--disable-grammar-support", "--max-client-batch-size", "--usage-stats",
    "--payload-limit", "--max-image-fetch-size",
})  # fmt: skip
SERVE = frozenset({
    "MODEL_ID", "--revision", "--sharded", "--quantize", "--speculate", "--dtype", "--kv-cache-dtype",
    "--trust-remote-code", "--uds-path", "--logger-level", "--json-output", "--otlp-endpoint", "--otlp-service-name",
    "--max-input-tokens",
})  # fmt: skip
DOWNLOAD = frozenset({
    "MODEL_ID", "--revision", "--extension", "--auto-convert", "--logger-level", "--json-output",
    "--trust-remote-code", "--merge-lora",
})  # fmt: skip
QUANTIZE = frozenset({
    "MODEL_ID", "OUTPUT_DIR", "--revision", "--logger-level", "--json-output", "--trust-remote-code",
    "--upload-to-model-id", "--percdamp", "--act-order", "--groupsize",
})  # fmt: skip

VARIABLES = frozenset({
    "ATTENTION", "PREFIX_CACHING", "PREFILL_CHUNKING", "USE_FLASH_ATTENTION", "TGI_WIGGLE_ROOM", "LOG_LEVEL",
    "LOG_COLORIZE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_API_TOKEN", "HF_HUB_OFFLINE", "HF_HOME", "HF_HUB_CACHE",
    "HF_HUB_ENABLE_HF_TRANSFER", "HF_HUB_USER_AGENT_ORIGIN", "COMPUTE_TYPE", "CUDA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "MAX_IMAGE_FETCH_SIZE", "DEBUG", "AIP_HTTP_PORT",
    "AIP_PREDICT_ROUTE", "AIP_HEALTH_ROUTE",
})  # fmt: skip
"""Variables that no launcher option has."""
SHARD_VARIABLES = frozenset({
    "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ATTENTION", "PREFIX_CACHING", "PREFILL_CHUNKING",
    "CUDA_MEMORY_FRACTION", "CUDA_GRAPHS", "MAX_BATCH_SIZE", "REQUEST_LOGPROBS", "DISABLE_CUSTOM_KERNELS",
    "WATERMARK_GAMMA", "WATERMARK_DELTA",
})  # fmt: skip
"""What a shard reads from its environment, where we have an option as well."""

_BUILD = "a build with the feature"
ROUTES: dict[tuple[str, str], str] = {
    ("POST", "/"): "key",
    ("GET", "/"): "",
    ("POST", "/generate"): "key",
    ("POST", "/generate_stream"): "key",
    ("POST", "/v1/chat/completions"): "key",
    ("POST", "/v1/completions"): "key",
    ("GET", "/v1/models"): "",
    ("POST", "/invocations"): "key",
    ("POST", "/vertex"): "key",
    ("POST", "/tokenize"): "key",
    ("POST", "/chat_tokenize"): "",
    ("GET", "/info"): "",
    ("GET", "/health"): "",
    ("GET", "/ping"): "",
    ("GET", "/metrics"): "",
    ("GET", "/docs"): "",
    ("GET", "/api-doc/openapi.json"): "",
    ("GET", "/v2"): _BUILD,
    ("GET", "/v2/health/live"): _BUILD,
    ("GET", "/v2/health/ready"): _BUILD,
    ("GET", "/v2/models/{name}/versions/{version}"): _BUILD,
    ("GET", "/v2/models/{name}/versions/{version}/ready"): _BUILD,
    ("POST", "/v2/models/{name}/versions/{version}/infer"): _BUILD,
}
"""Method and path → `key` if an API key is demanded there, or that it is a build's choice."""

ERRORS: dict[str, int] = {
    "validation": 422,
    "overloaded": 429,
    "generation": 424,
    "incomplete_generation": 500,
    "template_error": 422,
    "tool_error": 422,
    "batch size exceeded": 422,
    "suffix not supported": 422,
    "healthcheck": 503,
}
"""`error_type` → status of the JSON errors that a client of TGI can see."""

_METHOD = ("prefill", "decode")
METRICS: dict[str, tuple[str, tuple[str, ...]]] = {
    "tgi_request_count": ("counter", ()),
    "tgi_request_success": ("counter", ()),
    "tgi_request_failure": (
        "counter", ("validation", "overloaded", "generation", "incomplete", "dropped", "template"),
    ),
    "tgi_request_duration": ("histogram", ()),
    "tgi_request_validation_duration": ("histogram", ()),
    "tgi_request_queue_duration": ("histogram", ()),
    "tgi_request_inference_duration": ("histogram", ()),
    "tgi_request_mean_time_per_token_duration": ("histogram", ()),
    "tgi_request_generated_tokens": ("histogram", ()),
    "tgi_request_input_length": ("histogram", ()),
    "tgi_request_max_new_tokens": ("histogram", ()),
    "tgi_request_skipped_tokens": ("summary", ()),
    "tgi_queue_size": ("gauge", ()),
    "tgi_batch_next_size": ("histogram", ()),
    "tgi_batch_current_size": ("gauge", ()),
    "tgi_batch_current_max_tokens": ("gauge", ()),
    "tgi_batch_inference_count": ("counter", _METHOD),
    "tgi_batch_inference_success": ("counter", _METHOD),
    "tgi_batch_inference_failure": ("counter", _METHOD),
    "tgi_batch_inference_duration": ("histogram", _METHOD),
    "tgi_batch_forward_duration": ("histogram", _METHOD),
    "tgi_batch_decode_duration": ("histogram", _METHOD),
    "tgi_batch_filter_duration": ("histogram", _METHOD),
    "tgi_batch_concat": ("counter", ("backpressure", "wait_exceeded", "chunking")),
    "tgi_batch_concat_duration": ("histogram", ("decode",)),
    "tgi_batch_max_total_tokens": ("gauge", ()),
    "tgi_batch_total_tokens": ("gauge", ()),
}  # fmt: skip
"""Name → kind and label values. The last two are declared by TGI and never exported."""

EXITS = (
    "ArgumentValidation", "NotEnoughCUDADevices", "DownloadError", "ShardCannotStart", "ShardDisconnected",
    "ShardFailed", "WebserverCannotStart", "WebserverFailed",
)  # fmt: skip
"""What `Error: …` on the launcher's last line can name; the status is then 1."""
