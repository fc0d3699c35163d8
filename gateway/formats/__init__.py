"""Chat formats, one module per family of models. No HTTP here: plain conversations in, prompts and events out."""

from gateway.formats.families import CALL_PARSERS, choose_format
from gateway.formats.protocol import (
    CallArguments,
    CallBegin,
    CallEnd,
    ChatFormat,
    ContentDelta,
    Event,
    FormatError,
    Message,
    OutputParser,
    Prompt,
    ReasoningDelta,
)
from gateway.formats.tools import Tool, ToolSet

__all__ = [
    "CALL_PARSERS",
    "CallArguments",
    "CallBegin",
    "CallEnd",
    "ChatFormat",
    "ContentDelta",
    "Event",
    "FormatError",
    "Message",
    "OutputParser",
    "Prompt",
    "ReasoningDelta",
    "Tool",
    "ToolSet",
    "choose_format",
]
