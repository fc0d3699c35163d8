"""/openapi.json says what the API does: requests made by it never fail, and answers are as it says."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.gateway.world import MODEL, RunningGateway, World, glm_call, glm_service

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with glm_service(tmp_path_factory.mktemp("glm")) as service:
        service.says("so</think>yes" + glm_call("Rome"))
        yield service


def check(service: World, examples: int) -> None:
    """Sends so many requests, some by the schemas and some that break them."""
    document = httpx.get(f"{service.gateway.url}/openapi.json").json()
    schema = schemathesis.openapi.from_dict(document)
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) == sum(map(len, document["paths"].values()))
    cases = st.one_of(
        *(
            operation.as_strategy(generation_mode=mode)
            for operation in operations
            for mode in GenerationMode
            if mode.is_positive or operation.method == "post"
        )
    )
    statuses: dict[int, int] = {}

    @settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck), derandomize=True
    )
    @given(case=cases)
    def sent(case: Any) -> None:
        service.decode.generated.clear()
        answer = case.call_and_validate(base_url=service.gateway.url, checks=CHECKS)
        statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1

    sent()
    assert statuses[200] > examples / 10, statuses
    assert statuses[400] > examples / 10, statuses


def test_fifty_requests_are_answered_as_the_document_says(service: World) -> None:
    check(service, 50)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("examples", [1000, 5000])
def test_thousands_of_requests_are_answered_as_the_document_says(service: World, examples: int) -> None:
    check(service, examples)


REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a", "logprobs": 2, "n": 2, "best_of": 3, "return_token_ids": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 1}),
    ("/v1/responses", {"input": "a", "top_logprobs": 2, "text": {"verbosity": "low"}, "tool_choice": "auto"}),
    ("/v1/responses/compact", {"model": MODEL, "input": "a"}),
    ("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": "a"}]}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a"}]}),
    ("/tokenize", {"prompt": "a", "return_token_strs": True}),
    ("/detokenize", {"tokens": [97]}),
]


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_an_answer_with_everything_is_as_the_document_says(service: World, path: str, body: dict[str, Any]) -> None:
    if path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
        functions = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
        forms: dict[str, dict[str, Any]] = {
            "/v1/chat/completions": {"type": "function", "function": functions},
            "/v1/responses": {"type": "function", **functions},
            "/v1/messages": {"name": "weather", "input_schema": functions["parameters"]},
        }
        body = {**body, "tools": [forms[path]]}
    document = httpx.get(f"{service.gateway.url}/openapi.json").json()
    operation = schemathesis.openapi.from_dict(document)[path]["POST"]
    answer = operation.Case(body=body, media_type="application/json").call_and_validate(
        base_url=service.gateway.url, checks=CHECKS
    )
    assert answer.status_code == 200
    if "tools" in body:
        assert "Rome" in json.dumps(answer.json())
        assert "so" in json.dumps(answer.json())


def test_every_route_is_described(gateway: RunningGateway) -> None:
    document = httpx.get(f"{gateway.url}/openapi.json").json()
    for path, methods in document["paths"].items():
        for method in methods:
            found = httpx.request(method, gateway.url + path.replace("{model}", "tiny"))
            assert found.status_code in (200, 400, 503), (path, method)
    routes = {
        (route.path.replace(":path", ""), method.lower())  # type: ignore[attr-defined]
        for route in gateway.gateway._admission.app.routes  # type: ignore[attr-defined]
        for method in getattr(route, "methods", ())
        if method != "HEAD" and not route.path.startswith(("/docs", "/redoc"))  # type: ignore[attr-defined]
    }
    described = {(path, method) for path, methods in document["paths"].items() for method in methods}
    assert routes - described == {("/openapi.json", "get")}
