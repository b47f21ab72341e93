"""Groups of nodes, the Gateway API's Inference Extension, network policies and KServe, as far as manifests show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from custom_resources import SCHEMAS, validate
from test_chart import VERSIONS, Manifests, Values, rendered

GROUP: Values = {
    "nodes": 4, "gpus": 8, "secrets": {"groupToken": "s3cret"}, "rdma": {"resource": "rdma/hca", "count": 2},
    "exclusiveTopology": "rack", "replicas": 2,
}  # fmt: skip
GATEWAY: Values = {"gateway": {"enabled": True, "name": "public", "namespace": "infra", "hostnames": ["llm.example"]}}
POLICY: Values = {"networkPolicy": {"enabled": True, "from": [{"namespaceSelector": {}}]}}
DEPLOY = Path(__file__).parents[2] / "deploy"
KSERVE = DEPLOY / "kserve" / "llm-inference-service-config.yaml"


def pods(manifests: Manifests) -> dict[str, Any]:
    template = manifests["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    return {role: template[f"{role}Template"] for role in ("leader", "worker")}


def variables(pod: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod["spec"]["containers"]
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("values", [GROUP, GROUP | GATEWAY | POLICY, GATEWAY, POLICY, GROUP | {"stages": 1}])
def test_manifests_follow_their_schemas(values: Values, version: str) -> None:
    manifests = rendered(values)
    for kind, manifest in manifests.items():
        if kind in SCHEMAS:
            validate(manifest)
        else:
            kubernetes_validate.validate(manifest, version, strict=True)
    for pod in pods(manifests).values() if "LeaderWorkerSet" in manifests else ():
        bare = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", **pod["metadata"]}, "spec": pod["spec"]}
        kubernetes_validate.validate(bare, version, strict=True)


def test_a_group_of_nodes() -> None:
    manifests = rendered(GROUP)
    assert "Deployment" not in manifests and "PodDisruptionBudget" not in manifests
    spec = manifests["LeaderWorkerSet"]["spec"]
    assert (spec["replicas"], spec["leaderWorkerTemplate"]["size"]) == (2, 4)
    assert spec["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert manifests["LeaderWorkerSet"]["metadata"]["annotations"] == {
        "leaderworkerset.sigs.k8s.io/exclusive-topology": "rack"
    }
    both = pods(manifests)
    assert both["leader"]["metadata"] == both["worker"]["metadata"]
    for pod in both.values():
        (container,) = pod["spec"]["containers"]
        assert container["resources"]["limits"] == {"memory": "16Gi", "nvidia.com/gpu": "8", "rdma/hca": "2"}
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
        given = variables(pod)
        assert (given["NUM_STAGE"], given["NUM_SHARD"]) == ("4", "8"), "each node is a stage of eight shards"
        assert given["GROUP_TOKEN"]["secretKeyRef"] == {"name": "demo-tercet", "key": "GROUP_TOKEN", "optional": False}
    assert manifests["Secret"]["stringData"] == {"GROUP_TOKEN": "s3cret"}
    assert "s3cret" not in str(both)
    sliced = pods(rendered(GROUP | {"stages": 1}))["leader"]
    assert (variables(sliced)["NUM_STAGE"], variables(sliced)["NUM_SHARD"]) == ("1", "32")


def test_node_0_alone_answers() -> None:
    manifests = rendered(GROUP | GATEWAY)
    leader, worker = (pod["spec"]["containers"][0] for pod in pods(manifests).values())
    assert leader["readinessProbe"] and not {"ports", "readinessProbe", "livenessProbe"} & set(worker)
    number = {"leaderworkerset.sigs.k8s.io/worker-index": "0"}
    assert number.items() <= manifests["Service"]["spec"]["selector"].items()
    assert number.items() <= manifests["InferencePool"]["spec"]["selector"]["matchLabels"].items()
    labels = pods(manifests)["leader"]["metadata"]["labels"]
    assert manifests["Service"]["spec"]["selector"].items() <= (labels | number).items()


@pytest.mark.parametrize("kind", ["hpa", "keda"])
def test_groups_are_scaled(kind: str) -> None:
    manifests = rendered(GROUP | {"autoscaling": {"kind": kind}})
    scaled = manifests["HorizontalPodAutoscaler" if kind == "hpa" else "ScaledObject"]["spec"]["scaleTargetRef"]
    assert scaled == {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet", "name": "demo-tercet"}
    assert "replicas" not in manifests["LeaderWorkerSet"]["spec"]


def test_a_gateway_finds_the_pods() -> None:
    manifests = rendered(GATEWAY)
    pool, route = manifests["InferencePool"], manifests["HTTPRoute"]
    labels = manifests["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert labels["inference.networking.k8s.io/engine-type"] == "tercet"
    (port,) = manifests["Deployment"]["spec"]["template"]["spec"]["containers"][0]["ports"]
    assert pool["spec"]["targetPorts"] == [{"number": port["containerPort"]}]
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", pool["metadata"]["name"])
    assert route["spec"]["parentRefs"] == [{"name": "public", "namespace": "infra"}]


def test_a_network_policy_opens_the_http_port_and_the_group() -> None:
    manifests = rendered(GROUP | POLICY)
    outside, inside = manifests["NetworkPolicy"]["spec"]["ingress"]
    assert outside == {"ports": [{"protocol": "TCP", "port": "http"}], "from": [{"namespaceSelector": {}}]}
    selector = manifests["NetworkPolicy"]["spec"]["podSelector"]
    assert inside == {"from": [{"podSelector": selector}]}
    labels = pods(manifests)["worker"]["metadata"]["labels"]
    assert selector["matchLabels"].items() <= labels.items()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"nodes": 2}, "nodes > 1 needs secrets.groupToken"),
        ({"nodes": 4, "stages": 3, "secrets": {"groupToken": "x"}}, "stages must divide nodes"),
        ({"gateway": {"enabled": True}}, "gateway.enabled needs gateway.name"),
        ({"nodes": 0}, "nodes"),
    ],
)
def test_what_does_not_fit_is_refused(values: Values, message: str) -> None:
    with pytest.raises(Exception, match=message):
        rendered(values)


def test_the_config_for_kserve() -> None:
    config = yaml.safe_load(KSERVE.read_text())
    validate(config)
    template = config["spec"]["template"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": template}
    kubernetes_validate.validate(pod, VERSIONS[-1], strict=True)
    (container,) = template["containers"]
    ports = {variable["name"]: variable["value"] for variable in container["env"]}
    assert ports["PORT"] == str(container["ports"][0]["containerPort"])
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in template["volumes"]}


def test_the_manifests_for_kuberay() -> None:
    job, service, policy = yaml.safe_load_all((DEPLOY / "ray" / "kuberay.yaml").read_text())
    validate(job)
    for manifest in (service, policy):
        kubernetes_validate.validate(manifest, VERSIONS[-1], strict=True)
    cluster = job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    for spec in (job["spec"]["submitterPodTemplate"]["spec"], *(one["template"]["spec"] for one in nodes(cluster))):
        kubernetes_validate.validate(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}, VERSIONS[-1], strict=True
        )
        (container,) = spec["containers"]
        given = {one["name"]: one["value"] for one in container["env"]}
        assert (given["RAY_AUTH_MODE"], given["RAY_USAGE_STATS_ENABLED"]) == ("token", "0")
        assert container["envFrom"] == [{"secretRef": {"name": "tercet-ray"}}]
    options = job["spec"]["entrypoint"].split()
    assert options[:3] == ["launcher", "--placement", "ray"]
    asked = dict(zip(options[3::2], options[4::2], strict=True))
    assert int(asked["--nnodes"]) == 1 + workers["replicas"]
    (container,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    shards = int(asked["--num-stage"]) * int(asked["--num-shard"])
    assert int(container["resources"]["limits"]["nvidia.com/gpu"]) * int(asked["--nnodes"]) == shards
    assert container["ports"] == [{"name": "http", "containerPort": int(asked["--port"])}]
    head = cluster["headGroupSpec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= head.items()
    for one in nodes(cluster):
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= one["template"]["metadata"]["labels"].items()


def nodes(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
