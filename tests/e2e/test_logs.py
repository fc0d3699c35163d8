"""What processes print at start, for those who collect it by machine."""

import json
import re
import shutil
from pathlib import Path

import httpx
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.cluster import Cluster
from tests.e2e.spawn import fork

GLOG = re.compile(r"WARNING: Logging before InitGoogleLogging\(\) |[IWEF]\d{4} \d\d:\d\d:\d\d\.")
"""Mooncake's lines, as docs/operations/run.md says how to tell them: C++ writes them to standard error itself."""


def test_logs_in_json_are_json_line_by_line(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Also what is said of a weight that no layer has, and what the library says of a prompt beyond the tokenizer."""
    model = Path(shutil.copytree(checkpoints["deepseek_v32"], tmp_path / "model"))
    weights = load_file(model / "model.safetensors")
    save_file({**weights, "model.unknown.weight": torch.ones(1)}, model / "model.safetensors", {"format": "pt"})
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**tokenizer, "model_max_length": 4}))

    with Cluster(model, tmp_path, spawn=fork) as cluster:
        cluster.gateway(served_model_name="tiny", log_format="json")
        cluster.prefill(log_format="json")
        cluster.decode(log_format="json")
        cluster.wait_ready()
        body = {"model": "tiny", "prompt": "longer than the tokenizer likes", "max_tokens": 2}
        assert httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60).status_code == 200
        for node in cluster.nodes.values():
            lines = [line for line in node.log.splitlines() if not GLOG.match(line)]
            events = [json.loads(line) for line in lines]
            assert {event["process"] for event in events} == {node.name}
            explained = [event["event"] for event in events if "Mooncake" in event["event"]]
            assert len(explained) == (node.name != "gateway"), "what Mooncake prints at a node's start is explained"
            said = "longer than the specified maximum" if node.name == "gateway" else "model.unknown.weight"
            assert any(said in line for line in lines)
