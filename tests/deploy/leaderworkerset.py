"""The schema of a LeaderWorkerSet (leaderworkerset.x-k8s.io/v1), as far as the manifests use it.

Its fields and values are those of the API's types in kubernetes-sigs/lws (api/leaderworkerset/v1). Its pods are
Kubernetes' own, and are checked as those of a StatefulSet.
"""

from typing import Any

import jsonschema
import kubernetes_validate

_COUNT = {"type": "integer", "minimum": 0}


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


SCHEMA = _object(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "leaderworkerset.x-k8s.io/v1"},
    kind={"const": "LeaderWorkerSet"},
    metadata={"type": "object"},
    spec=_object(
        ["leaderWorkerTemplate"],
        replicas=_COUNT,
        startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
        networkConfig=_object(["subdomainPolicy"], subdomainPolicy={"enum": ["Shared", "UniquePerReplica"]}),
        rolloutStrategy=_object(
            ["type"],
            type={"const": "RollingUpdate"},
            rollingUpdateConfiguration=_object(
                [],
                partition=_COUNT,
                maxUnavailable={"type": ["integer", "string"]},
                maxSurge={"type": ["integer", "string"]},
            ),
        ),
        leaderWorkerTemplate=_object(
            ["workerTemplate"],
            size={"type": "integer", "minimum": 1},
            restartPolicy={"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
            leaderTemplate={"type": "object"},
            workerTemplate={"type": "object"},
        ),
    ),
)


def validate(item: dict[str, Any], version: str) -> None:
    """Raises ValidationError, of either package. version: of Kubernetes, for the pods."""
    jsonschema.validate(item, SCHEMA)
    pods = item["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    labels = pods["metadata"]["labels"]
    spec = {"serviceName": "pods", "selector": {"matchLabels": labels}, "template": pods}
    as_set = {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "pods"}, "spec": spec}
    kubernetes_validate.validate(as_set, version, strict=True)
