"""Structured logs: one event and its fields per line, on standard error."""

import logging
import sys
from collections.abc import Hashable
from typing import Literal

import structlog

_MOST_COMPLAINTS = 100


def configure_logging(level: str, fmt: Literal["text", "json"], process: str) -> None:
    """Send structlog, the standard library's loggers and warnings to standard error. Each line names its process.

    Import libraries before: they set up their loggers then.
    level: a standard level name in any case. fmt: key=value text, or one JSON object per line.
    """

    def add_process(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        event["process"] = process
        return event

    shared: list[structlog.typing.Processor] = [
        add_process,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
    ]
    render: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if fmt == "json"
        else structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "process", "event"])
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, render],
            foreign_pre_chain=shared,
        )
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in ("httpx", "httpcore", "uvicorn", "transformers", "huggingface_hub", "urllib3"):
        library = logging.getLogger(name)
        library.setLevel(logging.WARNING)
        # Some have handlers of their own, with another format.
        library.handlers.clear()
        library.propagate = True
    logging.captureWarnings(True)
    # Its warnings tell what clients did wrong, which metrics count.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )


class Complaints:
    """Complaints that were logged, so that a repeated mistake does not fill the log. After 100, no other is new."""

    def __init__(self) -> None:
        self._made: set[Hashable] = set()

    def is_new(self, complaint: Hashable) -> bool:
        """Whether to log it."""
        if complaint in self._made or len(self._made) >= _MOST_COMPLAINTS:
            return False
        self._made.add(complaint)
        return True
