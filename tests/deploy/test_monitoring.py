"""Alert rules and dashboard fire when they should and name what processes export; the pages say what they say."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml

from base.metrics import TRANSFER_FAILURES, Metrics
from decode_node.request import RequestState
from deploy.monitoring.generate import HERE, dashboard, files
from prefill_node.attempt import HeldState
from tests.docs.sizing import INSTALL, Example, with_example
from tests.test_house import ROOT

TARGET_LABELS = {"job", "instance", "component"}
"""What the scrape configuration adds to every series."""
KUBERNETES = HERE.parent / "kubernetes" / "base"
VALUES = {
    "stage": {"queue", "prefill_queue", "prefill", "transfer", "admission", "first_step"},
    "component": {"gateway", "prefill", "decode"},
    "state": {"free", "cached"} | {state.value for state in RequestState} | {state.label for state in HeldState},
    "pool": {"device", "host"},
    "reason": {*TRANSFER_FAILURES, "queue_full"},
}
RULES = [rule for group in yaml.safe_load((HERE / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
PANELS = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
EXPRESSIONS = [rule["expr"] for rule in RULES] + QUERIES


def promtool() -> str:
    beside = Path(sys.executable).parent / "promtool"
    found = str(beside) if beside.exists() else shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed; deploy/setup.sh fetches it where it can")
    return found


def exported() -> dict[str, set[str]]:
    """Every sample name that a process exports, with its own labels."""
    names: dict[str, set[str]] = {}
    for collector in vars(Metrics()).values():
        labels = set(getattr(collector, "_labelnames", ()))
        match getattr(collector, "_type", None):
            case "counter":
                names[f"{collector._name}_total"] = labels
            case "gauge":
                names[collector._name] = labels
            case "histogram":
                names |= {f"{collector._name}_{part}": labels for part in ("sum", "count")}
                names[f"{collector._name}_bucket"] = labels | {"le"}
    return names


def selectors(expression: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The series that an expression names, with the values that it matches labels against."""
    for name, matchers in re.findall(r"\b(hisparse_pd_\w+)(?:\{([^}]*)\})?", expression):
        yield name, dict(re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"', matchers))


def test_the_generated_files_are_up_to_date() -> None:
    """`python -m deploy.monitoring.generate` rewrites them."""
    for name, text in files().items():
        assert (HERE / name).read_text() == text, name


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_series_that_is_asked_for_exists_with_these_labels(expression: str) -> None:
    known = exported()
    series = list(selectors(expression))
    for name, labels in series:
        assert name in known, f"no process exports {name}"
        assert labels.keys() <= known[name] | TARGET_LABELS, f"{name} has the labels {known[name]}"
        for label, value in labels.items():
            if label in VALUES:
                assert set(value.split("|")) <= VALUES[label], f"{label} is never {value}"
    grouped = {label for by in re.findall(r"\bby \(([^)]*)\)", expression) for label in re.split(r",\s*", by)}
    assert grouped <= TARGET_LABELS.union(*(known[name] for name, _ in series))
    assert set(re.findall(r"hisparse_pd:[\w:]+", expression)) <= RECORDED


def test_each_alert_fires_on_what_it_is_for_and_not_on_what_is_harmless() -> None:
    done = subprocess.run(
        [promtool(), "test", "rules", "alerts_test.yaml"], cwd=HERE, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_fires_somewhere_in_that_test() -> None:
    """One that never does there may never do so at all."""
    fired = {
        case["alertname"]
        for test in yaml.safe_load((HERE / "alerts_test.yaml").read_text())["tests"]
        for case in test["alert_rule_test"]
        if case["exp_alerts"]
    }
    assert fired == set(ALERTS)


def test_the_queries_of_the_dashboard_are_valid(tmp_path: Path) -> None:
    """As Prometheus reads them, with Grafana's variables filled in."""
    rules = [
        {"record": f"panel:query_{number}", "expr": query.replace("$__rate_interval", "1m").replace("$instance", ".*")}
        for number, query in enumerate(QUERIES)
    ]
    (tmp_path / "queries.yaml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = subprocess.run(
        [promtool(), "check", "rules", "queries.yaml"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def metric_is(directory: Path, name: str, given: Mapping[str, str], wanted: float, labels: str) -> None:
    """Assert what an autoscaler reads of these series."""
    rules = yaml.safe_load((HERE.parent / "kubernetes/components/autoscaling/prometheus-adapter.yaml").read_text())
    [query] = [
        rule["metricsQuery"] for kind in rules["rules"].values() if kind for rule in kind if rule["name"]["as"] == name
    ]
    asked = {
        "expr": query.replace("<<.GroupBy>>", "pod").replace("<<.LabelMatchers>>", 'namespace="n"'),
        "eval_time": "5m",
        "exp_samples": [{"labels": labels, "value": wanted}],
    }
    series = [{"series": each, "values": values} for each, values in given.items()]
    test = {"tests": [{"interval": "15s", "input_series": series, "promql_expr_test": [asked]}]}
    (directory / "test.yaml").write_text(yaml.safe_dump(test))
    done = subprocess.run([promtool(), "test", "rules", "test.yaml"], cwd=directory, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


POD = 'namespace="n",pod="p"'


@pytest.mark.parametrize(
    ("tokens", "prompts", "wanted"), [(131_072, 1, 1), (262_144, 2, 2), (5_000, 50, 5_000 / 16_384), (0, 0, 0)]
)
def test_the_autoscaler_wants_no_more_prefill_nodes_than_prompts(
    tmp_path: Path, tokens: int, prompts: int, wanted: float
) -> None:
    given = {
        f"hisparse_pd_prompt_tokens_waiting{{{POD}}}": f"{tokens}x20",
        f'hisparse_pd_requests{{{POD},state="computing"}}': f"{prompts}x20",
        f'hisparse_pd_requests{{{POD},state="sent"}}': "7x20",
    }
    metric_is(tmp_path, "hisparse_pd_prefill_nodes_wanted", given, wanted, '{pod="p"}')


def test_the_autoscaler_reads_kv_use_of_each_decode_node(tmp_path: Path) -> None:
    given = {f"hisparse_pd_kv_usage{{{POD}}}": "0.9x20"}
    metric_is(tmp_path, "hisparse_pd_decode_kv_usage", given, 0.9, '{pod="p"}')


@pytest.mark.parametrize(("tokens", "batch", "wanted"), [(10, 12, 0.195), (10, 4, 0), (0, 12, 0)])
def test_slow_tokens_want_decode_nodes_only_where_steps_are_large(
    tmp_path: Path, tokens: int, batch: int, wanted: float
) -> None:
    """A step of few requests takes as long elsewhere. Where nothing is generated the metric is 0, and not missing."""
    bucket = 'hisparse_pd_inter_token_seconds_bucket{namespace="n",le='
    given = {
        f'{bucket}"0.1"}}': "0x20",
        f'{bucket}"0.2"}}': f"0+{tokens}x20",
        f'{bucket}"+Inf"}}': f"0+{tokens}x20",
        f"hisparse_pd_decode_batch_size_sum{{{POD}}}": f"0+{10 * batch}x20",
        f"hisparse_pd_decode_batch_size_count{{{POD}}}": "0+10x20",
    }
    metric_is(tmp_path, "hisparse_pd_decode_inter_token_seconds", given, wanted, "{}")


TROUBLESHOOT = (ROOT / "docs/operations/troubleshoot.md").read_text()
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}


def test_the_worked_example_is_what_the_sizing_functions_say() -> None:
    """`python -m tests.docs.sizing` rewrites it."""
    text = INSTALL.read_text()
    assert with_example(text) == text


def test_the_worked_example_can_be_served() -> None:
    example = Example()
    sizes = example.sizes(example.running, example.pool_gib)
    assert sizes.has_all_buffers, "every request has a full hot buffer"
    assert sizes.num_host_slots >= example.running * example.context, "and host memory for its whole context"
    assert example.gpus * sizes.host_bytes <= (example.host_gib - example.reserved_gib) * 2**30


def test_every_alert_has_a_row_and_every_row_an_alert() -> None:
    rows = re.findall(r'^\| <a id="([a-z]+)"></a>`(\w+)` \| [^|]+ \| [^|]+ \|$', TROUBLESHOOT, flags=re.MULTILINE)
    assert [alert for _, alert in rows] == list(ALERTS)
    for anchor, alert in rows:
        assert ALERTS[alert]["annotations"]["runbook_url"] == f"docs/operations/troubleshoot.md#{anchor}"
