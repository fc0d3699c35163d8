"""What the manifests promise: valid objects, safe containers, enough memory, time to drain, keys where they belong."""

import json
import os
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from base.version import VERSION
from tests.deploy.program import ROLES
from tests.deploy.rendered import (
    KUBECTL,
    KUBERNETES,
    Object,
    command_line,
    container,
    containers,
    every_gpu_overlay,
    every_node,
    every_overlay,
    every_role,
    gib,
    mounts,
    named,
    objects,
    pod,
    ports,
    template,
)

VERSIONS = ("1.31.0", "1.34.0")
"""Kubernetes releases that the manifests are valid for."""
KINDS = {
    "Namespace",
    "Deployment",
    "StatefulSet",
    "Service",
    "PodDisruptionBudget",
    "NetworkPolicy",
    "HorizontalPodAutoscaler",
    "PersistentVolumeClaim",
    "LeaderWorkerSet",
}


@pytest.mark.parametrize("version", VERSIONS)
@every_overlay
def test_every_object_is_valid(overlay: str, version: str) -> None:
    for item in objects(overlay):
        assert item["kind"] in KINDS
        known = as_stateful_set(item) if item["kind"] == "LeaderWorkerSet" else item
        kubernetes_validate.validate(known, version, strict=True)


def as_stateful_set(item: Object) -> Object:
    """With the pods of a LeaderWorkerSet, which are Kubernetes' own."""
    pods = item["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    labels = pods["metadata"]["labels"]
    spec = {"serviceName": "pods", "selector": {"matchLabels": labels}, "template": pods}
    return {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "pods"}, "spec": spec}


@every_node
@every_overlay
def test_nodes_register_with_every_gateway(overlay: str, role: str) -> None:
    assert f"--advertise-host=$(POD_NAME).hisparse-pd-{role}" in container(overlay, role)["args"], (
        "a name that it keeps"
    )
    (gateway,) = command_line(container(overlay, role)).values["gateways"]
    name, _, port = gateway.partition(":")
    service = named(overlay, "Service", name)["spec"]
    assert service["clusterIP"] == "None", "its name has the addresses of all replicas"
    assert service["selector"]["app.kubernetes.io/component"] == "gateway"
    assert int(port) == ports(container(overlay, "gateway"))["control"]


