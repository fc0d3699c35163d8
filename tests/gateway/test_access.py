"""Who may ask a gateway, and how much at a time."""

import contextlib
import json
import re
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest
from fastapi import FastAPI

from base.errors import StartupError
from base.metrics import Metrics
from gateway.admission import Admission, RequestBytes, RequestLimits
from gateway.client_usage import ClientUsage
from gateway.config import GatewayConfig
from gateway.errors import ApiError
from gateway.keys import ApiKeys
from tests.gateway.nodes import wait_until
from tests.gateway.world import MODEL, RunningGateway, World, held_answers
from tests.service.raw_http import RawClient

Start = Callable[..., RunningGateway]
PROMPT = {"model": MODEL, "prompt": "abc", "max_tokens": 4}


def status_with(gateway: RunningGateway, key: str | None, path: str = "/v1/models") -> int:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.get(f"{gateway.url}{path}", headers=headers).status_code


def refused(gateway: RunningGateway, reason: str) -> float:
    return gateway.counted("http_refused", reason)


def key_file(directory: Path, text: str, mode: int = 0o600) -> Path:
    """Replaces the file as a whole, as tools that rotate secrets do."""
    fresh = directory / "keys.new"
    fresh.write_text(text)
    fresh.chmod(mode)
    return fresh.rename(directory / "keys")


def test_every_key_is_accepted_and_nothing_else(start_gateway: Start) -> None:
    gateway = start_gateway(api_keys=("sk-one", "sk-two"))
    assert [status_with(gateway, key) for key in ("sk-one", "sk-two")] == [200, 200]
    for wrong in (None, "sk-three", "sk-on", "sk-one,sk-two", "sk-one sk-two", "SK-ONE", "sk-onesk-two"):
        assert status_with(gateway, wrong) == 401, wrong
    for value in (b"sk-one", b"Basic sk-one", b"Bearer", b"Bearer\tsk-one", b"sk-one Bearer", b"Bearer \xff\xfe"):
        answer = httpx.get(f"{gateway.url}/v1/models", headers=[(b"Authorization", value)])
        assert answer.status_code == 401, value
    assert refused(gateway, "api_key") == 13
    assert httpx.get(f"{gateway.url}/v1/models", headers={"authorization": "bearer sk-one"}).status_code == 200


def test_a_refusal_is_openai_s(start_gateway: Start) -> None:
    gateway = start_gateway(api_keys=("sk-secret",))
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="sk-wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as wrong:
            client.models.list()
        assert (wrong.value.code, wrong.value.type) == ("invalid_api_key", "invalid_request_error")
        assert wrong.value.response.headers["WWW-Authenticate"] == "Bearer"
        assert "sk-" not in wrong.value.response.text
        assert list(client.with_options(api_key="sk-secret").models.list())
    nothing = httpx.get(f"{gateway.url}/v1/models")
    assert "Authorization: Bearer KEY" in nothing.json()["error"]["message"]


def test_probes_and_scrapes_need_no_key_and_everything_else_does(start_gateway: Start) -> None:
    gateway = start_gateway(api_keys=("sk-one",))
    for path, code in (("/health", 200), ("/ready", 503), ("/metrics", 200), ("/version", 200)):
        assert httpx.get(gateway.url + path).status_code == code
        assert httpx.get(f"{gateway.url}{path}/", follow_redirects=True).status_code == code
    assert httpx.head(f"{gateway.url}/health").status_code == 200
    assert httpx.head(f"{gateway.url}/ready").status_code == 503
    for path in ("/", "/v1", "/v1/nothing", "/v1/models/x", "/docs", "/health//", "//v1/models", "/openapi.json"):
        assert httpx.get(gateway.url + path).status_code == 401, path
    assert httpx.post(f"{gateway.url}/v1/completions", content=b"no JSON").status_code == 401


