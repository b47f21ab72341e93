"""argv and environment of each child."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.command import Command
from launcher.config import LauncherConfig
from launcher.errors import ArgumentValidation
from launcher.planning import commands
from launcher.planning.hardware import Gpu, Hardware
from launcher.planning.model_info import ModelInfo
from launcher.planning.plan import Endpoints, LaunchPlan, NodePart, make_plan
from launcher.planning.shown_plan import plan_rows

ENDS = Endpoints(hostname="0.0.0.0", port=3001, uds_prefix="/run/x/shard", master_port=29501)
CPU = Hardware(cores=4)


def plan(hardware: Hardware = CPU, **fields: Any) -> LaunchPlan:
    return make_plan(LauncherConfig(model_id="demo", **fields), hardware, None, ENDS)


def value_of(command: Command, flag: str) -> str | None:
    return command.argv[command.argv.index(flag) + 1] if flag in command.argv else None


def test_shard_argv_of_a_plain_launch() -> None:
    command = commands.shard(plan(), 0, {})
    assert command.argv == (
        sys.executable, "-P", "-m", "model_server", "serve", "demo",
        "--uds-path", "/run/x/shard", "--logger-level", "INFO", "--json-output",
        "--otlp-service-name", "text-generation-inference.router",
    )  # fmt: skip
    assert (command.title, command.socket, command.private_files) == ("shard 0", "/run/x/shard-0", True)


def test_shard_argv_with_everything() -> None:
    made = plan(
        revision="r", num_shard=2, dtype="float32", trust_remote_code=True, max_input_tokens=5,
        max_batch_total_tokens=100, log_level="warn", otlp_endpoint="http://o:1", otlp_service_name="n",
    )  # fmt: skip
    argv = commands.shard(made, 1, {}).argv
    assert argv[4:] == (
        "serve", "demo", "--uds-path", "/run/x/shard", "--logger-level", "WARNING", "--json-output",
        "--sharded", "--max-input-tokens", "5", "--revision", "r", "--dtype", "float32", "--trust-remote-code",
        "--otlp-endpoint", "http://o:1", "--otlp-service-name", "n", "--max-batch-total-tokens", "100",
    )  # fmt: skip


def test_the_memory_of_the_cache() -> None:
    """What was asked for holds for the machine, a default is marked as one."""
    asked = commands.shard(plan(num_shard=2, kv_cache_memory=1 << 30), 1, {})
    assert value_of(asked, "--kv-cache-memory") == str(1 << 29)
    assert "--default-kv-cache-memory" not in asked.argv
    info = ModelInfo(weight_bytes=2 << 30, stored_type="BF16")
    made = make_plan(LauncherConfig(num_shard=2), Hardware(free_bytes=18 << 30), info, ENDS)
    default = commands.shard(made, 0, {})
    assert value_of(default, "--default-kv-cache-memory") == str(2 << 30)
    assert "--kv-cache-memory" not in default.argv


def test_a_router_that_logs_requests() -> None:
    assert commands.router(plan(), {}, logs_requests=True).env["LOG_LEVEL"] == "info,router.requests=debug"
    assert commands.router(plan(log_level="warn"), {}).env["LOG_LEVEL"] == "warn"


def test_shard_environment() -> None:
    made = plan(
        num_shard=2, enable_prefill_logprobs=True, cuda_memory_fraction=0.5, huggingface_hub_cache="/hub",
        max_total_tokens=9, max_batch_size=3, watermark_gamma=1.0, attention="paged", api_key="secret",
    )  # fmt: skip
    command = commands.shard(
        made,
        1,
        {"LOG_LEVEL": "debug", "WEIGHTS_CACHE_OVERRIDE": "/m", "API_KEY": "secret", "NCCL_DEBUG": "INFO", "RANK": "7"},
    )
    env = command.env
    expected = {
        "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29501", "REQUEST_LOGPROBS": "1",
        "CUDA_MEMORY_FRACTION": "0.5", "HUGGINGFACE_HUB_CACHE": "/hub", "ATTENTION": "paged",
        "MAX_TOTAL_TOKENS": "9", "MAX_BATCH_SIZE": "3", "WATERMARK_GAMMA": "1", "NCCL_DEBUG": "INFO",
    }  # fmt: skip
    assert {name: env.get(name) for name in expected} == expected
    assert not {"LOG_LEVEL", "API_KEY", "WEIGHTS_CACHE_OVERRIDE"} & set(env)
    assert "secret" not in " ".join(command.argv)


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_allocator_of_the_shards(name: str) -> None:
    assert commands.shard(plan(), 0, {}).env[name] == "expandable_segments:True"
    for asked in ("max_split_size_mb:128", ""):
        env = commands.shard(plan(), 0, {name: asked}).env
        assert {k: v for k, v in env.items() if k.endswith("ALLOC_CONF")} == {name: asked}


def test_unset_things_are_not_said() -> None:
    env = commands.shard(plan(), 0, {}).env
    for name in ("MAX_TOTAL_TOKENS", "MAX_BATCH_SIZE", "REQUEST_LOGPROBS", "CUDA_GRAPHS", "DISABLE_CUSTOM_KERNELS",
                 "WATERMARK_GAMMA", "WATERMARK_DELTA", "ATTENTION", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN"):  # fmt: skip
        assert name not in env
    assert env["CUDA_MEMORY_FRACTION"] == "1"


@pytest.mark.parametrize(("graphs", "expected"), [([], None), ([0], "0"), ([8, 0, 16], "8,16")])
def test_cuda_graphs(graphs: list[int], expected: str | None) -> None:
    assert commands.shard(plan(cuda_graphs=graphs), 0, {}).env.get("CUDA_GRAPHS") == expected


@pytest.mark.parametrize(
    ("kind", "factor", "expected"),
    [(None, None, (None, None)), ("linear", None, ("linear", "1")), (None, 2.5, ("linear", "2.5")),
     ("linear", 4.0, ("linear", "4"))],
)  # fmt: skip
def test_rope(kind: str | None, factor: float | None, expected: tuple[str | None, str | None]) -> None:
    env = commands.shard(plan(rope_scaling=kind, rope_factor=factor), 0, {}).env
    assert (env.get("ROPE_SCALING"), env.get("ROPE_FACTOR")) == expected


def test_threads_are_the_shards_choice_unless_the_user_says() -> None:
    assert "OMP_NUM_THREADS" not in commands.shard(plan(), 0, {}).env
    assert commands.shard(plan(), 0, {"OMP_NUM_THREADS": "7"}).env["OMP_NUM_THREADS"] == "7"


def test_hub_token_of_inference_endpoints() -> None:
    environ = {"HF_API_TOKEN": "b", "HF_TOKEN": "a"}
    for command in (commands.shard(plan(), 0, environ), commands.router(plan(), environ)):
        assert command.env["HF_TOKEN"] == "b"


def test_router_argv_of_a_plain_launch() -> None:
    command = commands.router(plan(), {})
    assert command.argv == (
        sys.executable, "-P", "-m", "router",
        "--tokenizer-name", "demo", "--master-shard-uds-path", "/run/x/shard-0", "--hostname", "0.0.0.0",
        "--port", "3001", "--max-batch-prefill-tokens", "4096", "--json-output",
        "--max-best-of", "2", "--max-stop-sequences", "4", "--max-top-n-tokens", "5", "--payload-limit", "2000000",
        "--waiting-served-ratio", "0.3", "--max-waiting-tokens", "20", "--validation-workers", "2",
        "--otlp-service-name", "text-generation-inference.router", "--response-store", "0", "--usage-stats", "on",
        "--max-images", "8", "--max-image-fetch-size", "10485760", "--max-image-pixels", "50000000",
        "--max-image-memory-mib", "2048", "--image-cache-mib", "256", "--image-fetch", "public",
        "--image-fetch-seconds", "10", "--task", "auto", "--max-queue-tokens", "4194304", "--auto-truncate", "true",
        "--error-format", "auto",
    )  # fmt: skip
    assert command.url == "http://127.0.0.1:3001"
    assert command.rank is None and command.title == "router"


def test_router_argv_with_everything() -> None:
    command = commands.router(
        plan(
            prometheus_port=9001, max_input_tokens=5, max_total_tokens=9, disable_grammar_support=True,
            tokenizer_config_path="/t.json", max_batch_total_tokens=5000, max_batch_size=3, revision="r",
            trust_remote_code=True, cors_allow_origin=["a", "b"], otlp_endpoint="http://o", usage_stats="off",
        ),
        {},
    )  # fmt: skip
    for flag, value in (
        ("--prometheus-port", "9001"), ("--max-input-tokens", "5"), ("--max-total-tokens", "9"),
        ("--tokenizer-config-path", "/t.json"), ("--max-batch-total-tokens", "5000"), ("--max-batch-size", "3"),
        ("--revision", "r"), ("--otlp-endpoint", "http://o"), ("--usage-stats", "off"),
    ):  # fmt: skip
        assert value_of(command, flag) == value
    assert "--disable-grammar-support" in command.argv and "--trust-remote-code" in command.argv
    origins = command.argv.index("--cors-allow-origin")
    assert command.argv[origins : origins + 4] == ("--cors-allow-origin", "a", "--cors-allow-origin", "b")
    for asked in (0, None):  # asked for none, or for one that is busy
        command = commands.router(plan(prometheus_port=asked), {"PROMETHEUS_PORT": "9001"})
        assert value_of(command, "--prometheus-port") is None and "PROMETHEUS_PORT" not in command.env


@pytest.mark.parametrize(
    ("asked", "given"),
    [("auto", "auto"), ("none", "none"), ("mine", os.path.abspath("mine")), ("/a/b", "/a/b"), (None, None)],
)
def test_the_folder_of_a_generation_config_is_found_from_another_one(asked: str | None, given: str | None) -> None:
    assert value_of(commands.router(plan(generation_config=asked), {}), "--generation-config") == given


def test_router_environment() -> None:
    command = commands.router(
        plan(api_key="secret", enable_prefill_logprobs=True, graceful_termination_timeout=30),
        {
            "PORT": "80",
            "AIP_HTTP_PORT": "81",
            "AIP_PREDICT_ROUTE": "/p",
            "MODEL_ID": "x",
            "TOKENIZER_NAME": "y",
            "MAX_BEST_OF": "9",
            "HF_TOKEN": "t",
        },
    )
    assert command.env["API_KEY"] == "secret"
    assert "secret" not in " ".join(command.argv)
    assert command.env["REQUEST_LOGPROBS"] == "1"
    assert command.env["GRACEFUL_TERMINATION_TIMEOUT"] == "28"
    assert command.env["LOG_LEVEL"] == "info"
    assert command.env["HF_TOKEN"] == "t"
    # argv has said these: an inherited variable must not be a second truth.
    assert command.env["AIP_PREDICT_ROUTE"] == "/p"
    assert not {"PORT", "AIP_HTTP_PORT", "TOKENIZER_NAME", "MAX_BEST_OF"} & set(command.env)


def test_only_a_prefill_budget_that_nobody_asked_for_may_be_lowered() -> None:
    assert commands.router(plan(), {}).env["MIN_BATCH_PREFILL_TOKENS"] == "256"
    assert commands.router(plan(), {"MIN_BATCH_PREFILL_TOKENS": "512"}).env["MIN_BATCH_PREFILL_TOKENS"] == "512"
    assert "MIN_BATCH_PREFILL_TOKENS" not in commands.router(plan(max_batch_prefill_tokens=4096), {}).env


@pytest.mark.parametrize(("timeout", "drain"), [(90, 88), (5, 4), (3, 2), (2, 1), (1, 0), (0, 0)])
def test_the_router_gets_less_than_the_deadline(timeout: int, drain: int) -> None:
    assert commands.drain_seconds(timeout) == drain


def test_compute_type_of_the_user_wins() -> None:
    gpu = Hardware(gpus=(Gpu(card="nvidia-h200"),), cores=4)
    assert commands.router(plan(gpu), {}).env["COMPUTE_TYPE"] == "1-nvidia-h200"
    assert commands.router(plan(gpu), {"COMPUTE_TYPE": "mine"}).env["COMPUTE_TYPE"] == "mine"
    asked = plan(gpu, compute_type="asked")
    assert commands.router(asked, {"COMPUTE_TYPE": "mine"}).env["COMPUTE_TYPE"] == "asked"
    assert "COMPUTE_TYPE" not in commands.router(plan(), {}).env


@pytest.mark.parametrize(
    ("address", "certfile", "probed"),
    [
        ("::", None, "http://[::1]:1"),
        ("10.0.0.1", None, "http://10.0.0.1:1"),
        ("0.0.0.0", None, "http://127.0.0.1:1"),
        ("0.0.0.0", "c.pem", "https://127.0.0.1:1"),
    ],
)
def test_the_probe_asks_an_address_that_exists(address: str, certfile: str | None, probed: str) -> None:
    ends = Endpoints(hostname=address, port=1, uds_prefix="/x", master_port=2)
    made = make_plan(LauncherConfig(ssl_certfile=None if certfile is None else Path(certfile)), CPU, None, ends)
    assert commands.router(made, {}).url == probed


def test_download() -> None:
    config = LauncherConfig(
        model_id="org/m", revision="r", trust_remote_code=True, huggingface_hub_cache="/hub", lora_adapters="a=org/a"
    )
    command = commands.download(config, "org/m", {"LOG_LEVEL": "off"})
    assert command.argv[4:] == (
        "download-weights", "org/m", "--logger-level", "INFO", "--json-output", "--revision", "r",
        "--trust-remote-code", "--lora-adapters", "a=org/a",
    )  # fmt: skip
    assert command.env["HUGGINGFACE_HUB_CACHE"] == "/hub"
    assert "LOG_LEVEL" not in command.env


def test_the_shards_know_every_attention_backend_that_can_be_asked_for() -> None:
    from model_server.attention.choice import OWN_NAMES, TGI_NAMES
    from wire.cli.options import options_of

    asked = next(opt for opt in options_of(LauncherConfig) if opt.name == "attention")
    assert set(asked.choices) == {*OWN_NAMES, *TGI_NAMES}


PART = NodePart(
    node_rank=1, num_nodes=2, store_address="10.0.0.1", key_prefix="k/", interface="eth1",
    endpoints=("unix:///run/x/shard-node", "tcp://10.0.0.2:4000"),
)  # fmt: skip


def group_plan(**fields: Any) -> LaunchPlan:
    options = {"model_id": "demo", "nnodes": 2, "num_shard": 4, "group_token": "secret"} | fields
    return make_plan(LauncherConfig(**options), CPU, None, ENDS, PART)


def test_a_shard_of_a_group_of_nodes() -> None:
    made = group_plan(group_tls_ca=Path("/ca.pem"))
    assert made.ranks == range(2, 4)
    env = commands.shard(made, 3, {"NCCL_SOCKET_IFNAME": "ib0", "GROUP_TOKEN": "inherited"}).env
    assert (env["RANK"], env["WORLD_SIZE"], env["NUM_NODES"]) == ("3", "4", "2")
    assert (env["MASTER_ADDR"], env["MASTER_PORT"], env["STORE_KEY_PREFIX"]) == ("10.0.0.1", "29501", "k/")
    assert env["NODE_ENDPOINT"] == "tcp://10.0.0.2:4000"
    assert env["ENDPOINTS"] == "unix:///run/x/shard-node,tcp://10.0.0.2:4000"
    assert (env["GROUP_TOKEN"], env["GROUP_TLS_CA"]) == ("secret", "/ca.pem")
    assert (env["GLOO_SOCKET_IFNAME"], env["NCCL_SOCKET_IFNAME"]) == ("eth1", "ib0")


def test_the_router_of_a_group_of_nodes() -> None:
    command = commands.router(group_plan(lease_seconds=7), {})
    assert (command.env["GROUP_TOKEN"], command.env["LEASE_SECONDS"]) == ("secret", "7")
    assert "secret" not in command.argv


def test_a_shard_of_one_node_knows_of_no_group() -> None:
    env = commands.shard(plan(num_shard=2), 0, {"GROUP_TOKEN": "of another launch"}).env
    assert not {"NUM_NODES", "ENDPOINTS", "GROUP_TOKEN", "GLOO_SOCKET_IFNAME"} & env.keys()


@pytest.mark.parametrize(
    "name",
    [
        "NUM_NODES",
        "ENDPOINTS",
        "NODE_ENDPOINT",
        "COLLECTIVE_TIMEOUT",
        "STORE_KEY_PREFIX",
        "NGROK_AUTHTOKEN",
        "NGROK_EDGE",
    ],
)
def test_variables_of_something_else_reach_no_child(name: str) -> None:
    made, inherited = plan(), {name: "2", "REQUEST_LOGPROBS": "1", "NCCL_DEBUG": "INFO"}
    for command in (
        commands.shard(made, 0, inherited),
        commands.router(made, inherited),
        commands.download(made.asked, "demo", inherited),
    ):
        assert not {name, "REQUEST_LOGPROBS"} & command.env.keys() and command.env["NCCL_DEBUG"] == "INFO"


def test_the_plan_shows_the_part_of_the_node() -> None:
    rows = dict(plan_rows(group_plan()))
    assert rows["node"] == "1 of 2, with ranks 2 to 3"
    assert rows["endpoint"] == "tcp://10.0.0.2:4000"
    assert "url" not in rows


def test_each_replica_has_its_part_of_the_machine() -> None:
    gpus = Hardware(gpus=tuple(Gpu() for _ in range(4)))
    made = plan(gpus, num_replica=2, num_shard=2)
    found = commands.shards(made, {"CUDA_VISIBLE_DEVICES": "4, 5,6,7"})
    assert [command.title for command in found] == [
        "shard 0 of replica 0", "shard 1 of replica 0", "shard 0 of replica 1", "shard 1 of replica 1",
    ]  # fmt: skip
    assert [command.env["CUDA_VISIBLE_DEVICES"] for command in found] == ["4,5", "4,5", "6,7", "6,7"]
    assert [command.env["MASTER_PORT"] for command in found] == ["29501", "29501", "29502", "29502"]
    assert [command.socket for command in found] == [
        "/run/x/shard-0", "/run/x/shard-1", "/run/x/shard-replica1-0", "/run/x/shard-replica1-1",
    ]  # fmt: skip
    assert value_of(found[2], "--uds-path") == "/run/x/shard-replica1"
    assert {command.env["WORLD_SIZE"] for command in found} == {"2"}
    assert commands.shards(made, {})[3].env["CUDA_VISIBLE_DEVICES"] == "2,3"
    router = commands.router(made, {})
    assert value_of(router, "--master-shard-uds-path") == "/run/x/shard-0"
    assert value_of(router, "--replica-uds-paths") == "/run/x/shard-replica1-0"
    assert dict(plan_rows(made))["replicas"] == "2"


def test_replicas_divide_gpus_and_cores() -> None:
    assert plan(Hardware(gpus=tuple(Gpu() for _ in range(4))), num_replica=2).num_shard == 2
    with pytest.raises(ArgumentValidation, match="`--num-replica` 3 is too many: 2 GPUs visible"):
        plan(Hardware(gpus=(Gpu(), Gpu())), num_replica=3)
    made = plan(num_replica=2, kv_cache_memory=1 << 30)
    first, second = commands.shards(made, {})
    assert first.env["OMP_NUM_THREADS"] == second.env["OMP_NUM_THREADS"] == "2"
    assert value_of(second, "--kv-cache-memory") == str(1 << 29)
    assert commands.shards(made, {"OMP_NUM_THREADS": "1"})[0].env["OMP_NUM_THREADS"] == "1"
    assert any("share its cores" in note for note in made.notes)
