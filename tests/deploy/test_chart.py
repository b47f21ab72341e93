"""The chart, rendered by Helm's own engine and held against the schemas of Kubernetes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "tercet"
Values = dict[str, Any]
Manifests = dict[str, dict[str, Any]]
VERSIONS = ("1.27.0", "1.33.0")
# Of operators: Kubernetes itself has no schema for them.
CUSTOM = ("ServiceMonitor", "ScaledObject")

EVERYTHING: Values = {
    "model": {"id": "org/some-model", "revision": "refs/pr/1"},
    "image": {"repository": "registry.example/tercet", "tag": "1.2.3", "pullSecrets": [{"name": "pull"}]},
    "replicas": 3,
    "gpus": 2,
    "args": ["--max-batch-size", "32"],
    "env": {"MAX_TOTAL_TOKENS": 4096, "LOG_LEVEL": "debug", "TRUST_REMOTE_CODE": True},
    "extraEnv": [{"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
    "gracefulTerminationSeconds": 300,
    "secrets": {"hfToken": "hf_x", "apiKey": 'with "quotes"'},
    "persistence": {"enabled": True, "storageClass": "fast", "accessModes": ["ReadWriteMany"]},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "serviceAccount": {"name": "mine"},
    "service": {"type": "LoadBalancer", "port": 8000, "annotations": {"a/b": "c"}},
    "podAnnotations": {"x/y": "z"},
    "podLabels": {"team": "nlp"},
    "nodeSelector": {"gpu": "h100"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {"nodeAffinity": {}},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
    ],
    "priorityClassName": "high",
    "runtimeClassName": "nvidia",
}
CASES: dict[str, Values] = {
    "defaults": {},
    "everything": EVERYTHING,
    "hpa": {"autoscaling": {"kind": "hpa"}},
    "keda": {"autoscaling": {"kind": "keda"}},
    "claim": {"persistence": {"enabled": True, "existingClaim": "models"}},
    "secret": {"secrets": {"existing": "mine"}},
    "models": {
        "models": {"chat": {"model_id": "demo", "preload": True}, "org/x": {"model_id": "org/x", "memory": 4}},
        "modelDefaults": {"keep_alive": "30m"},
    },
    "copies": {"gpus": 8, "copies": 2},
}


def rendered(values: Values | None = None, name: str = "demo") -> Manifests:
    """The manifests by their kind."""
    with helm_python.Chart.load(str(CHART)) as chart:
        texts = chart.render(values or {}, name=name, namespace="prod")
    found: Manifests = {}
    for path, text in texts.items():
        if path.endswith(".txt"):
            continue
        for manifest in yaml.safe_load_all(text):
            if manifest is not None:
                assert manifest["kind"] not in found
                found[manifest["kind"]] = manifest
    return found


def pod(manifests: Manifests) -> dict[str, Any]:
    spec: dict[str, Any] = manifests["Deployment"]["spec"]["template"]["spec"]
    return spec


def container(manifests: Manifests) -> dict[str, Any]:
    (only,) = pod(manifests)["containers"]
    return dict(only)


def environment(manifests: Manifests) -> dict[str, Any]:
    entries = container(manifests)["env"]
    assert len({entry["name"] for entry in entries}) == len(entries)
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in entries}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("case", CASES)
def test_manifests_follow_the_schemas_of_kubernetes(case: str, version: str) -> None:
    manifests = rendered(CASES[case])
    assert {"Deployment", "Service"} <= manifests.keys()
    for kind, manifest in manifests.items():
        if kind not in CUSTOM:
            kubernetes_validate.validate(manifest, version, strict=True)


def test_helms_own_lint() -> None:
    findings = helm_python.lint(str(CHART), strict=True)
    assert findings["errors"] == []
    assert [one["error"] for one in findings["messages"]] == ["icon is recommended"]


def test_the_pod_has_no_rights() -> None:
    spec, context = pod(rendered()), container(rendered())["securityContext"]
    assert spec["securityContext"]["runAsNonRoot"] is True and spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert context == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    assert spec["automountServiceAccountToken"] is False and spec["enableServiceLinks"] is False


def test_what_must_be_writable_is_a_volume() -> None:
    manifests = rendered()
    mounts = {mount["mountPath"]: mount["name"] for mount in container(manifests)["volumeMounts"]}
    assert set(mounts) == {"/data", "/cache", "/tmp", "/dev/shm"}
    volumes = {volume["name"]: volume for volume in pod(manifests)["volumes"]}
    assert set(mounts.values()) == set(volumes)
    assert volumes["shared-memory"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}
    assert environment(manifests)["XDG_CACHE_HOME"] == "/cache"


@pytest.mark.parametrize("graceful", [0, 90, 300])
def test_the_pod_outlasts_the_launchers_deadline(graceful: int) -> None:
    manifests = rendered({"gracefulTerminationSeconds": graceful})
    wait = int(container(manifests)["lifecycle"]["preStop"]["exec"]["command"][1])
    assert environment(manifests)["GRACEFUL_TERMINATION_TIMEOUT"] == str(graceful)
    assert pod(manifests)["terminationGracePeriodSeconds"] >= graceful + 15 + wait


def test_probes() -> None:
    only = container(rendered({"startupSeconds": 601}))
    (port,) = only["ports"]
    assert port == {"name": "http", "containerPort": 8080} and environment(rendered())["PORT"] == "8080"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert only[probe]["httpGet"] == {"path": "/health", "port": "http"}
    start = only["startupProbe"]
    assert start["failureThreshold"] * start["periodSeconds"] >= 601
    assert container(rendered({"startupSeconds": 1}))["startupProbe"]["failureThreshold"] == 1


def test_gpus_are_asked_for_and_become_shards() -> None:
    manifests = rendered({"gpus": 4, "resources": {"requests": {"memory": "64Gi"}, "limits": {"memory": "64Gi"}}})
    assert container(manifests)["resources"] == {
        "requests": {"cpu": "4", "memory": "64Gi"}, "limits": {"memory": "64Gi", "nvidia.com/gpu": "4"},
    }  # fmt: skip
    assert environment(manifests)["NUM_SHARD"] == "4"
    assert manifests["Deployment"]["spec"]["strategy"]["rollingUpdate"]["maxSurge"] == 0
    without = rendered()
    assert "NUM_SHARD" not in environment(without) and "nvidia.com/gpu" not in str(container(without)["resources"])


def test_copies_divide_the_gpus() -> None:
    manifests = rendered(CASES["copies"])
    assert (environment(manifests)["NUM_SHARD"], environment(manifests)["NUM_REPLICA"]) == ("4", "2")
    assert container(manifests)["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert "NUM_REPLICA" not in environment(rendered())


def test_several_models_are_a_file() -> None:
    manifests = rendered(CASES["models"])
    given = environment(manifests)
    assert given["MODELS_FILE"] == "/models-file/models.yaml" and "MODEL_ID" not in given
    mounts = {mount["name"]: mount["mountPath"] for mount in container(manifests)["volumeMounts"]}
    assert mounts["models-file"] == "/models-file"
    (volume,) = (one for one in pod(manifests)["volumes"] if one["name"] == "models-file")
    assert volume["configMap"]["name"] == manifests["ConfigMap"]["metadata"]["name"] == "demo-tercet-models"
    assert yaml.safe_load(manifests["ConfigMap"]["data"]["models.yaml"]) == {
        "defaults": {"keep_alive": "30m"},
        "models": {"chat": {"model_id": "demo", "preload": True}, "org/x": {"model_id": "org/x", "memory": 4}},
    }
    assert "ConfigMap" not in rendered()


def test_secrets_reach_the_server_by_reference_alone() -> None:
    manifests = rendered(EVERYTHING)
    assert manifests["Secret"]["stringData"] == {"HF_TOKEN": "hf_x", "API_KEY": 'with "quotes"'}
    reference = {"secretKeyRef": {"name": "demo-tercet", "key": "API_KEY", "optional": True}}
    assert environment(manifests)["API_KEY"] == reference
    assert "hf_x" not in str(manifests["Deployment"])
    existing = rendered(CASES["secret"])
    assert "Secret" not in existing and environment(existing)["HF_TOKEN"]["secretKeyRef"]["name"] == "mine"
    assert "HF_TOKEN" not in environment(rendered())


def test_options_as_arguments_and_variables() -> None:
    manifests = rendered(EVERYTHING)
    assert container(manifests)["args"] == ["--max-batch-size", "32"]
    given = environment(manifests)
    assert (given["MODEL_ID"], given["REVISION"]) == ("org/some-model", "refs/pr/1")
    assert (given["MAX_TOTAL_TOKENS"], given["TRUST_REMOTE_CODE"]) == ("4096", "true")
    assert container(manifests)["image"] == "registry.example/tercet:1.2.3"


def test_services_find_the_pods() -> None:
    for name in ("demo", "my-tercet", "x" * 53):
        manifests = rendered({"serviceMonitor": {"enabled": True}}, name=name)
        labels = manifests["Deployment"]["spec"]["template"]["metadata"]["labels"]
        selector = manifests["Service"]["spec"]["selector"]
        assert selector.items() <= labels.items()
        assert selector == manifests["Deployment"]["spec"]["selector"]["matchLabels"]
        found = manifests["ServiceMonitor"]["spec"]["selector"]["matchLabels"]
        assert found.items() <= manifests["Service"]["metadata"]["labels"].items()
        assert len(manifests["Service"]["metadata"]["name"]) <= 63


def test_scaling_by_the_queue() -> None:
    hpa, keda = rendered(CASES["hpa"]), rendered(CASES["keda"])
    assert "replicas" not in hpa["Deployment"]["spec"] and "replicas" not in keda["Deployment"]["spec"]
    (metric,) = hpa["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == "tgi_queue_size"
    (trigger,) = keda["ScaledObject"]["spec"]["triggers"]
    assert trigger["metadata"]["query"] == 'sum(tgi_queue_size{namespace="prod", service="demo-tercet"})'
    assert trigger["metricType"] == "AverageValue"
    for manifests in (hpa, keda, rendered({"replicas": 2})):
        assert manifests["PodDisruptionBudget"]["spec"]["maxUnavailable"] == 1
    assert "PodDisruptionBudget" not in rendered(), "one pod alone could never be moved"


def test_models_outlive_the_release() -> None:
    claim = rendered(EVERYTHING)["PersistentVolumeClaim"]
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert claim["spec"]["storageClassName"] == "fast"
    other = rendered(CASES["claim"])
    assert "PersistentVolumeClaim" not in other
    volume = next(volume for volume in pod(other)["volumes"] if volume["name"] == "models")
    assert volume["persistentVolumeClaim"] == {"claimName": "models"}


@pytest.mark.parametrize(
    "values",
    [
        {"gpu": 1}, {"model": {"name": "x"}}, {"model": {"id": ""}}, {"gpus": -1}, {"image": {"tag": "latest"}},
        {"autoscaling": {"kind": "magic"}}, {"env": {"PORT": "80"}}, {"env": {"API_KEY": "secret"}},
        {"sharedMemory": "much"}, {"service": {"port": 0}}, {"gpus": 3, "copies": 2}, {"copies": 0},
        {"models": {"chat": {"preload": True}}}, {"modelDefaults": {"memory": 4}},
        {"models": {"chat": {"model_id": "demo"}}, "copies": 2},
    ],
)  # fmt: skip
def test_mistakes_are_refused(values: Values) -> None:
    with pytest.raises(helm_python.HelmError):
        rendered(values)