@pytest.mark.parametrize("fresh", [{"allowed_origins": ("https://chat.example",)}], indirect=True)
def test_web_pages_of_other_origins_may_not_post(fresh: World) -> None:
    """Without keys: a browser lets any page post to a service on the user's machine."""
    for origin, status in (
        ("https://evil.example", 403),
        ("null", 403),
        ("http://127.0.0.1:1", 403),
        ("https://[", 403),
        ("https://chat.example", 200),
        (fresh.gateway.url, 200),
    ):
        for path in ("/v1/completions", "/tokenize"):
            answer = httpx.post(f"{fresh.gateway.url}{path}", json=PROMPT, headers={"Origin": origin})
            assert answer.status_code == status, (origin, path)
        assert httpx.get(f"{fresh.gateway.url}/v1/models", headers={"Origin": origin}).status_code == 200
    assert refused(fresh.gateway, "origin") == 8


def test_a_key_allows_web_pages_of_every_origin(start_gateway: Start) -> None:
    gateway = start_gateway(api_keys=("sk-one",))
    headers = {"Origin": "https://chat.example", "Authorization": "Bearer sk-one"}
    assert httpx.post(f"{gateway.url}/tokenize", json={"prompt": "a"}, headers=headers).status_code == 200


def test_bodies_that_a_web_page_can_send_are_no_json(fresh: World) -> None:
    body = json.dumps(PROMPT)
    for media_type, status in (
        ("text/plain", 415),
        ("text/plain; charset=application/json", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("", 415),
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ("application/vnd.api+json", 200),
    ):
        for path in ("/v1/completions", "/tokenize"):
            answer = httpx.post(f"{fresh.gateway.url}{path}", content=body, headers={"Content-Type": media_type})
            assert answer.status_code == status, (media_type, path)
    assert httpx.post(f"{fresh.gateway.url}/v1/completions", content=body).status_code == 200


def test_keys_come_from_a_file_too(start_gateway: Start, tmp_path: Path) -> None:
    file = key_file(tmp_path, "# clients\n\n  sk-file-1  \nsk-file-2\r\n")
    gateway = start_gateway(api_keys=("sk-flag",), api_key_file=file)
    assert [status_with(gateway, key) for key in ("sk-flag", "sk-file-1", "sk-file-2")] == [200, 200, 200]
    assert status_with(gateway, "# clients") == 401


def test_keys_in_a_file_change_without_a_restart(start_gateway: Start, tmp_path: Path, look_often: None) -> None:
    gateway = start_gateway(api_key_file=key_file(tmp_path, "sk-old\n"))
    key_file(tmp_path, "sk-old\nsk-new\n")
    assert [status_with(gateway, key) for key in ("sk-old", "sk-new")] == [200, 200]
    key_file(tmp_path, "sk-new\n")
    assert [status_with(gateway, key) for key in ("sk-old", "sk-new")] == [401, 200]


@pytest.mark.parametrize("damage", ["empty", "readable", "gone"])
def test_a_key_file_that_went_bad_leaves_its_keys_in_force(
    start_gateway: Start, tmp_path: Path, look_often: None, damage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    gateway = start_gateway(api_key_file=key_file(tmp_path, "sk-old\n"))
    match damage:
        case "empty":
            key_file(tmp_path, "")
        case "readable":
            key_file(tmp_path, "sk-new\n", mode=0o644)
        case "gone":
            (tmp_path / "keys").unlink()
    assert [status_with(gateway, key) for key in (None, "sk-old", "sk-new")] == [401, 200, 401]
    if damage == "readable":
        # As the log says.
        (tmp_path / "keys").chmod(0o600)
        assert [status_with(gateway, key) for key in ("sk-old", "sk-new")] == [401, 200]
    key_file(tmp_path, "sk-next\n")
    assert [status_with(gateway, key) for key in ("sk-old", "sk-next")] == [401, 200]


@pytest.mark.parametrize(
    ("text", "mode", "complaint"),
    [
        ("", 0o600, "expected one key per line, found none"),
        ("\n# only a comment\n", 0o600, "expected one key per line, found none"),
        ("sk-secret\n", 0o644, "anyone on this machine can read it; chmod 600"),
        ("sk-secret sk-other\n", 0o600, "expected KEY on a line, and after it at most name=NAME"),
        ("sk-secret name=a,b\n", 0o600, "up to 64 letters"),
        ("sk-secret tokens-per-minute=0\n", 0o600, "1 and more"),
        ("sk-secr\u00e9t\n", 0o600, "printable ASCII without spaces"),
    ],
)
def test_a_wrong_key_file_stops_the_start(
    start_error: Callable[..., str], tmp_path: Path, text: str, mode: int, complaint: str
) -> None:
    file = key_file(tmp_path, text, mode)
    error = start_error(api_key_file=file)
    assert re.search(complaint, error)
    assert str(file) in error
    assert "sk-" not in error


@pytest.mark.parametrize("key", ["", " ", "two words", "line\nbreak"])
def test_a_key_that_no_client_could_send_is_refused(key: str) -> None:
    with pytest.raises(StartupError, match="HISPARSE_PD_API_KEY: a key must be printable"):
        ApiKeys([key], None)


def test_a_configuration_does_not_show_its_keys() -> None:
    assert "sk-secret" not in repr(GatewayConfig(model_path=Path("m"), api_keys=("sk-secret",)))


def test_a_body_that_declares_too_much_is_refused_before_it_is_read(start_gateway: Start) -> None:
    gateway = start_gateway(max_body_mib=1)
    with RawClient(gateway.gateway.port) as client:
        client.post("/v1/completions", f"Content-Length: {(1 << 20) + 1}")
        head, _, body = client.answer().partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 413")
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "request_too_large")
    assert error["message"] == "the request body is larger than 1048576 bytes"
    assert refused(gateway, "body_too_large") == 1


def test_a_body_of_unknown_length_is_cut_off_where_it_is_too_large(start_gateway: Start) -> None:
    gateway = start_gateway(max_body_mib=1)
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        while True:
            sent += 1 << 16
            yield b" " * (1 << 16)

    answer = httpx.post(f"{gateway.url}/v1/completions", content=endless())
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"
    assert sent < 64 << 20
    assert refused(gateway, "body_too_large") == 1


def test_the_default_limit_of_a_body_is_1_mib_for_a_small_context(gateway: RunningGateway) -> None:
    text = json.dumps({"prompt": ""}).ljust(1 << 20)
    answer = httpx.post(f"{gateway.url}/v1/completions", content=text)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt"), "it is read as a whole"
    assert httpx.post(f"{gateway.url}/v1/completions", content=f"{text} ").status_code == 413


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("fresh", [{"max_body_mib": 1, "max_total_body_mib": 1}], indirect=True)
def test_bodies_too_large_together_are_refused_until_others_have_gone(fresh: World, declared: bool) -> None:
    fresh.decode.hold_after = 2
    body = json.dumps(PROMPT | {"stream": True}).encode() + b" " * (600 << 10)
    url = f"{fresh.gateway.url}/v1/completions"
    with httpx.stream("POST", url, content=body) as held:
        lines = held.iter_lines()
        next(lines)
        answer = httpx.post(url, content=body if declared else iter([body]))
        assert (answer.status_code, answer.headers["Retry-After"]) == (429, "1")
        assert refused(fresh.gateway, "too_many_bytes") == 1
        fresh.decode.hold_after = None
        assert fresh.post().status_code == 200, "a small one still fits"
    wait_until(lambda: fresh.gateway.serving == 0)
    assert httpx.post(url, content=body).status_code == 200


def test_a_prompt_token_counts_as_an_id_in_json_however_it_came() -> None:
    limits = RequestLimits(max_body_bytes=100, max_concurrent_requests=1, max_total_bytes=100)
    metrics = Metrics()
    admission = Admission(FastAPI(), None, limits, held_answers(), ClientUsage(metrics), metrics.http_refused)
    hold = RequestBytes(admission)
    hold.body(20)
    hold.prompt(2)
    assert admission.held == 20
    hold.prompt(10)
    assert admission.held == 80
    with pytest.raises(ApiError, match="as many bytes of requests as it may"):
        RequestBytes(admission).body(21)


def test_a_client_may_leave_in_the_middle_of_its_body(
    gateway: RunningGateway, capfd: pytest.CaptureFixture[str]
) -> None:
    with RawClient(gateway.gateway.port) as client:
        client.post("/v1/completions", "Content-Length: 100", body='{"prompt": ')
        wait_until(lambda: gateway.serving == 1)
    wait_until(lambda: gateway.serving == 0)
    assert "Traceback" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("fresh", [{"max_concurrent_requests": 2}], indirect=True)
def test_requests_beyond_the_bound_are_refused_and_places_come_back(fresh: World) -> None:
    fresh.decode.hold_after = 2
    with fresh.stream() as one, fresh.stream() as other:
        assert next(one)
        assert next(other)
        answer = fresh.post()
        assert (answer.status_code, answer.headers["Retry-After"]) == (429, "1")
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "too_many_requests")
        for path in ("/health", "/ready", "/metrics"):
            assert fresh.http.get(path).status_code == 200
        assert refused(fresh.gateway, "too_many_requests") == 1
    wait_until(lambda: len(fresh.decode.cancelled) == 2)
    wait_until(lambda: fresh.gateway.serving == 0)
    fresh.decode.reset()
    assert fresh.post().status_code == 200


