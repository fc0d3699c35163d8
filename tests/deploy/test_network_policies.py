"""Who may connect to whom in the cluster, by the manifests' network policies."""

import pytest

from tests.deploy.program import ROLES
from tests.deploy.rendered import (
    OF_SEVERAL_HOSTS,
    container,
    every_node,
    every_overlay,
    named,
    ports,
    rules,
    selects,
    transfer_ports,
)


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
