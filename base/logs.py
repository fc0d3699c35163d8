"""Structured logs: one event and its fields per line, on standard error."""

import logging
import sys
from typing import Literal

import structlog


def configure_logging(level: str, fmt: Literal["text", "json"], process: str) -> None:
    """Send structlog, the standard library's loggers and warnings to standard error, each line naming its process.

    Libraries whose loggers are to be heard must have been imported: they set them up then.
    level: a standard level name in any case. fmt: key=value text for people or one JSON object per line.
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
    for name in ("httpx", "httpcore", "uvicorn", "transformers", "huggingface_hub"):
        library = logging.getLogger(name)
        library.setLevel(logging.WARNING)
        # Some print by themselves, in a format of their own.
        library.handlers.clear()
        library.propagate = True
    logging.captureWarnings(True)
    # Its warnings are what clients did wrong: counted, and no reason for a line each.
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
