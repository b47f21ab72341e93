"""Groups of nodes on machines made of namespaces: they serve as one, and what fails first ends all and is named."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support import node_namespaces
from support.node_group import HTTP_PORT, NodeGroup, generation, node_group
from support.node_namespaces import Machine, Network, network, wait_until
from support.peft_adapters import assert_tokens_of_peft, peft_adapter
from support.running_server import running_server
from support.tiny_models import tiny_checkpoint

pytestmark = [pytest.mark.e2e]

REASON = node_namespaces.why_not()
if REASON is not None:
    pytest.skip(REASON, allow_module_level=True)

LOST_NODE = 7


@pytest.fixture(scope="module")
def net() -> Iterator[Network]:
    with network(2) as made:
        yield made


@pytest.fixture
def group(net: Network, tmp_path: Path) -> Iterator[NodeGroup]:
    with node_group(net, tmp_path) as made:
        yield made


@pytest.mark.long
def test_two_nodes_serve_one_model_and_end_when_a_shard_of_one_is_killed(group: NodeGroup) -> None:
    group.start()
    group.wait_ready()
    answer = group.generate(max_new_tokens=12)
    assert answer["details"]["generated_tokens"] == 12
    assert group.ask("GET", "/health")[0] == 200
    leader, worker = group.nodes
    worker.shard().kill()
    group.wait_gone()
    first = "node 1 (10.77.0.2): shard 1 was killed by signal 9 (SIGKILL)"
    assert first in leader.last_line and first in worker.last_line, group.logs()
    assert (leader.status, worker.status) == (LOST_NODE, 1)


@pytest.mark.long
@pytest.mark.parametrize("node", [pytest.param(0, marks=pytest.mark.weekly), 1])
def test_a_launcher_that_is_killed_ends_the_other_node(group: NodeGroup, node: int) -> None:
    group.start()
    group.wait_ready()
    other = group.nodes[1 - node]
    group.nodes[node].launcher().kill()
    group.wait_gone()
    assert other.status == LOST_NODE
    assert f"node {node} (10.77.0.{node + 1}) is gone" in other.last_line


@pytest.mark.long
def test_a_router_that_is_killed_ends_all_nodes(group: NodeGroup) -> None:
    group.start()
    group.wait_ready()
    leader, worker = group.nodes
    leader.machine.running("-m router")[0].kill()
    group.wait_gone()
    first = "node 0 (10.77.0.1): router was killed by signal 9 (SIGKILL)"
    assert first in leader.last_line and first in worker.last_line, group.logs()
    assert (leader.status, worker.status) == (1, LOST_NODE)


@pytest.mark.long
@pytest.mark.parametrize("signalled", [(0,), *(pytest.param(one, marks=pytest.mark.weekly) for one in ((1,), (0, 1)))])
def test_a_signal_to_any_node_stops_all_in_order(group: NodeGroup, signalled: tuple[int, ...]) -> None:
    group.start()
    group.wait_ready()
    for launcher in [group.nodes[node].launcher() for node in signalled]:
        launcher.send_signal(signal.SIGTERM)
    group.wait_gone()
    assert [one.status for one in group.nodes] == [0, 0], group.logs()


@pytest.mark.long
def test_a_network_that_is_cut_for_good_ends_both_sides(group: NodeGroup, net: Network) -> None:
    group.start("--lease-seconds", "14")
    group.wait_ready()
    net.cut(net.machines[1])
    try:
        assert group.ask("GET", "/health")[0] == 503  # after half of the lease
        group.wait_gone()
    finally:
        net.mend(net.machines[1])
    leader, worker = group.nodes
    assert (leader.status, worker.status) == (LOST_NODE, LOST_NODE)
    assert "node 1 (10.77.0.2) has not been heard from for 14 s" in leader.last_line
    assert "node 0 (10.77.0.1) has not been heard from for 14 s" in worker.last_line


@pytest.mark.long
def test_a_node_that_only_receives_ends_both_sides(group: NodeGroup) -> None:
    group.start("--lease-seconds", "8")
    group.wait_ready()
    leader, worker = group.nodes
    worker.machine.configure("ip", "route", "add", "blackhole", leader.machine.address)
    try:
        group.wait_gone()
    finally:
        worker.machine.configure("ip", "route", "del", "blackhole", leader.machine.address)
    assert (leader.status, worker.status) == (LOST_NODE, LOST_NODE)
    assert "node 1 (10.77.0.2) has not been heard from for 8 s" in leader.last_line


@pytest.mark.weekly
def test_a_network_that_is_cut_for_five_seconds_is_survived(group: NodeGroup, net: Network) -> None:
    group.start("--lease-seconds", "30")
    group.wait_ready()
    before = group.generate(max_new_tokens=24)["generated_text"]
    net.cut(net.machines[1])
    time.sleep(5)
    net.mend(net.machines[1])
    assert group.generate(max_new_tokens=24)["generated_text"] == before
    assert not group.has_ended


# No answer ends before a group with a frozen node does.
_LONG = {"max_tokens": 3000, "min_tokens": 3000}
_IN_FLIGHT: list[tuple[str, dict[str, Any]]] = 4 * [
    ("/generate", generation({"max_new_tokens": 3000, "ignore_eos": True})),
    ("/generate_stream", generation({"max_new_tokens": 3000, "ignore_eos": True})),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], **_LONG}),
    ("/v1/completions", {"model": "demo", "prompt": "one, two,", "stream": True, **_LONG}),
]


@pytest.mark.long
@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.weekly), 1])
def test_a_frozen_node_ends_the_others_and_itself_when_it_thaws(group: NodeGroup, number: int) -> None:
    group.start("--lease-seconds", "8")
    group.wait_ready()
    frozen, other = group.nodes[number], group.nodes[1 - number]
    with ThreadPoolExecutor(len(_IN_FLIGHT)) as clients:
        asked = [clients.submit(group.ask, "POST", path, body) for path, body in _IN_FLIGHT if number]
        came = f"tgi_request_count {len(asked)}\n"
        wait_until(lambda: not asked or came in group.ask("GET", "/metrics")[1], "the requests")
        frozen.freeze()
        wait_until(lambda: other.status is not None, "the end of the other node")
        answers = [answer.result(60) for answer in asked]  # none is cut off
    assert {status for status, _ in answers} <= {200, 424, 500}, answers
    assert all(str(text).count("error_type") == 1 for _, text in answers), answers
    assert other.status == LOST_NODE
    assert f"node {number} (10.77.0.{number + 1}) has not been heard from for 8 s" in other.last_line
    frozen.thaw()
    group.wait_gone()
    assert frozen.status == LOST_NODE


CASES: tuple[dict[str, Any], ...] = (
    {"max_new_tokens": 24, "top_n_tokens": 3},
    {"max_new_tokens": 24, "do_sample": True, "seed": 7, "temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.2},
    {"max_new_tokens": 24, "stop": [" the"]},
    {"max_new_tokens": 24, "grammar": {"type": "regex", "value": "[0-9]{3}-[a-z]{5}"}},
    {"max_new_tokens": 16, "frequency_penalty": 0.7, "do_sample": True, "seed": 3, "top_k": 20, "typical_p": 0.9},
)


@pytest.fixture(scope="module")
def alone() -> Iterator[list[Any]]:
    """What one machine with four shards answers to `CASES`."""
    with running_server("demo", "--num-shard", "4", "--dtype", "float32", environ={"OMP_NUM_THREADS": "1"}) as server:
        yield [answer_of(server.port, parameters) for parameters in CASES]


def answer_of(port: int, parameters: dict[str, Any]) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/generate", json.dumps(generation(parameters)), {"content-type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return answer


@pytest.mark.long
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.weekly)])
def test_nodes_answer_as_the_shards_of_one_machine(alone: list[Any], tmp_path: Path, size: int) -> None:
    """With two nodes, there are ranks behind the endpoints."""
    with network(size) as net, node_group(net, tmp_path) as group:
        group.start("--num-shard", "4", "--dtype", "float32")
        group.wait_ready()
        assert [group.generate(**parameters) for parameters in CASES] == alone
        several = {"model": "demo", "prompt": "one, two,", "n": 3, "seed": 5, "max_tokens": 12}
        status, answer = group.ask("POST", "/v1/completions", several)
        assert status == 200 and len({choice["text"] for choice in answer["choices"]}) > 1


@pytest.mark.weekly
def test_nodes_serve_a_model_that_transformers_computes(group: NodeGroup, net: Network, tmp_path: Path) -> None:
    model = str(tiny_checkpoint("olmo", tmp_path / "olmo"))
    served = ("--model-id", model, "--dtype", "float32")
    asked = {"max_new_tokens": 16, "ignore_eos": True}
    with running_server(model, *served[2:], environ={"OMP_NUM_THREADS": "1"}) as server:
        expected = answer_of(server.port, asked)
    group.add(net.machines[0], "--nnodes", "2", *served)
    group.add(net.machines[1], "--nnodes", "2")
    group.wait_ready()
    assert "transformers" in group.nodes[0].log
    answer = group.generate(**asked)
    assert answer["generated_text"] == expected["generated_text"]
    assert [one["id"] for one in answer["details"]["tokens"]] == [one["id"] for one in expected["details"]["tokens"]]


@pytest.mark.long
@pytest.mark.parametrize(("size", "num_shard"), [pytest.param(2, "1", marks=pytest.mark.weekly), (4, "2")])
def test_nodes_are_the_stages_of_a_pipeline(alone: list[Any], tmp_path: Path, size: int, num_shard: str) -> None:
    """Four nodes are two stages of two shards; sums over other numbers of shards differ in the last digits."""

    def said(answer: Any) -> Any:
        return answer["generated_text"], [token["id"] for token in answer["details"]["tokens"]]

    with network(size) as net, node_group(net, tmp_path) as group:
        group.start("--num-stage", "2", "--num-shard", num_shard, "--dtype", "float32")
        group.wait_ready()
        with ThreadPoolExecutor(len(CASES)) as pool:
            answers = list(pool.map(lambda parameters: group.generate(**parameters), CASES))
    assert [said(answer) for answer in answers] == [said(answer) for answer in alone]


@pytest.mark.long
def test_adapters_come_and_go_on_all_nodes(group: NodeGroup, net: Network, tmp_path: Path) -> None:
    """Each node is a stage of two shards, one of them behind its endpoint."""
    pytest.importorskip("peft")
    model, root = tiny_checkpoint("llama", tmp_path / "llama"), tmp_path / "root"
    folders = {None: None, "ode": peft_adapter(model, root / "ode", 1), "haiku": peft_adapter(model, root / "haiku", 2)}
    served = ("--model-id", str(model), "--dtype", "float32", "--lora-root", str(root))
    served += ("--num-stage", "2", "--num-shard", "2")
    group.api_key = "secret"
    group.add(net.machines[0], "--nnodes", "2", *served, "--api-key", group.api_key)
    group.add(net.machines[1], "--nnodes", "2")
    group.wait_ready()

    def tokens(adapter: str | None) -> list[int]:
        answer = group.generate(max_new_tokens=8, ignore_eos=True, adapter_id=adapter)
        return [token["id"] for token in answer["details"]["tokens"]]

    prompt = [token["id"] for token in group.ask("POST", "/tokenize", {"inputs": "Once upon a time"})[1]]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(tokens, [*folders, *folders]))
    for name, of_name in zip([*folders, *folders], answers, strict=True):
        assert_tokens_of_peft(model, folders[name], prompt, of_name)
    assert group.ask("POST", "/v1/unload_lora_adapter", {"lora_name": "ode"})[0] == 200
    body = {"lora_name": "haiku", "lora_path": "ode", "load_inplace": True}
    assert group.ask("POST", "/v1/load_lora_adapter", body)[0] == 200
    assert tokens("haiku") == answers[1]
    (root / "haiku" / "adapter_model.safetensors").write_bytes(b"damaged")
    status, answer = group.ask("POST", "/v1/load_lora_adapter", {"lora_name": "ode", "lora_path": "haiku"})
    assert status == 400 and answer["error"]["message"].startswith("LoRA adapter `ode`:"), answer


@pytest.mark.weekly
def test_a_slow_network_changes_no_answer(group: NodeGroup, net: Network) -> None:
    group.start()
    group.wait_ready()
    before = group.generate(max_new_tokens=16)
    net.slow_down(net.machines[1], "2mbit")
    try:
        assert group.generate(max_new_tokens=16) == before
    finally:
        net.full_speed(net.machines[1])


@pytest.mark.weekly
def test_who_is_missing_is_named(group: NodeGroup, net: Network) -> None:
    leader = group.add(net.machines[0], "--model-id", "demo", "--nnodes", "3", "--join-timeout", "25")
    wait_until(lambda: "Node 0 waits for 2 more" in leader.log, "the leader")
    wrong = group.add(net.machines[1], "--nnodes", "2")
    wait_until(lambda: wrong.status is not None, "the end of the node with another count")
    assert wrong.status == 1
    assert "node 1 (10.77.0.2) has `--nnodes` 2, node 0 (10.77.0.1) 3" in wrong.last_line
    wait_until(lambda: leader.status is not None, "the end of node 0")
    assert leader.status == 1
    assert "Waiting for node 1: not joined yet" in leader.log and "Waiting for node 2: not joined yet" in leader.log
    assert "node 1 and node 2 did not join node 0 (10.77.0.1) within 25 s" in leader.last_line


@pytest.mark.weekly
def test_a_second_group_on_the_port_is_refused(group: NodeGroup, net: Network) -> None:
    first = group.add(net.machines[0], "--model-id", "demo", "--nnodes", "2")
    wait_until(lambda: "Node 0 waits for 1 more on 10.77.0.1:29500" in first.log, "the first leader")
    second = group.add(net.machines[0], "--model-id", "demo", "--nnodes", "2", "--port", "3001")
    wait_until(lambda: second.status is not None, "the end of the second")
    assert second.status == 1
    assert "`--master-port` 29500 is in use by another process" in second.last_line


@pytest.mark.long
def test_from_outside_nothing_can_be_reached_without_the_token(group: NodeGroup, net: Network) -> None:
    group.start("--hostname", "127.0.0.1")
    group.wait_ready()
    for node in group.nodes:
        hosts = {host for host, _ in node.machine.listening()}
        assert hosts <= {node.machine.address, "127.0.0.1"}, node.machine.listening()
    leader, worker = net.machines
    control = asked_without_token(worker, leader.address, 29500)
    assert "UNAUTHENTICATED" in control and "answered" not in control
    said = [asked_without_token(leader, host, port) for host, port in worker.listening() if host == worker.address]
    assert any("UNAUTHENTICATED" in answer for answer in said), said
    assert not any("answered" in answer for answer in said), said
    assert group.ask("GET", "/health")[0] == 200


_ASK = """
import sys, grpc
channel = grpc.insecure_channel(sys.argv[1])
for method in ("/generate.v3.TextGenerationService/Health", "/node.v1.Group/Join"):
    try:
        next(channel.stream_stream(method)(iter([b""]), timeout=15))
        print("answered", method)
    except grpc.RpcError as error:
        print(error.code())
