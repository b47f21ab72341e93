"""Schemas of the custom resources, of the fields that the chart uses and no others.

Sources: the definitions of LeaderWorkerSet v1 (0.7), of the Gateway API Inference Extension v1 (1.0), of the Gateway
API v1 (1.3), of KServe's LLMInferenceServiceConfig v1alpha1 (0.16), and of KubeRay's RayJob v1 (1.3).
"""

from __future__ import annotations

from typing import Any

import jsonschema

Schema = dict[str, Any]

NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", "maxLength": 253}
LABELS = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}}
ANNOTATIONS = {"type": "object", "additionalProperties": {"type": "string"}}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}


def strict(properties: Schema, *required: str) -> Schema:
    return {
        "type": "object", "properties": properties, "additionalProperties": False, "required": list(required),
    }  # fmt: skip


METADATA = strict({"name": NAME, "labels": LABELS, "annotations": ANNOTATIONS}, "name")
POD = strict(
    {"metadata": strict({"labels": LABELS, "annotations": ANNOTATIONS}), "spec": {"type": "object"}}, "metadata", "spec"
)


def resource(version: str, kind: str, spec: Schema) -> Schema:
    constants = {"apiVersion": {"const": version}, "kind": {"const": kind}}
    return strict({**constants, "metadata": METADATA, "spec": spec}, "apiVersion", "kind", "metadata", "spec")


RAY_OPTIONS = {"type": "object", "additionalProperties": {"type": "string"}}

SCHEMAS = {
    "LeaderWorkerSet": resource(
        "leaderworkerset.x-k8s.io/v1",
        "LeaderWorkerSet",
        strict(
            {
                "replicas": {"type": "integer", "minimum": 0},
                "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
                "rolloutStrategy": strict(
                    {
                        "type": {"const": "RollingUpdate"},
                        "rollingUpdateConfiguration": strict(
                            {"maxUnavailable": {"type": "integer"}, "maxSurge": {"type": "integer"}}
                        ),
                    },
                    "type",
                ),
                "leaderWorkerTemplate": strict(
                    {
                        "size": {"type": "integer", "minimum": 1},
                        "restartPolicy": {"enum": ["RecreateGroupOnPodRestart", "None"]},
                        "leaderTemplate": POD,
                        "workerTemplate": POD,
                    },
                    "workerTemplate",
                ),
            },
            "leaderWorkerTemplate",
        ),
    ),
    "InferencePool": resource(
        "inference.networking.k8s.io/v1",
        "InferencePool",
        strict(
            {
                "selector": strict({"matchLabels": LABELS}, "matchLabels"),
                "targetPorts": {"type": "array", "minItems": 1, "maxItems": 8, "items": strict({"number": PORT})},
                "endpointPickerRef": strict({"name": NAME, "port": strict({"number": PORT}, "number")}, "name"),
            },
            "selector",
            "targetPorts",
            "endpointPickerRef",
        ),
    ),
    "HTTPRoute": resource(
        "gateway.networking.k8s.io/v1",
        "HTTPRoute",
        strict(
            {
                "parentRefs": {"type": "array", "items": strict({"name": NAME, "namespace": NAME}, "name")},
                "hostnames": {"type": "array", "items": NAME},
                "rules": {
                    "type": "array",
                    "items": strict(
                        {
                            "backendRefs": {
                                "type": "array",
                                "items": strict({"group": NAME, "kind": {"type": "string"}, "name": NAME}, "name"),
                            },
                            "timeouts": strict(
                                {"request": {"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}}
                            ),
                        }
                    ),
                },
            },
            "parentRefs",
            "rules",
        ),
    ),
    "RayJob": resource(
        "ray.io/v1",
        "RayJob",
        strict(
            {
                "entrypoint": {"type": "string"},
                "submissionMode": {"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode"]},
                "shutdownAfterJobFinishes": {"type": "boolean"},
                "backoffLimit": {"type": "integer", "minimum": 0},
                "submitterPodTemplate": strict({"spec": {"type": "object"}}, "spec"),
                "rayClusterSpec": strict(
                    {
                        "headGroupSpec": strict({"rayStartParams": RAY_OPTIONS, "template": POD}, "template"),
                        "workerGroupSpecs": {
                            "type": "array",
                            "items": strict(
                                {
                                    "groupName": NAME,
                                    "replicas": {"type": "integer", "minimum": 0},
                                    "minReplicas": {"type": "integer", "minimum": 0},
                                    "maxReplicas": {"type": "integer", "minimum": 0},
                                    "rayStartParams": RAY_OPTIONS,
                                    "template": POD,
                                },
                                "groupName",
                                "minReplicas",
                                "maxReplicas",
                                "template",
                            ),
                        },
                    },
                    "headGroupSpec",
                ),
            },
            "entrypoint",
            "rayClusterSpec",
        ),
    ),
    "LLMInferenceServiceConfig": resource(
        "serving.kserve.io/v1alpha1",
        "LLMInferenceServiceConfig",
        strict({"template": {"type": "object"}}, "template"),
    ),
}


def validate(manifest: Schema) -> None:
    """Raises jsonschema.ValidationError."""
    jsonschema.validate(manifest, SCHEMAS[manifest["kind"]])
