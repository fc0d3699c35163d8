"""A cluster with keys: who has none gets nothing from it, and nobody else notices."""

import itertools
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from control import access
from control.keys import generate, generate_node, load_keys, load_token
from tests.e2e.asking import Job, complete
from tests.e2e.cluster import Cluster, Node, wait_until
from tests.e2e.conftest import Reference, References
from tests.e2e.spawn import fork

STRANGERS = itertools.count(1)
PROMPT = [7, 3, 9, 200, 41] * 60


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("keys") / "keys"
    generate(directory)
    return directory


@pytest.fixture(scope="module")
def cluster(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, keys: Path) -> Iterator[Cluster]:
    """A gateway, a prefill and a decode node that know each other by their keys, for all tests of this file.

    They are executed, so that /proc shows of them what it shows of a user's.
    """
    with Cluster(checkpoints["deepseek_v32"], tmp_path_factory.mktemp("cluster")) as cluster:
        cluster.gateway(served_model_name="tiny", key_dir=keys, log_level="debug")
        cluster.prefill(key_dir=keys, log_level="debug")
        cluster.decode(key_dir=keys, log_level="debug")
        cluster.wait_ready()
        cluster.spawn = fork
        yield cluster


@pytest.fixture
def strangers(cluster: Cluster) -> Iterator[Callable[..., list[Node]]]:
    """A function that starts a prefill and a decode node more, with flags of their own; the test ends them."""
    members = set(cluster.nodes)

    def start(**flags: object) -> list[Node]:
        number = next(STRANGERS)
        return [cluster.prefill(f"prefill-{number}", **flags), cluster.decode(f"decode-{number}", **flags)]

    yield start
    for name in cluster.nodes.keys() - members:
        cluster.nodes.pop(name).kill()


def key_directory(keys: Path, directory: Path, name: str) -> Path:
    """A key directory of the same cluster, with pairs of its own for the nodes of that name."""
    directory.mkdir(mode=0o700)
    for role in ("prefill", "decode"):
        secret = generate_node(keys, f"{role}:{name}-{role}")
        (directory / secret.name).symlink_to(secret)
    for each in ("cluster.key_secret", "operator.token", "allowed"):
        (directory / each).symlink_to(keys / each)
    return directory


def revoke(keys: Path, name: str) -> None:
    for role in ("prefill", "decode"):
        (keys / "allowed" / f"{name}-{role}.key").unlink()


def assert_serves(cluster: Cluster, reference: Reference) -> None:
    assert complete(cluster.url, [Job(PROMPT, 8)]) == [reference.generate(PROMPT, 8)]


def members(cluster: Cluster) -> tuple[float, float]:
    """Prefill and decode nodes that the gateway knows."""
    gateway = cluster.nodes["gateway"]
    return gateway.metric("nodes", role="prefill"), gateway.metric("nodes", role="decode")


def refused(node: Node, *reasons: str) -> float:
    return sum(node.metric("control_refused", reason=reason) for reason in reasons)


def test_a_cluster_with_keys_serves(cluster: Cluster, references: References) -> None:
    assert_serves(cluster, references["deepseek_v32"])
    assert [refused(node, *access.REASONS) for node in cluster.nodes.values()] == [0, 0, 0]


@pytest.mark.parametrize(
    "stranger",
    [
        pytest.param("without keys", marks=pytest.mark.slow),
        "with another cluster's keys",
        "with keys that are not allowed",
    ],
)
def test_nodes_without_an_allowed_key_never_register(
    cluster: Cluster,
    keys: Path,
    tmp_path: Path,
    references: References,
    strangers: Callable[..., list[Node]],
    stranger: str,
) -> None:
    flags: dict[str, object] = {}
    if "another cluster" in stranger:
        generate(tmp_path / "other")
        flags["key_dir"] = tmp_path / "other"
    elif "not allowed" in stranger:
        name = f"new-{next(STRANGERS)}"
        flags["key_dir"] = directory = key_directory(keys, tmp_path / "own", name)
        # They believe to be allowed; the others have not heard of them.
        (directory / "allowed").unlink()
        shutil.copytree(keys / "allowed", directory / "allowed")
        revoke(keys, name)
    gateway = cluster.nodes["gateway"]
    nodes = strangers(**flags)
    wait_until(lambda: all('event="node is up"' in node.log for node in nodes), timeout=120, what="them to be up")
    before = refused(gateway, "handshake", "key")
    wait_until(lambda: refused(gateway, "handshake", "key") > before + 4, timeout=60, what="refusals")
    assert members(cluster) == (1, 1)
    assert [node.get("/ready").status_code for node in nodes] == [503, 503]
    assert_serves(cluster, references["deepseek_v32"])


