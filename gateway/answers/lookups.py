"""Answers for which no token is generated. Threads render those about tokens: a long text takes long."""

from typing import Literal

from typing_extensions import TypedDict

from gateway.answers.streamed import Column
from gateway.completer import Completer
from gateway.requests.chat import ChatCompletionRequest, ChatPromptFields, ConvertedRequest
from gateway.requests.responses import ResponsesRequest
from gateway.requests.tokens import DetokenizeRequest, TokenizeRequest


class ModelCard(TypedDict):
    """The model that is served. created: Unix time in seconds. root: its checkpoint. max_model_len: of prompt and
    answer, in tokens."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(TypedDict):
    """All models that are served, which is one."""

    object: Literal["list"]
    data: list[ModelCard]


def list_models(completer: Completer) -> ModelList:
    return {"object": "list", "data": [_card(completer, name) for name in completer.config.model_names]}


def one_model(completer: Completer, model: str) -> ModelCard:
    """Raises ApiError (404)."""
    completer.check_model(model)
    return _card(completer, model)


def _card(completer: Completer, name: str) -> ModelCard:
    return {
        "id": name,
        "object": "model",
        "created": completer.created,
        "owned_by": "hisparse-pd",
        "root": str(completer.config.model_path),
        "parent": None,
        "max_model_len": completer.capacity.context,
    }


class TokenCount(TypedDict):
    """How many tokens a conversation has."""

    input_tokens: int


class InputTokens(TokenCount):
    """How many tokens the input of a response has."""

    object: Literal["response.input_tokens"]


class Tokenized(TypedDict):
    """The tokens of a text. count: how many. token_strs: as the vocabulary spells them, if asked for."""

    count: int
    max_model_len: int
    tokens: Column[int]
    token_strs: Column[str] | None


class Detokenized(TypedDict):
    """The text of tokens."""

    prompt: str


def count_input(request: ResponsesRequest, completer: Completer) -> InputTokens:
    """Raises ApiError."""
    return {"object": "response.input_tokens", **count_tokens(request, completer)}


def count_tokens(request: ConvertedRequest, completer: Completer) -> TokenCount:
    """Raises ApiError."""
    with request.renaming():
        token_ids, _ = completer.preparer.chat_prompt(request.generation(completer.field_policy))
    return {"input_tokens": len(token_ids)}


def tokenize(request: TokenizeRequest, completer: Completer) -> Tokenized:
    """The tokens of a text or of a conversation. Raises ApiError."""
    tokenizer = completer.tokenizer
    if request.prompt is not None:
        token_ids = tokenizer.encode(request.prompt, special_tokens=request.add_special_tokens is not False)
    else:
        how = {name: getattr(request, name) for name in ChatPromptFields.model_fields}
        chat = ChatCompletionRequest.model_construct(messages=request.messages, tools=request.tools, **how)
        token_ids, _ = completer.preparer.chat_prompt(chat, special_tokens=request.add_special_tokens is True)
    return {
        "count": len(token_ids),
        "max_model_len": completer.context_length,
        "tokens": Column(token_ids),
        "token_strs": Column(tokenizer.spelled(token_ids)) if request.return_token_strs else None,
    }


def detokenize(request: DetokenizeRequest, completer: Completer) -> Detokenized:
    """The text of tokens, special ones included. Raises ApiError."""
    completer.tokenizer.check_ids(request.tokens, "tokens")
    return {"prompt": completer.tokenizer.decode(request.tokens)}
