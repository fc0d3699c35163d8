"""Command lines, ports, endpoints and metrics in the files are the program's own: they cannot drift apart."""

import re

import pytest
import yaml
from fastapi import FastAPI
from fastapi.testclient import TestClient

from cli.flags import configured
from decode_node.config import DecodeConfig
from hisparse.config import parse_config
from prefill_node.config import PrefillConfig
from service.config import NodeConfig
from service.node_checks import check
from service.status import status_router
from tests.deploy.program import DEPLOY, ROLES, default, read_shell
from tests.deploy.rendered import (
    GROUPS,
    command_line,
    container,
    containers,
    every_node,
    every_overlay,
    every_role,
    named,
    of_kind,
)
from tests.deploy.test_monitoring import exported, selectors

CONFIGS: dict[str, type[NodeConfig]] = {"prefill": PrefillConfig, "decode": DecodeConfig}


@every_overlay
def test_the_program_accepts_every_command_line(overlay: str) -> None:
    for role, each in containers(overlay):
        line = command_line(each)
        assert line.command in (role, "tiny-model")
        if line.command in CONFIGS:
            # A transport that this machine lacks is not what is asked here.
            check(configured(CONFIGS[line.command], {**line.values, "transfer_protocol": "tcp", "ib_device": ""}))
        if line.command == "decode":
            parse_config(line.values["hisparse_config"], model_top_k=64)


@every_role
@every_overlay
def test_ports_are_those_that_the_program_listens_on(overlay: str, role: str) -> None:
    each = container(overlay, role)
    values = command_line(each).values
    assert {port["name"]: port["containerPort"] for port in each["ports"]} == {
        "http": values["port"],
        "control": values["control_port"],
    }
    apart = 100 if overlay in GROUPS and role != "gateway" else 0  # so that ranks' control ports can be opened alone
    assert values["port"] == default(role, "port")
    assert values["control_port"] == default(role, "control_port") + apart
    for service in of_kind(overlay, "Service"):
        if service["spec"]["selector"]["app.kubernetes.io/component"] == role:
            for port in service["spec"]["ports"]:
                if re.fullmatch(r"http-\d", port["name"]):
                    continue  # of a group's further ranks, see test_manifests.py
                assert port["port"] == values["port" if port["name"] == "http" else "control_port"]
                assert port["targetPort"] == port["name"]


@every_overlay
def test_probes_ask_for_what_every_process_answers(overlay: str) -> None:
    app = FastAPI()
    app.include_router(status_router(lambda: "nobody is registered"))
    with TestClient(app) as client:
        for role in ROLES:
            each = container(overlay, role)
            for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
                path = each[kind]["httpGet"]["path"]
                assert client.get(path).status_code == (503 if path == "/ready" else 200)


@every_node
def test_autoscalers_go_by_metrics_that_the_adapter_makes_of_the_programs(role: str) -> None:
    scaler = named("gpu-tcp", "HorizontalPodAutoscaler", f"hisparse-pd-{role}")["spec"]
    rules = yaml.safe_load((DEPLOY / "kubernetes/components/autoscaling/prometheus-adapter.yaml").read_text())["rules"]
    assert len(scaler["metrics"]) == {"prefill": 1, "decode": 3}[role]
    for metric in scaler["metrics"]:
        kind, of = ("custom", "pods") if metric["type"] == "Pods" else ("external", "external")
        (rule,) = [each for each in rules[kind] if each["name"]["as"] == metric[of]["metric"]["name"]]
        series = set(re.findall(r"\bhisparse_pd_\w+", rule["seriesQuery"]))
        asked_for = set(re.findall(r"\bhisparse_pd_\w+", rule["metricsQuery"]))
        assert series <= asked_for <= exported().keys()


def test_the_endpoint_picker_reads_metrics_of_gateways() -> None:
    config = yaml.safe_load((DEPLOY / "kubernetes/components/inference-extension/epp.yaml").read_text())
    (engine,) = next(each for each in config["plugins"] if each["type"] == "core-metrics-extractor")["parameters"][
        "engineConfigs"
    ]
    specs = [spec for key, spec in engine.items() if key.endswith("Spec") and spec]
    assert len(specs) == 3
    for name, labels in selectors(" ".join(specs)):
        assert labels.keys() <= exported()[name]


@pytest.mark.parametrize("page", ["deploy/README.md", "docs/recipes.md", "README.md"])
def test_pages_show_command_lines_that_the_program_accepts(page: str) -> None:
    text = (DEPLOY.parent / page).read_text()
    shown = [line for block in re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL) for line in _commands(block)]
    assert shown
    for line in shown:
        read_shell(line)


def _commands(block: str) -> list[str]:
    lines = (re.sub(r"\s# .*", "", line).strip() for line in block.replace("\\\n", " ").splitlines())
    return [line for line in lines if line.startswith("hisparse-pd ")]