"""


def asked_without_token(asker: Machine, address: str, port: int) -> str:
    words = asker.command(sys.executable, "-c", _ASK, f"{address}:{port}")
    return subprocess.run(words, capture_output=True, text=True, timeout=100, check=True).stdout


@pytest.mark.weekly
def test_torchrun_starts_the_group_again_after_a_failure(group: NodeGroup, net: Network) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
                "--max-restarts", "1", "--master-addr", net.machines[0].address, "--master-port", "29400")  # fmt: skip
    launcher = ("--no-python", sys.executable, "-m", "launcher", "--model-id", "demo", "--port", str(HTTP_PORT))
    for machine in net.machines:
        group.add_command(machine, (*torchrun, "--node-rank", str(machine.number), *launcher))
    group.wait_ready()
    text = group.generate(max_new_tokens=8)["generated_text"]
    group.nodes[1].shard().kill()
    wait_until(lambda: group.nodes[0].log.count("Ready on") == 2, "the second start")
    assert group.generate(max_new_tokens=8)["generated_text"] == text


@pytest.mark.weekly
@pytest.mark.parametrize("signal_at", ["Starting shard", "Warming up model"])
def test_a_shard_that_is_killed_while_the_group_starts_ends_it(group: NodeGroup, signal_at: str) -> None:
    group.start()
    leader, worker = group.nodes
    wait_until(lambda: signal_at in leader.log, signal_at)
    wait_until(lambda: worker.machine.running("model_server"), "a shard of node 1")
    worker.shard().kill()
    group.wait_gone()
    assert "node 1 (10.77.0.2): shard 1 was killed by signal 9" in leader.last_line, group.logs()
    assert (leader.status, worker.status) == (LOST_NODE, 1)


# Requests whose steps are all those of an answer, or all those of prompts.
_ANSWER = [generation({"max_new_tokens": 3000})]
_PROMPTS = [generation({"max_new_tokens": 1}, f"{index} " + "once upon a time " * 800) for index in range(40)]


@pytest.mark.long
@pytest.mark.parametrize(
    "bodies", [_ANSWER, pytest.param(_PROMPTS, marks=pytest.mark.weekly)], ids=["decode", "prefill"]
)
@pytest.mark.parametrize("node", [0, pytest.param(1, marks=pytest.mark.weekly)])
def test_clients_get_an_error_when_a_shard_is_killed_in_a_step(
    group: NodeGroup, node: int, bodies: list[dict[str, Any]]
) -> None:
    group.start()
    group.wait_ready()
    with ThreadPoolExecutor(len(bodies)) as clients:
        asked = [clients.submit(group.ask, "POST", "/generate", body) for body in bodies]
        came = f"tgi_request_count {len(bodies)}\n"
        wait_until(lambda: came in group.ask("GET", "/metrics")[1], "the requests")
        wait_until(lambda: "tgi_batch_current_size 0" not in group.ask("GET", "/metrics")[1], "a running one")
        group.nodes[node].shard().kill()
        group.wait_gone()
        answers = [answer.result(60) for answer in asked]
    failed = [answer for status, answer in answers if status == 424]
    assert failed, answers
    assert {status for status, _ in answers} <= {200, 424, 503}, answers  # 503: not yet queued when it was killed
    for answer in failed:
        assert "the model server" in answer["error"] and "10.77" not in answer["error"], answer
    assert f"node {node} (10.77.0.{node + 1}): shard {node} was killed" in group.nodes[0].last_line


@pytest.mark.weekly
@pytest.mark.timeout(900)
def test_a_group_starts_again_and_again_on_the_same_ports(group: NodeGroup, net: Network) -> None:
    options = ("--shard-uds-path", str(group.folder / "shard"), "--shard-port", "4001")
    for start in range(int(os.environ.get("NODE_RESTARTS", "4"))):
        for machine in net.machines:
            mine = ("--model-id", "demo") if machine.number == 0 else options[2:]
            group.add(machine, "--nnodes", "2", *mine, *(options[:2] if machine.number == 0 else ()))
        leader, worker = group.nodes[-2:]
        wait_until(lambda leader=leader: "Ready on" in leader.log or leader.status is not None, "the start")
        assert leader.status is None, group.logs()
        (leader if start % 2 else worker).launcher().kill()
        group.wait_gone()
