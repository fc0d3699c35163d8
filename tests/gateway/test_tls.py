"""HTTPS: who may be trusted, what stops a start, and certificates that are replaced."""

import math
import re
import ssl
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import pytest
import trustme

from cli.serve import is_ready
from service import watched
from tests.gateway.nodes import wait_until
from tests.gateway.test_websocket import opened
from tests.gateway.world import MODEL, RunningGateway, World

Start = Callable[..., RunningGateway]


class Files:
    """A certificate and its key on disk, and clients that trust who signed it."""

    def __init__(self, directory: Path) -> None:
        self.cert, self.key = directory / "cert.pem", directory / "key.pem"
        self.renew()

    def renew(self) -> None:
        """Another certificate, of another authority."""
        self._authority = trustme.CA()
        leaf = self._authority.issue_cert("localhost", "127.0.0.1")
        leaf.cert_chain_pems[0].write_to_path(self.cert)
        leaf.private_key_pem.write_to_path(self.key)

    @property
    def options(self) -> dict[str, Path]:
        return {"ssl_certfile": self.cert, "ssl_keyfile": self.key}

    def trust(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self._authority.configure_trust(context)
        return context


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def test_the_official_client_over_https(start_world: Callable[..., World], files: Files) -> None:
    world = start_world(**files.options, api_keys=("sk-one",))
    wait_until(lambda: is_ready(world.gateway.url, files.cert))
    with (
        httpx.Client(verify=files.trust()) as transport,
        openai.OpenAI(
            base_url=f"{world.gateway.url}/v1", api_key="sk-one", max_retries=0, http_client=transport
        ) as client,
    ):
        chunks = client.completions.create(model=MODEL, prompt="abc", max_tokens=6, stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == "abcabc"

        world.decode.hold_after = 2
        stream = client.completions.create(model=MODEL, prompt="abc", max_tokens=6, stream=True)
        next(stream)
        stream.close()
        wait_until(lambda: len(world.decode.cancelled) == 1)


def test_clients_that_do_not_trust_it_and_old_protocols_are_turned_away(start_gateway: Start, files: Files) -> None:
    gateway = start_gateway(**files.options)
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{gateway.url}/health")
    old = files.trust()
    old.set_ciphers("ALL:@SECLEVEL=0")
    old.minimum_version = ssl.TLSVersion.TLSv1
    old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{gateway.url}/health", verify=old)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{gateway.gateway.port}/health")
    assert httpx.get(f"{gateway.url}/health", verify=files.trust()).status_code == 200
    assert gateway.counted("http_refused", "tls_handshake") == 3


def test_the_ready_check_trusts_the_very_certificate_alone(
    start_world: Callable[..., World], files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched, "_LOOK_EVERY_S", math.inf)
    url = start_world(**files.options).gateway.url
    wait_until(lambda: is_ready(url, files.cert))
    files.renew()
    assert not is_ready(url, files.cert)
    assert not is_ready(url)


def test_a_renewed_certificate_is_used_without_a_restart(start_gateway: Start, files: Files, look_often: None) -> None:
    gateway = start_gateway(**files.options)
    before = files.trust()
    with httpx.Client(verify=before) as connected:
        assert connected.get(f"{gateway.url}/health").status_code == 200
        files.renew()
        assert httpx.get(f"{gateway.url}/health", verify=files.trust()).status_code == 200
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{gateway.url}/health", verify=before)
        # Who is connected stays connected.
        assert connected.get(f"{gateway.url}/health").status_code == 200


def test_half_a_new_certificate_leaves_the_old_in_force(start_gateway: Start, files: Files, look_often: None) -> None:
    gateway = start_gateway(**files.options)
    before, old_key = files.trust(), files.key.read_bytes()
    files.renew()
    new_key = files.key.read_bytes()
    files.key.write_bytes(old_key)
    assert httpx.get(f"{gateway.url}/health", verify=before).status_code == 200
    files.key.write_bytes(new_key)
    assert httpx.get(f"{gateway.url}/health", verify=files.trust()).status_code == 200


def broken(files: Files, damage: str) -> dict[str, Path]:
    match damage:
        case "no certificate":
            return {"ssl_keyfile": files.key}
        case "no key":
            return {"ssl_certfile": files.cert}
        case "missing":
            files.cert.unlink()
        case "swapped":
            return {"ssl_certfile": files.key, "ssl_keyfile": files.cert}
        case "mismatched":
            key = files.key.read_bytes()
            files.renew()
            files.key.write_bytes(key)
        case "text":
            files.cert.write_text("no PEM")
        case "directory":
            files.key.unlink()
            files.key.mkdir()
        case "encrypted":
            files.key.write_bytes(encrypted(files.key.read_bytes()))
    return files.options


def encrypted(pem: bytes) -> bytes:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(pem, None)
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"passphrase"),
    )


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        ("no certificate", "--ssl-keyfile without --ssl-certfile"),
        ("no key", "--ssl-certfile without --ssl-keyfile"),
        ("missing", r"--ssl-certfile .*cert.pem: No such file"),
        ("swapped", r"cannot be used \(.*\): expected a certificate chain and its private key"),
        ("mismatched", "key values mismatch"),
        ("text", "expected a certificate chain and its private key"),
        ("directory", r"--ssl-keyfile .*key.pem: Is a directory"),
        ("encrypted", "expected a private key without a passphrase"),
    ],
)
def test_files_that_cannot_serve_stop_the_start(
    start_error: Callable[..., str], files: Files, damage: str, complaint: str
) -> None:
    assert re.search(complaint, start_error(**broken(files, damage)))


def test_a_websocket_over_tls(start_world: Callable[..., World], files: Files) -> None:
    world = start_world(**files.options)
    with opened(world, ssl=files.trust()) as socket:
        long = "x" * (300 << 10)
        first = socket.response(input=[{"role": "user", "content": "a", "padding": long}], max_output_tokens=2)
        second = socket.response(input="b", previous_response_id=first["id"], max_output_tokens=2)
        assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
        world.decode.hold_after = 1
        socket.ask(input="c")
        assert socket.event()["type"] == "response.created"
    wait_until(lambda: len(world.decode.cancelled) == 1)
