"""Chat formats, one module per family of models. No HTTP here: plain conversations in, prompts and events out."""

from gateway.formats.conversation import FormatError, Message, Prompt
from gateway.formats.families import CALL_PARSERS, ChatFormat, choose_format
from gateway.formats.parsing import (
    CallArguments,
    CallBegin,
    CallEnd,
    CallParser,
    ContentDelta,
    Event,
    ReasoningDelta,
)
from gateway.formats.tools import Tool, ToolSet

__all__ = [
    "CALL_PARSERS",
    "CallArguments",
    "CallBegin",
    "CallEnd",
    "CallParser",
    "ChatFormat",
    "ContentDelta",
    "Event",
    "FormatError",
    "Message",
    "Prompt",
    "ReasoningDelta",
    "Tool",
    "ToolSet",
    "choose_format",
]
