"""The Kubernetes overlays, as `kubectl kustomize` puts them together."""

import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.program import DEPLOY, ROLES, CommandLine, read

KUBERNETES = DEPLOY / "kubernetes"
OVERLAYS = tuple(sorted(path.name for path in (KUBERNETES / "overlays").iterdir()))

GROUPS = ("gpu-group", "gpu-group-two-hosts")
"""Those in which a pod has eight ranks."""
OF_SEVERAL_HOSTS = ("gpu-group-two-hosts",)

_BESIDE = Path(sys.executable).with_name("kubectl")
KUBECTL = str(_BESIDE) if _BESIDE.exists() else "kubectl"
"""From the extra `dev`, or whichever is installed."""

every_overlay = pytest.mark.parametrize("overlay", OVERLAYS)
every_role = pytest.mark.parametrize("role", ROLES)
every_node = pytest.mark.parametrize("role", ["prefill", "decode"])
every_gpu_overlay = pytest.mark.parametrize("overlay", ["gpu-tcp", "gpu-rdma", *GROUPS])
every_group = pytest.mark.parametrize("overlay", GROUPS)

Object = dict[str, Any]


@functools.cache
def objects(overlay: str) -> tuple[Object, ...]:
    command = [KUBECTL, "kustomize", str(KUBERNETES / "overlays" / overlay)]
    text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    return tuple(yaml.safe_load_all(text))


def of_kind(overlay: str, *kinds: str) -> list[Object]:
    return [item for item in objects(overlay) if item["kind"] in kinds]


def named(overlay: str, kind: str, name: str) -> Object:
    return next(item for item in of_kind(overlay, kind) if item["metadata"]["name"] == name)


def workload(overlay: str, role: str) -> Object:
    nodes = "LeaderWorkerSet" if overlay in OF_SEVERAL_HOSTS else "StatefulSet"
    return named(overlay, "Deployment" if role == "gateway" else nodes, f"hisparse-pd-{role}")


def template(overlay: str, role: str) -> Object:
    """Of its pods."""
    spec = workload(overlay, role)["spec"]
    found: Object = spec["template"] if "template" in spec else spec["leaderWorkerTemplate"]["workerTemplate"]
    return found


def pod(overlay: str, role: str) -> Object:
    spec: Object = template(overlay, role)["spec"]
    return spec


def container(overlay: str, role: str) -> Object:
    only: Object
    (only,) = pod(overlay, role)["containers"]
    return only


def containers(overlay: str) -> Iterator[tuple[str, Object]]:
    """Every container with the role of its pod, those that run before it included."""
    for role in ROLES:
        spec = pod(overlay, role)
        for each in [*spec.get("initContainers", []), *spec["containers"]]:
            yield role, each


def command_line(of: Object) -> CommandLine:
    """What a container runs. Variables of the pod are filled in."""
    filled = {
        "POD_IP": "10.1.2.3",
        "POD_NAME": "pod-0",
        "LWS_WORKER_INDEX": "1",
        "LWS_LEADER_ADDRESS": "pod-0.pods.hpd",
    }
    words = list(of["args"])
    for name, value in filled.items():
        if any(f"$({name})" in word for word in words) and not name.startswith("LWS_"):  # its controller adds those
            assert name in {variable["name"] for variable in of["env"]}, name
        words = [word.replace(f"$({name})", value) for word in words]
    assert not any("$(" in word for word in words), words
    return read(words)


def gib(quantity: str) -> float:
    """A quantity of memory in GiB."""
    units = {"Gi": 1.0, "Mi": 1 / 1024}
    return float(quantity[:-2]) * units[quantity[-2:]]


def ports(of: Object) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in of["ports"]}


def mounts(overlay: str, role: str, folder: Path) -> list[Object]:
    """What is mounted at that folder or in it."""
    mounts = container(overlay, role)["volumeMounts"]
    return [mount for mount in mounts if Path(mount["mountPath"]).is_relative_to(folder)]


def transfer_ports(overlay: str, role: str) -> tuple[int, int]:
    least, _, most = command_line(container(overlay, role)).values["transfer_ports"].partition("-")
    return int(least), int(most)


def rules(overlay: str) -> list[tuple[Object, Object]]:
    """Every rule with its policy."""
    return [
        (policy, rule) for policy in of_kind(overlay, "NetworkPolicy") for rule in policy["spec"].get("ingress", [])
    ]


def selects(selector: Object, role: str) -> bool:
    labels = {"app.kubernetes.io/name": "hisparse-pd", "app.kubernetes.io/component": role}
    if not selector.get("matchLabels", {}).items() <= labels.items():
        return False
    return all(labels[each["key"]] in each["values"] for each in selector.get("matchExpressions", []))
