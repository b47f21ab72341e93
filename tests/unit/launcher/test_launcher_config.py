"""The options of the launcher, and the combinations that are refused before anything is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.config import SECRETS, LauncherConfig, input_limit
from launcher.config_checks import check
from launcher.errors import ArgumentValidation
from wire.cli.options import options_of
from wire.cli.parsing import parse


def test_defaults_of_tgi() -> None:
    config = LauncherConfig()
    check(config)
    assert (config.max_concurrent_requests, config.max_best_of, config.max_stop_sequences) == (128, 2, 4)
    assert (config.max_top_n_tokens, config.max_client_batch_size, config.payload_limit) == (5, 4, 2_000_000)
    assert (config.waiting_served_ratio, config.max_waiting_tokens, config.validation_workers) == (0.3, 20, 2)
    assert (config.hostname, config.port, config.graceful_termination_timeout) == ("0.0.0.0", 3000, 90)
    assert (config.cuda_memory_fraction, config.sharded, config.num_shard) == (1.0, None, None)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sharded": True, "num_shard": 1}, ["--sharded true", "--num-shard", "1"]),
        ({"num_shard": 0}, ["--num-shard", "cannot be < 1"]),
        ({"replica_policy": "least"}, ["--replica-policy", "--num-replica"]),
        (
            {"num_replica": 2, "nnodes": 2, "node_rank": 1, "master_addr": "a", "insecure_group": True},
            ["--num-replica", "--nnodes", "exclude"],
        ),
        ({"num_replica": 2, "lora_root": Path("/"), "api_key": "k"}, ["--num-replica", "--lora-root", "exclude"]),
        ({"num_replica": 2, "master_port": 5}, ["--num-replica", "--master-port", "exclude"]),
        ({"api_key": ""}, ["--api-key", "empty"]),
        ({"max_input_tokens": 3, "max_input_length": 4}, ["--max-input-tokens", "(3)", "(4)", "deprecated"]),
        ({"max_input_tokens": 8, "max_total_tokens": 8}, ["--max-input-tokens", "must be <", "8 and 8"]),
        ({"max_input_length": 9, "max_total_tokens": 8}, ["must be <", "9 and 8"]),
        ({"max_total_tokens": 9, "max_batch_total_tokens": 8}, ["--max-total-tokens", "9 and 8"]),
        ({"max_input_tokens": 9, "max_batch_total_tokens": 8}, ["--max-batch-total-tokens", "9 and 8"]),
        ({"max_batch_prefill_tokens": 9, "max_batch_total_tokens": 8}, ["--max-batch-prefill-tokens", "9 and 8"]),
        ({"validation_workers": 0}, ["--validation-workers"]),
        ({"max_batch_size": 0}, ["--max-batch-size"]),
        ({"max_concurrent_requests": 0}, ["--max-concurrent-requests"]),
        ({"cuda_memory_fraction": 0.0}, ["--cuda-memory-fraction"]),
        ({"tokenizer_config_path": Path("/no/such")}, ["--tokenizer-config-path", "/no/such"]),
        ({"port": 9000, "prometheus_port": 9000}, ["--port", "--prometheus-port", "9000"]),
        ({"port": 9000, "master_port": 9000}, ["--master-port", "9000", "twice"]),
        ({"master_port": 9001, "prometheus_port": 9001}, ["--master-port", "9001", "twice"]),
        ({"aip_http_port": 9000, "prometheus_port": 9000}, ["--aip-http-port", "--prometheus-port", "9000"]),
        ({"lora_adapters": "a=b=c"}, ["Invalid LoRA adapter format: a=b=c"]),
        ({"speculator": "a@b@c"}, ["`--speculator` must be a folder, ID or ID@REVISION. Given: a@b@c"]),
        ({"speculator": "a", "speculate": 0}, ["`--speculator` drafts nothing with `--speculate 0`"]),
        ({"speculator": "mtp", "speculate": 0}, ["`--speculator` drafts nothing with `--speculate 0`"]),
        ({"speculator": "mtp", "num_stage": 2}, ["`--speculator mtp` cannot be combined with `--num-stage`: only"]),
        ({"lora_adapters": "a=/nowhere"}, ["LoRA adapter `a`: no adapter_config.json in /nowhere"]),
        ({"lora_adapters": "m=org/a", "model_id": "m"}, ["LoRA adapter name `m` is a name of the base model"]),
        ({"lora_slots": 2}, ["`--lora-slots` needs adapters"]),
        ({"lora_max_rank": 12, "lora_root": "/tmp", "api_key": "k"}, ["`--lora-max-rank` 12: choose one of 8, 16, 32"]),
        ({"lora_root": "/nowhere", "api_key": "k"}, ["`--lora-root` /nowhere: no such directory"]),
        ({"lora_root": "/tmp"}, ["`--lora-root` lets clients load adapters: it needs `--api-key`"]),
        (
            {"kv_cache_dtype": "fp8_e5m2", "attention": "flash_attn"},
            ["--attention flash_attn keeps its cache in the model's type; leave --kv-cache-dtype out or use triton"],
        ),
        ({"tool_call_parser": "foo"}, ["`--tool-call-parser` foo is unknown; choose one of auto, tgi, apertus, "]),
        ({"reasoning_parser": "tgi"}, ["`--reasoning-parser` tgi is unknown; choose one of auto, none, harmony, "]),
        ({"default_chat_template_kwargs": "{bad"}, ["`--default-chat-template-kwargs` is no JSON: "]),
        ({"default_chat_template_kwargs": '{"a": NaN}'}, ["`--default-chat-template-kwargs` is no JSON: NaN"]),
        ({"default_chat_template_kwargs": "[]"}, ["`--default-chat-template-kwargs` must be a JSON object"]),
        ({"generation_config": "/nowhere"}, ["`--generation-config` /nowhere must be auto, none or a folder with a "]),
        ({"override_generation_config": '{"top_p": 2}'}, ["`--override-generation-config`: `top_p` must be in [0, 1]"]),
        ({"ngrok": True}, ["--ngrok", "not served yet"]),
        ({"rope_scaling": "dynamic"}, ["--rope-scaling dynamic", "not served yet", "`linear`"]),
        ({"rope_factor": 0.0}, ["--rope-factor", "> 0"]),
        ({"weights_cache_override": Path("/x")}, ["--weights-cache-override"]),
        ({"model_id": "org/m", "weights_cache_override": Path("/x")}, ["--weights-cache-override", "--model-id"]),
        ({"nnodes": 2, "group_token": "t", "num_shard": 3}, ["`--num-shard` 3 cannot be divided among 2 nodes"]),
        ({"nnodes": 2, "group_token": "t", "sharded": False}, ["`--sharded false` and several nodes"]),
    ],
)
def test_refused(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ArgumentValidation) as caught:
        check(LauncherConfig(**fields))
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert "\n" not in text


@pytest.mark.parametrize(
    "fields",
    [
        {"speculate": 0},
        {"tool_call_parser": "llama3_json", "reasoning_parser": "deepseek_r1"},
        {"default_chat_template_kwargs": '{"enable_thinking": false}'},
        {"generation_config": "none", "override_generation_config": '{"top_k": 5}'},
        {"rope_factor": 2.0},
        {"rope_scaling": "linear"},
        {"model_id": "/repository", "weights_cache_override": Path("/repository/")},
        {"max_input_tokens": 7, "max_total_tokens": 8, "max_batch_total_tokens": 8},
        {"port": 0, "prometheus_port": 0},
        {"max_batch_prefill_tokens": 8, "max_batch_total_tokens": 8},
    ],
)
def test_accepted(fields: dict[str, Any]) -> None:
    check(LauncherConfig(**fields))


def test_from_the_environment() -> None:
    config = parse(LauncherConfig, ["--num-shard", "2"], {"NUM_SHARD": "4", "MODEL_ID": "demo", "CUDA_GRAPHS": "0"})
    assert (config.num_shard, config.model_id, config.cuda_graphs) == (2, "demo", [0])
    assert input_limit(parse(LauncherConfig, [], {"MAX_INPUT_LENGTH": "5"})) == 5


def test_secrets_are_options() -> None:
    assert {opt.name for opt in options_of(LauncherConfig)} >= SECRETS
    assert LauncherConfig().api_key is None


def test_error_lines_are_those_of_tgi() -> None:
    assert ArgumentValidation('a "b"\nc').report() == 'Error: ArgumentValidation("a \\"b\\"\\nc")'
    assert ArgumentValidation().report() == "Error: ArgumentValidation"
