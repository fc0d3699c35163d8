"""Mailboxes with keys, over real sockets: who has none gets nothing through, and slows nobody down."""

import queue
from contextlib import suppress
from pathlib import Path

import pytest
from structlog.testing import CapturingLogger

from control import access, connections
from control.codec import encode
from control.keys import KeyPair, generate, generate_node, load_keys
from control.messages import Cancel, Peer
from tests.control.harness import Start, Stranger, assert_serves, new_pair
from tests.e2e.cluster import wait_until

# --- no key, wrong keys ---


@pytest.mark.parametrize("key", ["none", "of another cluster"])
def test_without_the_clusters_key_nothing_is_delivered(secure: Start, keys: Path, tmp_path: Path, key: str) -> None:
    gateway, decode = secure("gateway"), secure("decode")
    generate(tmp_path / "other")
    other = load_keys(tmp_path / "other", "gateway").cluster.public
    stranger = Stranger(decode) if key == "none" else Stranger(decode, load_keys(keys, "gateway").own, other)
    stranger.send(encode(Cancel(request_id="wrong"), gateway.me))
    decode.wait_refused("handshake")
    assert_serves(gateway, decode)
    stranger.close()


def test_a_key_that_is_not_allowed_is_refused_until_it_is(secure: Start, keys: Path) -> None:
    """And works from then on: nothing is remembered against it."""
    gateway, decode = secure("gateway"), secure("decode")
    cluster, own = load_keys(keys, "gateway").cluster.public, new_pair()
    stranger = Stranger(decode, own, cluster)
    sender = Peer(role="gateway", address="127.0.0.1:1", boot_id="new")
    stranger.send(encode(Cancel(request_id="late"), sender))
    decode.wait_refused("key", 2)
    assert_serves(gateway, decode)
    (keys / "allowed" / "new.key").write_text(f'metadata\n    role = gateway\ncurve\n    public-key = "{own.public}"')
    assert decode.take() == (sender, Cancel(request_id="late"))
    stranger.close()


def test_nothing_is_said_to_a_mailbox_that_is_not_the_cluster_s(secure: Start, tmp_path: Path) -> None:
    """Whoever takes a node's address without the cluster's secret is told nothing."""
    gateway = secure("gateway")
    generate(tmp_path / "other")
    for impostor in (
        secure("decode", load_keys(tmp_path / "other", "decode")),
        secure("decode", encrypted=False),
    ):
        gateway.plane.repeat("key", impostor.me, Cancel(request_id="secret"), every=0.05)
        impostor.wait_refused("handshake")
        assert impostor.inbox.empty()
        gateway.plane.answered("key")


def test_a_process_is_reached_once_it_has_its_keys(secure: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeroMQ gives up a connection whose other end expects other security; we do not.

    If the other end stops at the wrong moment, ZeroMQ goes on taking frames for the connection.
    """
    monkeypatch.setattr(connections, "STUCK_S", 0.2)
    monkeypatch.setattr(connections, "DEAF_S", 1.0)
    gateway, plain = secure("gateway"), secure("decode", encrypted=False)
    word = Cancel(request_id="r")
    gateway.plane.periodically(0.05, lambda: gateway.plane.send(plain.me, word, any_boot=True))
    plain.wait_refused("handshake")
    plain.plane.stop()
    encrypted = secure("decode", port=plain.port)
    assert encrypted.take() == (gateway.me, Cancel(request_id="r"))


# --- keys that may less ---


def test_a_revoked_key_is_not_heard_on_its_connection(
    secure: Start, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = CapturingLogger()
    monkeypatch.setattr(access, "log", log)
    generate_node(keys, "gateway:second")
    (keys / "nodes" / "second" / "gateway.key_secret").rename(keys / "nodes" / "gateway.key_secret")
    for name in ("cluster.key_secret", "allowed"):
        (keys / "nodes" / name).symlink_to(f"../{name}")
    first, second = secure("gateway"), secure("gateway", load_keys(keys / "nodes", "gateway"))
    decode = secure("decode")
    for sender in (first, second):
        assert_serves(sender, decode)
    assert not decode.plane.is_revoked(second.me)
    (keys / "allowed" / "second.key").unlink()
    second.plane.repeat("key", decode.me, Cancel(request_id="revoked"), every=0.05)
    decode.wait_refused("revoked")
    assert [call.kwargs["file"] for call in log.calls if call.kwargs["reason"] == "revoked"] == ["second.key"]
    assert decode.plane.is_revoked(second.me)
    assert not decode.plane.is_revoked(first.me)
    with suppress(queue.Empty):
        while True:
            decode.inbox.get_nowait()
    assert_serves(first, decode)


def test_a_key_speaks_for_its_role_only(secure: Start, keys: Path) -> None:
    """A prefill node's key cancels no requests, nor makes other prefill nodes write."""
    gateway, decode = secure("gateway"), secure("decode")
    loaded = load_keys(keys, "prefill")
    stranger = Stranger(decode, loaded.own, loaded.cluster.public)
    stranger.send(encode(Cancel(request_id="r"), gateway.me))
    decode.wait_refused("role")
    stranger.send(encode(Cancel(request_id="r"), gateway.me.model_copy(update={"role": "prefill"})))
    wait_until(lambda: decode.plane.malformed == 1)
    assert_serves(gateway, decode)
    stranger.close()


def test_a_node_does_not_speak_for_another_one_of_its_role(secure: Start, keys: Path) -> None:
    generate_node(keys, "gateway:second")
    text = (keys / "nodes" / "second" / "gateway.key_secret").read_text().split('"')
    gateway, decode = secure("gateway"), secure("decode")
    assert_serves(gateway, decode)
    stranger = Stranger(decode, KeyPair(text[1], text[3]), load_keys(keys, "gateway").cluster.public)
    stranger.send(encode(Cancel(request_id="r"), gateway.me))
    decode.wait_refused("boot")
    assert_serves(gateway, decode)
    stranger.close()


def test_a_refusal_is_logged_once_and_without_a_secret(
    secure: Start, keys: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    decode = secure("decode")
    loaded = load_keys(keys, "gateway")
    unknown = new_pair()
    strangers = [Stranger(decode, unknown, loaded.cluster.public) for _ in range(5)]
    decode.wait_refused("key", 20)
    for stranger in strangers:
        stranger.close()
    decode.plane.stop()
    # Where logs go depends on whether an earlier test of this process has configured them.
    output = capsys.readouterr().out + caplog.text
    assert output.count("refused on the control port") == 1
    assert unknown.public in output
    for secret in (unknown.secret, loaded.cluster.secret, loaded.own.secret):
        assert secret not in output
