"""What the manifests of rank groups promise, and who may connect to whom in the cluster."""

from pathlib import Path

import pytest
import yaml

from cli.rank_group import check_hosts
from cli.serve import RANK_PORTS
from decode_node.config import DecodeConfig
from tests.deploy.program import DEPLOY, ROLES
from tests.deploy.rendered import (
    OF_SEVERAL_HOSTS,
    command_line,
    container,
    every_group,
    every_node,
    every_overlay,
    gib,
    named,
    pod,
    ports,
    rules,
    selects,
    template,
    transfer_ports,
    workload,
)


@every_node
@every_group
def test_a_pod_of_a_group_has_the_machines_gpus_and_a_rank_for_each(overlay: str, role: str) -> None:
    each = container(overlay, role)
    requests, flags = each["resources"]["requests"], command_line(each).values
    hosts = 2 if overlay in OF_SEVERAL_HOSTS else 1
    assert requests == each["resources"]["limits"]
    assert requests["cpu"].isdigit()
    assert int(requests["nvidia.com/gpu"]) * hosts == flags["ranks"]
    assert (flags["nnodes"], flags["device"], flags["transfer_protocol"]) == (hosts, "cuda", "tcp")
    volumes = {volume["name"]: volume for volume in pod(overlay, role)["volumes"]}
    shm = volumes["shm"]["emptyDir"]
    assert shm["medium"] == "Memory", "which counts as the container's"
    overhead = float(template(overlay, role)["metadata"]["annotations"]["hisparse-pd/memory-overhead-gib"])
    alone = float(template("gpu-tcp", role)["metadata"]["annotations"]["hisparse-pd/memory-overhead-gib"])
    assert overhead == int(requests["nvidia.com/gpu"]) * alone + gib(shm["sizeLimit"])


@every_node
@every_group
def test_the_ports_of_all_ranks_are_open_to_whom_those_of_the_first_are(overlay: str, role: str) -> None:
    ranks = int(container(overlay, role)["resources"]["requests"]["nvidia.com/gpu"])
    first = ports(container(overlay, role))
    for name, policy in (("control", "hisparse-pd-nodes"), ("http", "hisparse-pd-metrics")):
        last = first[name] + RANK_PORTS * (ranks - 1)
        rules = named(overlay, "NetworkPolicy", policy)["spec"]["ingress"][0]["ports"]
        assert any(rule["port"] <= first[name] and last <= rule["endPort"] for rule in rules if "endPort" in rule)
        others = {
            number + RANK_PORTS * rank for other, number in first.items() if other != name for rank in range(ranks)
        }
        for rule in (rule for rule in rules if "endPort" in rule):
            assert not others & set(range(rule["port"], rule["endPort"] + 1)), "no other ports by mistake"
    least, most = transfer_ports(overlay, role)
    assert most - least + 1 == 8 * ranks, "docs/operations/secure.md: count eight ports per process"


@every_group
def test_prometheus_finds_every_rank_of_a_decode_node(overlay: str) -> None:
    """As an instance of its own, by the service's ports."""
    first = ports(container(overlay, "decode"))["http"]
    open_ports = {port["name"]: port for port in named(overlay, "Service", "hisparse-pd-decode")["spec"]["ports"]}
    monitored = yaml.safe_load((DEPLOY / "monitoring/ranks.yaml").read_text())["spec"]["endpoints"]
    assert [endpoint["port"] for endpoint in monitored] == [f"http-{rank}" for rank in range(1, 8)]
    for rank, endpoint in enumerate(monitored, start=1):
        number = first + RANK_PORTS * rank
        assert open_ports[endpoint["port"]] == {"name": f"http-{rank}", "port": number, "targetPort": number}
        assert "__meta_kubernetes_endpoint_port_name" in endpoint["relabelings"][1]["sourceLabels"]


@every_node
@pytest.mark.parametrize("overlay", OF_SEVERAL_HOSTS)
def test_the_hosts_of_a_node_find_each_other_by_the_controllers_words(overlay: str, role: str) -> None:
    whole = workload(overlay, role)
    each = container(overlay, role)
    flags = command_line(each).values
    assert flags["nnodes"] == 2
    assert "--node-rank=$(LWS_WORKER_INDEX)" in each["args"]
    assert "--dist-init-addr=$(LWS_LEADER_ADDRESS):5000" in each["args"]
    assert whole["spec"]["leaderWorkerTemplate"]["size"] == 2
    names = ("ranks", "nnodes", "node_rank", "dist_init_addr", "key_dir")
    check_hosts(DecodeConfig(model_path=Path(), **{name: flags[name] for name in names}))
    policy = named(overlay, "NetworkPolicy", f"hisparse-pd-{role}-hosts")["spec"]
    assert selects(policy["podSelector"], role)
    assert policy["ingress"] == [
        {"from": [{"podSelector": policy["podSelector"]}], "ports": [{"port": 1024, "endPort": 65535}]}
    ]


@every_overlay
def test_nobody_may_connect_who_need_not(overlay: str) -> None:
    deny = named(overlay, "NetworkPolicy", "default-deny")["spec"]
    assert deny == {"podSelector": {}, "policyTypes": ["Ingress"]}
    anyone = [(policy, rule) for policy, rule in rules(overlay) if "from" not in rule]
    assert [(policy["metadata"]["name"], rule["ports"]) for policy, rule in anyone] == [
        ("hisparse-pd-gateway", [{"port": "http"}])
    ]


@pytest.mark.parametrize(
    ("role", "port", "whom"),
    [
        ("gateway", "control", {"prefill", "decode"}),
        ("prefill", "control", {"gateway", "prefill", "decode"}),
        ("decode", "control", {"gateway", "prefill", "decode"}),
        ("prefill", "transfer", {"prefill", "decode"}),
        ("decode", "transfer", {"prefill", "decode"}),
        ("prefill", "http", set()),
        ("decode", "http", set()),
    ],
)
@every_overlay
def test_pods_may_connect_where_they_must(overlay: str, role: str, port: str, whom: set[str]) -> None:
    number = transfer_ports(overlay, role)[0] if port == "transfer" else ports(container(overlay, role))[port]
    if overlay in OF_SEVERAL_HOSTS and role != "gateway":
        whom = whom | {role}  # whose hosts are not told from those of another node
    allowed = set()
    for policy, rule in rules(overlay):
        if selects(policy["spec"]["podSelector"], role) and any(
            each["port"] == port
            or (isinstance(each["port"], int) and each["port"] <= number <= each.get("endPort", each["port"]))
            for each in rule["ports"]
        ):
            for source in rule.get("from", []):
                allowed |= {r for r in ROLES if "podSelector" in source and selects(source["podSelector"], r)}
    assert allowed == whom


@every_node
@every_overlay
def test_mooncakes_ports_are_the_ones_that_are_open(overlay: str, role: str) -> None:
    nodes = named(overlay, "NetworkPolicy", "hisparse-pd-nodes")["spec"]["ingress"][1]
    assert [(each["port"], each["endPort"]) for each in nodes["ports"]] == [transfer_ports(overlay, role)]
