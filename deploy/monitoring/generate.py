"""Writes what is made from other files here: prometheusrule.yaml from alerts.yaml, dashboard.json from panels.py.

`python -m deploy.monitoring.generate` rewrites both; a test checks that they are up to date.
"""

import json
from pathlib import Path
from typing import Any

import yaml

from deploy.monitoring.panels import EVERY, ROWS, Panel

HERE = Path(__file__).parent
GENERATED = "# Made from alerts.yaml by generate.py.\n"
WIDTH, HEIGHT = 24, 7
"""Grafana's grid is 24 columns wide."""
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard() -> dict[str, Any]:
    """Grafana's own model of the dashboard, to be imported."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        panels.append(_row(len(panels) + 1, title, y))
        y += 1
        columns = 4 if len(row) % 4 == 0 else 3 if len(row) % 3 == 0 else 2
        for number, panel in enumerate(row):
            width = WIDTH // columns
            place = {
                "x": number % columns * width,
                "y": y + number // columns * HEIGHT,
                "w": width,
                "h": HEIGHT,
            }
            panels.append(_panel(len(panels) + 1, panel, place))
        y += -(-len(row) // columns) * HEIGHT
    return {
        "title": "hisparse-pd",
        "uid": "hisparse-pd",
        "tags": ["hisparse-pd"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_datasource_variable(), _instance_variable()]},
        "panels": panels,
    }


def _row(number: int, title: str, y: int) -> dict[str, Any]:
    place = {"x": 0, "y": y, "w": WIDTH, "h": 1}
    return {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.says,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "min": 0,
                "custom": {
                    "fillOpacity": 20 if panel.stacked else 0,
                    "stacking": {"mode": "normal" if panel.stacked else "none"},
                },
            },
            "overrides": [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + which), "datasource": DATASOURCE, "expr": expression, "legendFormat": legend}
            for which, (legend, expression) in enumerate(panel.queries.items())
        ],
    }


def _datasource_variable() -> dict[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "current": {}}


def _instance_variable() -> dict[str, Any]:
    query = f"label_values(up{{{EVERY}}}, instance)"
    return {
        "name": "instance",
        "label": "Process",
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": "instance"},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def prometheus_rule() -> dict[str, Any]:
    """The rules of alerts.yaml as the Prometheus operator takes them."""
    rules = yaml.safe_load((HERE / "alerts.yaml").read_text())
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "hisparse-pd", "labels": {"app.kubernetes.io/name": "hisparse-pd"}},
        "spec": rules,
    }


def files() -> dict[str, str]:
    """The generated files by name."""
    return {
        "prometheusrule.yaml": GENERATED + yaml.safe_dump(prometheus_rule(), sort_keys=False, width=1000),
        "dashboard.json": json.dumps(dashboard(), indent=1) + "\n",
    }


if __name__ == "__main__":
    for name, text in files().items():
        (HERE / name).write_text(text)
