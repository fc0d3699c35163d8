"""The endpoints of the API, a line each: the HTTP routes and /openapi.json are made of this table.

A new endpoint is a request body (`gateway.requests`), an answer with its renderer (`gateway.answers`), and a line here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from gateway.answers import lookups
from gateway.answers.chat import ChatAnswer
from gateway.answers.compaction import CompactionAnswer
from gateway.answers.completions import CompletionAnswer
from gateway.answers.messages import MessageAnswer
from gateway.answers.responses import ResponseAnswer
from gateway.answers.streamed import Answer, Json
from gateway.preparer import GenerationBody
from gateway.requests.body import RequestBody
from gateway.requests.chat import ChatCompletionRequest
from gateway.requests.completions import CompletionRequest
from gateway.requests.messages import CountTokensRequest, MessagesRequest
from gateway.requests.responses import CompactRequest, ResponseCreate, ResponsesRequest
from gateway.requests.tokens import DetokenizeRequest, TokenizeRequest
from service.status import Health, Ready, Version

STATUS_PATHS = ("/status", "/status.css", "/status.js", "/v1/cluster")
"""What --status-page adds (`gateway.status_page`). Not a part of the API: /openapi.json is silent about it."""


@dataclass(frozen=True)
class Endpoint:
    """Clients need a key, where this gateway has keys. What `render` or `renderer.whole` returns is the answer."""

    needs_key: ClassVar = True

    path: str
    summary: str


@dataclass(frozen=True)
class Status(Endpoint):
    """GET, served by `service.status`: for probes and scrapes, which have no key. answer: its TypedDict; None: text."""

    needs_key = False

    answer: type[Any] | None


@dataclass(frozen=True)
class Reads(Endpoint):
    """GET. render: called with the Completer and the path's parameters."""

    render: Callable[..., Json]


@dataclass(frozen=True)
class Computes(Endpoint):
    """POST, without generating. render: called on a thread with the body and the Completer."""

    body: type[RequestBody]
    render: Callable[..., Json]


@dataclass(frozen=True)
class Generates(Endpoint):
    """POST. id_prefix: what ids of answers begin with. message: of its WebSocket, if it has one."""

    body: type[GenerationBody]
    renderer: type[Answer]
    id_prefix: str
    message: type[ResponseCreate] | None = None


ENDPOINTS: tuple[Endpoint, ...] = (
    Status("/health", "Whether the process runs", Health),
    Status("/ready", "Whether requests can be served", Ready),
    Status("/version", "Versions", Version),
    Status("/metrics", "Metrics for Prometheus", None),
    Reads("/v1/models", "The models that are served", lookups.list_models),
    Reads("/v1/models/{model}", "One model", lookups.one_model),
    Generates("/v1/completions", "Continue prompts", CompletionRequest, CompletionAnswer, "cmpl-"),
    Generates("/v1/chat/completions", "Answer a conversation", ChatCompletionRequest, ChatAnswer, "chatcmpl-"),
    Generates(
        "/v1/responses",
        "Answer a conversation, in OpenAI's newer form",
        ResponsesRequest,
        ResponseAnswer,
        "resp_",
        ResponseCreate,
    ),
    Generates("/v1/responses/compact", "Summarise a conversation", CompactRequest, CompactionAnswer, "resp_"),
    Computes(
        "/v1/responses/input_tokens", "Count the tokens of a response's input", ResponsesRequest, lookups.count_input
    ),
    Generates("/v1/messages", "Answer a conversation, in Anthropic's form", MessagesRequest, MessageAnswer, "msg_"),
    Computes("/v1/messages/count_tokens", "Count a conversation's tokens", CountTokensRequest, lookups.count_tokens),
    Computes("/tokenize", "Tokens of a text or of a conversation", TokenizeRequest, lookups.tokenize),
    Computes("/detokenize", "Text of tokens", DetokenizeRequest, lookups.detokenize),
)

OPEN_PATHS = frozenset((*STATUS_PATHS, *(endpoint.path for endpoint in ENDPOINTS if not endpoint.needs_key)))
"""Every other path needs a key, whether it exists or not. The status page asks for operators' keys itself: operators
look at it when the gateway serves as many requests as it may."""