@every_overlay
def test_containers_have_no_privilege_that_they_need_not(overlay: str) -> None:
    for role in ROLES:
        spec = pod(overlay, role)
        assert spec["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
        assert not [volume for volume in spec["volumes"] if "hostPath" in volume]
    for role, each in containers(overlay):
        context = each["securityContext"]
        assert context["readOnlyRootFilesystem"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"]["drop"] == ["ALL"]
        pins_memory = overlay == "gpu-rdma" and role != "gateway"
        assert context["capabilities"].get("add", []) == (["IPC_LOCK"] if pins_memory else [])


@every_overlay
def test_images_have_one_version_and_it_is_the_packages(overlay: str) -> None:
    target = "cpu" if overlay == "cpu-demo" else "cuda13"
    for _, each in containers(overlay):
        assert each["image"].endswith(f"hisparse-pd:{VERSION}-{target}")


@every_role
@every_overlay
def test_the_checkpoint_is_mounted_where_it_is_looked_for(overlay: str, role: str) -> None:
    each = container(overlay, role)
    (mount,) = [mount for mount in each["volumeMounts"] if mount["name"] == "model"]
    assert str(command_line(each).values["model_path"]) == mount["mountPath"]
    assert mount["readOnly"]
    (volume,) = [volume for volume in pod(overlay, role)["volumes"] if volume["name"] == "model"]
    if overlay == "cpu-demo":
        (maker,) = pod(overlay, role)["initContainers"]
        assert command_line(maker).command == "tiny-model"
        assert str(command_line(maker).values["directory"]) == mount["mountPath"]
    else:
        claim = volume["persistentVolumeClaim"]
        assert claim["readOnly"]
        assert named(overlay, "PersistentVolumeClaim", claim["claimName"])["spec"]["accessModes"] == ["ReadOnlyMany"]


@every_node
@every_overlay
def test_memory_follows_from_the_host_pool(overlay: str, role: str) -> None:
    """What is pinned cannot be taken back: all of it is asked for."""
    resources = container(overlay, role)["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    annotations = template(overlay, role)["metadata"]["annotations"]
    overhead = float(annotations["hisparse-pd/memory-overhead-gib"])
    pool = json.loads(command_line(container(overlay, role)).values.get("hisparse_config") or "{}").get(
        "host_pool_gib", 0
    )
    assert (pool > 0) == (role == "decode"), "a pool in proportion to device memory has no size that could be asked for"
    assert gib(resources["requests"]["memory"]) == pool + overhead


@every_overlay
def test_a_gateway_has_memory_for_the_requests_that_it_may_hold(overlay: str) -> None:
    """Each byte of them takes up to 10 as token ids; a process with a small tokenizer takes half a GiB."""
    gateway = container(overlay, "gateway")
    held = command_line(gateway).values["max_total_body_mib"] / 1024
    assert gib(gateway["resources"]["limits"]["memory"]) >= 0.5 + 10 * held


@every_role
@every_overlay
def test_a_pod_has_time_to_drain(overlay: str, role: str) -> None:
    each = container(overlay, role)
    flags = command_line(each).values
    drain = float(flags["drain_timeout"])
    before = float(each.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [0, 0])[1])
    assert pod(overlay, role)["terminationGracePeriodSeconds"] >= before + drain + 20
    if role == "gateway":
        assert drain >= float(flags["request_timeout"])
        assert before > 0, "connections still come until every node knows that the pod is leaving"


@every_role
@every_gpu_overlay
def test_each_process_gets_its_own_secret_keys_and_no_other(overlay: str, role: str) -> None:
    each = container(overlay, role)
    keys = Path(command_line(each).values["key_dir"])
    mounted = {Path(mount["mountPath"]).relative_to(keys) for mount in mounts(overlay, role, keys)}
    expected = {"cluster.key_secret", f"{role}.key_secret", "allowed"} | (
        {"operator.token"} if role == "decode" else set()
    )
    assert set(map(str, mounted)) == expected
    for volume in pod(overlay, role)["volumes"]:
        if "secret" in volume:
            assert volume["secret"]["defaultMode"] == 0o440, "the program refuses secrets that everyone can read"


@every_gpu_overlay
def test_what_is_revoked_while_a_process_runs_is_mounted_as_a_folder(overlay: str) -> None:
    """A file that is mounted by itself (subPath) does not follow its Secret."""
    clients = Path(command_line(container(overlay, "gateway")).values["api_key_file"])
    (mount,) = mounts(overlay, "gateway", clients.parent)
    assert "subPath" not in mount
    for role in ROLES:
        (mount,) = mounts(overlay, role, Path("/keys/allowed"))
        assert "subPath" not in mount


def test_the_secrets_are_made_as_they_are_mounted(tmp_path: Path) -> None:
    files = ["cluster.key_secret", "operator.token", *(f"{role}.key_secret" for role in ROLES)]
    (tmp_path / "allowed").mkdir()
    for name in [*files, "api.keys", *(f"allowed/{role}.key" for role in ROLES)]:
        (tmp_path / name).write_text(name)
    script = [str(KUBERNETES / "make-secrets.sh"), str(tmp_path), str(tmp_path / "api.keys")]
    environment = {**os.environ, "PATH": f"{Path(KUBECTL).parent}:{os.environ['PATH']}"}
    text = subprocess.run(script, check=True, capture_output=True, text=True, timeout=60, env=environment).stdout
    made = {secret["metadata"]["name"]: secret for secret in yaml.safe_load_all(text)}
    assert {secret["metadata"]["namespace"] for secret in made.values()} == {"hisparse-pd"}
    used = set()
    for role in ROLES:
        names = {v["name"]: v["secret"]["secretName"] for v in pod("gpu-tcp", role)["volumes"] if "secret" in v}
        used |= set(names.values())
        for mount in container("gpu-tcp", role)["volumeMounts"]:
            if mount["name"] in names and "subPath" in mount:
                assert mount["subPath"] in made[names[mount["name"]]]["data"]
    clients = Path(command_line(container("gpu-tcp", "gateway")).values["api_key_file"])
    assert clients.name in made["hisparse-pd-api-keys"]["data"]
    assert used == made.keys()
    assert made["hisparse-pd-allowed"]["data"].keys() == {f"{role}.key" for role in ROLES}


def kustomized(directory: Path) -> list[Object]:
    command = [KUBECTL, "kustomize", str(directory)]
    text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    return list(yaml.safe_load_all(text))


def with_component(directory: Path, overlay: str, component: str) -> list[Object]:
    base = os.path.relpath(KUBERNETES, directory)
    made = {"resources": [f"{base}/overlays/{overlay}"], "components": [f"{base}/components/{component}"]}
    (directory / "kustomization.yaml").write_text(yaml.safe_dump(made))
    return kustomized(directory)


@pytest.mark.parametrize("overlay", ["gpu-group", "gpu-group-two-hosts"])
def test_a_job_can_download_the_checkpoint(tmp_path: Path, overlay: str) -> None:
    """Into the claim that pods of the service mount, which the service then makes no more."""
    claim, job = downloading = kustomized(KUBERNETES / "download")
    for item in downloading:
        kubernetes_validate.validate(item, VERSIONS[0], strict=True)
    spec = job["spec"]["template"]["spec"]
    assert spec["containers"][0]["image"] == container(overlay, "prefill")["image"]
    for mounted in (spec, pod(overlay, "prefill")):
        (volume,) = [volume for volume in mounted["volumes"] if volume["name"] == "model"]
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    service = with_component(tmp_path, overlay, "own-model")
    assert not [item for item in service if item["kind"] == "PersistentVolumeClaim"]


def test_tls_can_be_added(tmp_path: Path) -> None:
    (gateway,) = [item for item in with_component(tmp_path, "gpu-tcp", "tls") if item["kind"] == "Deployment"]
    kubernetes_validate.validate(gateway, VERSIONS[0], strict=True)
    (each,) = gateway["spec"]["template"]["spec"]["containers"]
    flags = command_line(each).values
    (mount,) = [mount for mount in each["volumeMounts"] if mount["name"] == "tls"]
    assert {str(flags["ssl_certfile"]), str(flags["ssl_keyfile"])} == {
        f"{mount['mountPath']}/tls.{kind}" for kind in ("crt", "key")
    }
    assert each["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
