"""A fleet goes to the next wire version, as docs/operations/upgrade.md says, while clients ask all the time."""

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path

import pytest

from cli.serve import free_port
from control.codec import PROTOCOL_VERSION
from tests.e2e.asking import Job, Load, ids_in, random_prompts, streamed
from tests.e2e.cluster import HOT_BUFFER, Cluster, Node, wait_until
from tests.e2e.conftest import References, StartCluster
from tests.e2e.next_version import MODULE

JOBS = [Job(prompt, tokens) for prompt in random_prompts((30, 150), seed=5) for tokens in (8, 32)]
LONG = 400
"""More tokens than two of the jobs have together."""


@contextmanager
def stream_at(node: Node, url: str) -> Iterator[tuple[list[int], Iterator[int]]]:
    """A long stream at this node, which is one of two: its prompt, and its tokens as they come."""
    with ExitStack() as begun:
        for prompt in random_prompts((30,) * 4, seed=6):
            lines = begun.enter_context(streamed(url, prompt, LONG))
            token_ids = (token_id for line in lines for token_id in ids_in(line))
            first = next(token_ids)
            if node.metric("kv_tokens_outstanding") > LONG:
                yield prompt, chain([first], token_ids)
                return
    raise AssertionError("four streams are at the other node")


def ends(node: Node) -> None:
    assert node.process.wait(timeout=60) == 0, node.log[-3000:]


@pytest.mark.slow
def test_a_fleet_changes_its_wire_version_and_no_request_fails(
    start_cluster: StartCluster, references: References, tmp_path: Path
) -> None:
    reference = references["deepseek_v32"]
    ports = free_port(), free_port()
    gateways = {"gateway": tuple(f"127.0.0.1:{port}" for port in ports)}
    old = start_cluster(control_port=ports[0], drain_timeout=240)
    prefill = old.prefill(**gateways)
    decodes = [
        old.decode(f"decode-{timeout}", drain_timeout=timeout, hisparse_config=HOT_BUFFER, **gateways)
        for timeout in (0.2, 240)
    ]
    old.wait_ready(decode=2)
    urls = [old.url]
    with (
        Cluster(old.model_path, tmp_path / "next", module=MODULE) as new,
        Load(urls, reference, JOBS).running(2) as clients,
    ):
        # Gateways of the next version get no clients before they have nodes.
        new.directory.mkdir()
        gateway = new.gateway(served_model_name="tiny", control_port=ports[1])
        wait_until(lambda: f"wire version {PROTOCOL_VERSION}" in gateway.log, what="old nodes to ask the new gateway")
        assert gateway.get("/ready").json()["reason"] == "no live decode node is registered"

        # A node is replaced by one of the next version. What it streams at its drain timeout migrates.
        with stream_at(decodes[0], old.url) as (prompt, token_ids):
            decodes[0].signal(signal.SIGTERM)
            ends(decodes[0])
            new.prefill(**gateways)
            new.decode(control_port=decodes[0].control_port, hisparse_config=HOT_BUFFER, **gateways)
            ids = list(token_ids)
        assert (len(ids), ids) == (LONG, reference.likeliest(prompt, ids))
        new.wait_ready(prefill=1, decode=1)
        assert "decode node failed a request" in old.nodes["gateway"].log
        assert old.nodes["gateway"].metric("nodes", role="decode") == 1, "each version has its nodes"

        # Clients use both, then the new one alone. A stream that has begun ends where it is.
        urls.append(new.url)
        clients.wait_for_each()
        clients.wait_for_each()
        with streamed(old.url, JOBS[0].prompt_ids, LONG) as lines:
            ids = ids_in(next(lines))
            urls.remove(old.url)
            clients.wait_for_each()
            assert old.nodes["gateway"].metric("requests", state="running") == 1
            for node in (old.nodes["gateway"], decodes[1], prefill):
                node.signal(signal.SIGTERM)
            ids += [token_id for line in lines for token_id in ids_in(line)]
        assert (len(ids), ids) == (LONG, reference.likeliest(JOBS[0].prompt_ids, ids))
        for node in (old.nodes["gateway"], decodes[1], prefill):
            ends(node)
        clients.wait_for_each()
        assert gateway.metric("requests_finished_total", reason="length") > 0
        for node in new.nodes.values():
            assert node.get("/version").json()["protocol"] == PROTOCOL_VERSION + 1
