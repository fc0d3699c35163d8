"""Conversations in the form of OpenAI's chat API, as plain mappings that were validated before.

A message has `role` (system, developer, user, assistant or tool), `content` (a string or None), and optionally
`reasoning_content`, `tool_calls` ([{"id", "type": "function", "function": {"name", "arguments": JSON text}}]) and
`tool_call_id`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeAlias

from gateway.formats.tools import parse_json

Message: TypeAlias = Mapping[str, Any]

BEGIN_OF_REASONING = "<think>"
END_OF_REASONING = "</think>"
RAW_ARGUMENTS = "arguments"
"""The argument under which a call's arguments are shown to the model when they are no JSON object."""


class PromptEnd(Enum):
    """What a prompt ends with."""

    NEW_ANSWER = auto()
    """The beginning of an answer."""
    LAST_MESSAGE = auto()
    """The end of the last message."""
    OPEN_MESSAGE = auto()
    """The text of the last message, an assistant's, which the answer goes on with."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation, with special tokens. reasoning: the answer begins in reasoning."""

    text: str
    reasoning: bool


class FormatError(Exception):
    """A conversation, or calls, that the format cannot express. The client gets the message (400)."""


def content_of(message: Message) -> str:
    """The text of a message; "" if it has none."""
    return message.get("content") or ""


def arguments_of(call: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call. What is no JSON object, as of a call that broke, stands under `RAW_ARGUMENTS`."""
    text = call["function"].get("arguments") or ""
    if not text.strip():
        return {}
    try:
        parsed = parse_json(text)
    except ValueError:
        parsed = None
    return parsed if isinstance(parsed, dict) else {RAW_ARGUMENTS: text}


def to_json(value: object) -> str:
    """JSON as the published formats write it: on one line, a space behind separators, characters as they are."""
    return json.dumps(value, ensure_ascii=False)


def asks_for_thinking(thinking: bool | None, variables: Mapping[str, Any], default: bool) -> bool:
    """Whether the model is to reason. Both names that chat templates have for it are understood among the variables."""
    for name in ("thinking", "enable_thinking"):
        if isinstance(variables.get(name), bool):
            return bool(variables[name])
    return default if thinking is None else thinking