def test_revoked_nodes_are_dropped_and_the_others_serve_on(
    cluster: Cluster, keys: Path, tmp_path: Path, references: References, strangers: Callable[..., list[Node]]
) -> None:
    name = f"revoked-{next(STRANGERS)}"
    strangers(key_dir=key_directory(keys, tmp_path / "own", name))
    wait_until(lambda: members(cluster) == (2, 2), timeout=120, what="them to register")
    revoke(keys, name)
    wait_until(lambda: members(cluster) == (1, 1), what="them to be forgotten")
    wait_until(lambda: refused(cluster.nodes["gateway"], "revoked") > 0, what="their messages to be refused")
    assert_serves(cluster, references["deepseek_v32"])


def test_the_quarantine_takes_the_operators_token(cluster: Cluster, keys: Path) -> None:
    decode = cluster.nodes["decode"]
    token = load_token(keys)
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {token}"}):
        assert httpx.get(f"{decode.base_url}/quarantine", headers=headers).status_code == 401
        evict = httpx.post(f"{decode.base_url}/quarantine/evict", params={"boot_id": "x"}, headers=headers)
        assert evict.status_code == 401
        assert token not in evict.text
    shown = {"Authorization": f"Bearer {token}"}
    assert httpx.get(f"{decode.base_url}/quarantine", headers=shown).json() == {"reservations": []}
    command = [sys.executable, "-m", "cli.main", "quarantine", "list", "--url", decode.base_url]
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "--key-dir" in refused.stderr
    listed = subprocess.run([*command, "--key-dir", str(keys)], capture_output=True, text=True)
    assert (listed.returncode, listed.stdout) == (0, "nothing is in quarantine\n")


def test_no_secret_was_shown_anywhere(cluster: Cluster, keys: Path, references: References) -> None:
    """In the logs, at debug level, of all that the tests above did; on /metrics, in `ps`, in errors."""
    secrets = [load_token(keys)] + [load_keys(keys, role).own.secret for role in ("gateway", "prefill", "decode")]
    secrets.append(load_keys(keys, "gateway").cluster.secret)
    assert_serves(cluster, references["deepseek_v32"])
    for node in cluster.nodes.values():
        with socket.create_connection(("127.0.0.1", node.control_port)) as raw:
            raw.sendall(b"garbage" * 100)
    decode = cluster.nodes["decode"]
    httpx.get(f"{decode.base_url}/quarantine", headers={"Authorization": f"Bearer {load_token(keys)}"})
    shown = [Path(f"/proc/{node.process.pid}/cmdline").read_text() for node in cluster.nodes.values()]
    shown += [Path(f"/proc/{node.process.pid}/environ").read_text() for node in cluster.nodes.values()]
    shown += [node.get(path).text for node in cluster.nodes.values() for path in ("/metrics", "/ready", "/quarantine")]
    for node in cluster.nodes.values():
        node.signal(signal.SIGTERM)
        node.process.wait(timeout=30)
    (keys / "prefill.key_secret").write_text((keys / "prefill.key_secret").read_text().replace('"', "'", 1))
    cluster.restart(cluster.nodes["prefill"]).process.wait(timeout=60)
    logs = [path.read_text() for path in cluster.directory.glob("*.log")]
    assert len(logs) > len(cluster.nodes), "those of strangers, too"
    shown += logs
    assert "error: " in cluster.nodes["prefill"].log
    for text in shown:
        for secret in secrets:
            assert secret not in text
