"""Answers of /v1/models."""

from typing import Literal

from typing_extensions import TypedDict

from gateway.completer import Completer


class ModelCard(TypedDict):
    """The model that is served. created: Unix time in seconds. max_model_len: of prompt and answer, in tokens."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(TypedDict):
    """All models that are served, which is one."""

    object: Literal["list"]
    data: list[ModelCard]


def list_models(completer: Completer) -> ModelList:
    return {"object": "list", "data": [_card(completer)]}


def one_model(completer: Completer, model: str) -> ModelCard:
    """Raises ApiError (404)."""
    completer.check_model(model)
    return _card(completer)


def _card(completer: Completer) -> ModelCard:
    return {
        "id": completer.model,
        "object": "model",
        "created": completer.created,
        "owned_by": "hisparse-pd",
        "max_model_len": completer.capacity.context,
    }