@pytest.mark.parametrize("fresh", [{"header_timeout": 3.0}], indirect=True)
def test_two_hundred_clients_that_dribble_slow_nobody_down(fresh: World) -> None:
    """Heads that never end, and bodies that never come, while the API is in use."""
    swarm = [RawClient(fresh.gateway.gateway.port) for _ in range(200)]
    for number, client in enumerate(swarm):
        if number % 2:
            client.send("POST /v1/completions HTTP/1.1\r\nHost: test\r\n")
        else:
            client.post("/v1/completions", "Content-Length: 1000", body="{")
    wait_until(lambda: fresh.gateway.connections == 200)
    stop = threading.Event()

    def dribble() -> None:
        while not stop.wait(0.05):
            for number, client in enumerate(swarm):
                with contextlib.suppress(OSError):
                    client.send(f"X-{number}: slow\r\n" if number % 2 else " ")

    dribbling = threading.Thread(target=dribble)
    dribbling.start()
    try:
        with httpx.Client(base_url=fresh.gateway.url) as http:
            for _ in range(50):
                assert http.post("/v1/completions", json=PROMPT).json()["choices"][0]["text"] == "abca"
            wait_until(lambda: refused(fresh.gateway, "header_timeout") == 100, timeout=20)
            wait_until(lambda: refused(fresh.gateway, "body_timeout") == 100, timeout=20)
            assert http.post("/v1/completions", json=PROMPT).status_code == 200
    finally:
        stop.set()
        dribbling.join()
        for client in swarm:
            client.socket.close()
    wait_until(lambda: fresh.gateway.serving == 0)


@pytest.mark.parametrize("gateway", [{"max_concurrent_requests": 1}], indirect=True)
def test_connections_are_bounded_too(gateway: RunningGateway) -> None:
    """Four for each request that may be served."""
    inside = [RawClient(gateway.gateway.port) for _ in range(4)]
    wait_until(lambda: gateway.connections == 4)
    with RawClient(gateway.gateway.port) as fifth:
        assert fifth.rest() == ""
    inside[0].get("/health")
    assert inside[0].answer().startswith("HTTP/1.1 200")
    for client in inside:
        client.socket.close()
    wait_until(lambda: gateway.connections == 0)
    assert refused(gateway, "too_many_connections") == 1


def test_the_limit_of_open_files_is_raised(gateway: RunningGateway) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == hard or soft >= 1 << 16
