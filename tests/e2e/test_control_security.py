"""A cluster with keys: who has none gets nothing from it, and nobody else notices."""

import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import zmq

from tests.e2e.cluster import Cluster, Job, Node, complete, wait_until
from tests.e2e.conftest import Reference
from transfer.keys import generate, generate_node, load_keys, load_token

PROMPT = [7, 3, 9, 200, 41] * 60
Start = Callable[..., Cluster]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    generate(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def cluster(start_cluster: Start, keys: Path) -> Cluster:
    """A gateway, a prefill and a decode node that know each other by their keys."""
    cluster = start_cluster(key_dir=keys, log_level="debug")
    cluster.prefill(key_dir=keys, log_level="debug")
    cluster.decode(key_dir=keys, log_level="debug")
    return cluster.wait_ready()


def key_directory(keys: Path, name: str, own: Path) -> Path:
    """A key directory with another pair in it, for a node of that name."""
    directory = keys.parent / name
    directory.mkdir(mode=0o700)
    (directory / "cluster.key_secret").symlink_to(keys / "cluster.key_secret")
    (directory / "operator.token").symlink_to(keys / "operator.token")
    (directory / own.name).symlink_to(own)
    (directory / "allowed").symlink_to(keys / "allowed")
    return directory


def assert_serves(cluster: Cluster, reference: Reference) -> None:
    assert complete(cluster.url, [Job(PROMPT, 8)]) == [reference.generate(PROMPT, 8)]


def test_a_cluster_with_keys_serves(cluster: Cluster, references: dict[str, Reference]) -> None:
    assert_serves(cluster, references["deepseek_v32"])
    for node in cluster.nodes.values():
        for reason in ("key", "revoked", "role", "boot"):
            assert node.metric("control_refused", reason=reason) == 0


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("stranger", ["no key", "another cluster's keys", "a key that is not allowed", "revoked"])
def test_a_node_without_an_allowed_key_never_registers(
    cluster: Cluster, keys: Path, tmp_path: Path, references: dict[str, Reference], role: str, stranger: str
) -> None:
    flags: dict[str, object] = {}
    if stranger == "another cluster's keys":
        generate(tmp_path / "other")
        flags["key_dir"] = tmp_path / "other"
    elif stranger != "no key":
        own = generate_node(keys, f"{role}:stranger")
        flags["key_dir"] = key_directory(keys, "stranger", own)
        if stranger == "a key that is not allowed":
            # It believes to be allowed; the others have not heard of it.
            allowed = tmp_path / "stranger" / "allowed"
            allowed.unlink()
            allowed.mkdir()
            for path in (keys / "allowed").iterdir():
                (allowed / path.name).write_bytes(path.read_bytes())
            (keys / "allowed" / "stranger.key").unlink()
    node = getattr(cluster, role)("stranger", **flags)
    gateway = cluster.nodes["gateway"]
    reason = "key" if "not allowed" in stranger else "handshake"
    if stranger == "revoked":
        wait_until(lambda: gateway.metric("nodes", role=role) == 2, timeout=60, what="it to register")
        (keys / "allowed" / "stranger.key").unlink()
        wait_until(lambda: gateway.metric("nodes", role=role) == 1, what="it to be forgotten")
        reason = "revoked"
    wait_until(lambda: gateway.metric("control_refused", reason=reason) > 0, timeout=60, what="it to be refused")
    assert gateway.metric("nodes", role=role) == 1
    assert node.get("/ready").status_code == 503 or stranger == "revoked"
    assert_serves(cluster, references["deepseek_v32"])


def test_a_key_of_another_role_registers_nothing(cluster: Cluster, keys: Path) -> None:
    """A process that has a prefill node's key says that it is a decode node."""
    loaded = load_keys(keys, "prefill")
    gateway = cluster.nodes["gateway"]
    context = zmq.Context()
    push = context.socket(zmq.PUSH)
    push.curve_publickey, push.curve_secretkey = loaded.own.public.encode(), loaded.own.secret.encode()
    push.curve_serverkey = loaded.cluster.public.encode()
    push.connect(f"tcp://127.0.0.1:{gateway.control_port}")
    push.send(registration("decode"))
    wait_until(lambda: gateway.metric("control_refused", reason="role") == 1)
    assert gateway.metric("nodes", role="decode") == 1
    context.destroy(linger=0)


def registration(role: str) -> bytes:
    from tests.decode_node.fakes import IDENTITY
    from transfer.codec import encode
    from transfer.messages import Peer, Register

    me = Peer(role=role, address="127.0.0.1:9", boot_id="forged")  # type: ignore[arg-type]
    offer = Register(
        via="127.0.0.1:9",
        role=role,  # type: ignore[arg-type]
        identity=IDENTITY,
        transports=("tcp",),
        page_size=64,
        max_request_tokens=100,
    )
    return encode(offer, me)


def test_a_storm_on_the_control_ports_costs_no_request(
    cluster: Cluster, keys: Path, references: dict[str, Reference]
) -> None:
    """10,000 garbage frames under an allowed key, as many without one, raw noise and half-open connections."""
    loaded = load_keys(keys, "prefill")
    context = zmq.Context()
    raws: list[socket.socket] = []

    def storm(node: Node) -> None:
        trusted, stranger = context.socket(zmq.PUSH), context.socket(zmq.PUSH)
        trusted.curve_publickey, trusted.curve_secretkey = loaded.own.public.encode(), loaded.own.secret.encode()
        trusted.curve_serverkey = loaded.cluster.public.encode()
        stranger.setsockopt(zmq.SNDHWM, 0)
        for each in (trusted, stranger):
            each.connect(f"tcp://127.0.0.1:{node.control_port}")
        for number in range(10_000):
            trusted.send(bytes([number % 256]) * (number % 100 + 1))
            with suppress(zmq.Again):
                # ZeroMQ may have given it up.
                stranger.send(bytes([number % 256]) * (number % 100 + 1), zmq.NOBLOCK)
            if number % 50 == 0:
                raw = socket.create_connection(("127.0.0.1", node.control_port))
                with suppress(OSError):
                    raw.sendall(bytes(range(256)) if number % 100 else b"\xff" + bytes(8))
                raws.append(raw)

    jobs = [Job([seed, *PROMPT], 32) for seed in range(8)]
    expected = [references["deepseek_v32"].generate(job.prompt_ids, 32) for job in jobs]
    with ThreadPoolExecutor(len(cluster.nodes)) as pool:
        storms = [pool.submit(storm, node) for node in cluster.nodes.values()]
        assert complete(cluster.url, jobs, concurrency=4) == expected
        for each in storms:
            each.result()
    for node in cluster.nodes.values():
        wait_until(lambda node=node: node.metric("control_malformed") == 10_000, what=f"{node.name} to count garbage")
        wait_until(lambda node=node: node.metric("control_refused", reason="handshake") >= 200, what="strangers")
    assert complete(cluster.url, jobs, concurrency=4) == expected
    for raw in raws:
        raw.close()
    context.destroy(linger=0)
    for node in cluster.nodes.values():
        assert node.log.count("refused on the control port") < 20


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


def test_no_secret_is_shown_anywhere(cluster: Cluster, keys: Path, references: dict[str, Reference]) -> None:
    """In logs at debug level, on /metrics, in `ps`, in errors, also when things go wrong."""
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
    shown += [node.log for node in cluster.nodes.values()]
    assert "error: " in cluster.nodes["prefill"].log
    for text in shown:
        for secret in secrets:
            assert secret not in text
