"""Configuration of a gateway."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from base.errors import StartupError
from base.flags import Flag
from service.config import ControlPort, Port, ProcessConfig

CallParserName = Literal["auto", "deepseek_v32", "glm47", "hermes", "none"]
API_KEYS_VARIABLE = "HISPARSE_PD_API_KEY"
"""The environment variable with the API keys of clients."""


def given_keys(flag: str, words: Sequence[str] | None) -> tuple[str, ...]:
    """The keys of --api-key, else of the environment. Raises StartupError if the variable is set and holds no key."""
    if words:
        return tuple(words)
    if API_KEYS_VARIABLE not in os.environ:
        return ()
    keys = tuple(key for key in re.split(r"[\s,]+", os.environ[API_KEYS_VARIABLE]) if key)
    if not keys:
        raise StartupError(f"{API_KEYS_VARIABLE} is set and holds no key; unset it to serve without authentication")
    return keys


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(ProcessConfig):
    """The flags of a gateway."""

    port: Port = 8000
    control_port: ControlPort = 8001
    control_host: Annotated[str | None, Flag("Address to bind ZeroMQ to; default: --host.")] = None
    metrics_port: Annotated[
        int | None,
        Flag(
            "Port of its own for /metrics, which the HTTP port then has no more; 0 takes a free one.", min=0, max=65535
        ),
    ] = None
    served_model_name: Annotated[
        tuple[str, ...],
        Flag(
            "Model name that clients use, and that answers have; may be repeated for further ones; default: the path."
        ),
    ] = ()
    request_timeout: Annotated[float, Flag("Seconds after which a request is given up with 504.", min=0.1)] = 3600.0
    token_timeout: Annotated[
        float, Flag("Seconds without a new token after which a request is given up with 504.", min=0.1)
    ] = 600.0
    migration_limit: Annotated[
        int, Flag("How often a request that has begun may move to another decode node when its own fails.", min=0)
    ] = 3
    api_keys: Annotated[
        tuple[str, ...],
        Flag(
            "Key that clients must present; may be repeated. Better in the environment, HISPARSE_PD_API_KEY, or a "
            "file: a command line is public until the process has started.",
            name="--api-key",
            read=given_keys,
        ),
    ] = field(default=(), repr=False)
    api_key_file: Annotated[
        Path | None,
        Flag(
            "File of keys that clients must present, one a line, each with name, max-concurrent-requests and "
            "tokens-per-minute if wanted (docs/operations/secure.md); read again when it changes."
        ),
    ] = None
    priority_key_file: Annotated[
        Path | None, Flag("File of further keys, one a line, whose requests may go before others: a priority below 0.")
    ] = None
    allow_priority: Annotated[bool, Flag("Requests of all clients may go before others: a priority below 0.")] = False
    status_page: Annotated[
        bool, Flag("Serve /status, a page with nodes and slow requests, and /v1/cluster, the same as JSON.")
    ] = False
    operator_key_file: Annotated[
        Path | None, Flag("File of further keys, one a line, of operators: they open the page of --status-page.")
    ] = None
    prefix_cache_per_key: Annotated[
        bool, Flag("Clients with different API keys share no cached prefixes: none can tell what others have sent.")
    ] = False
    allowed_origins: Annotated[
        tuple[str, ...],
        Flag(
            "Origin whose web pages may post without an API key, as https://chat.example; may be repeated. The "
            "gateway's own may.",
            name="--allowed-origin",
        ),
    ] = ()
    ssl_certfile: Annotated[Path | None, Flag("Certificate chain (PEM): serve HTTPS.")] = None
    ssl_keyfile: Annotated[Path | None, Flag("Private key (PEM) of --ssl-certfile.")] = None
    max_body_mib: Annotated[
        int | None,
        Flag("Largest body in MiB, else 413; default: 16 bytes per token of the context, at least 1.", min=1),
    ] = None
    max_total_body_mib: Annotated[
        int, Flag("MiB of bodies held at a time, at least 8 bytes per prompt token; beyond it 429.", min=1)
    ] = 128
    max_answer_mib: Annotated[
        int, Flag("MiB held of the answers to one request, log probabilities as they are sent; beyond it 400.", min=1)
    ] = 32
    max_total_answer_mib: Annotated[
        int, Flag("MiB of answers held at a time; beyond it the request that holds the most gets 503.", min=1)
    ] = 256
    max_concurrent_requests: Annotated[
        int, Flag("Requests that the gateway holds at a time; beyond it clients get 429.", min=1)
    ] = 1024
    chat_template: Annotated[Path | None, Flag("Jinja template of chats; default: the checkpoint's.")] = None
    tool_call_parser: Annotated[
        CallParserName,
        Flag("How the model writes tool calls; auto: as its chat template teaches. none: calls stay text."),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["auto", "none"], Flag("Whether reasoning is taken out of the text; none: it stays there.")
    ] = "auto"
    routing: Annotated[
        Literal["prefix", "least-loaded"],
        Flag("prefix: a request goes where its prefix is cached, unless that node is much fuller than others."),
    ] = "prefix"
    max_routed_tokens: Annotated[
        int, Flag("Last used tokens of each node's prefix cache to remember; 64 take some 100 bytes.", min=1)
    ] = 2**26
    strict_fields: Annotated[bool, Flag("Refuse fields of requests that nobody knows, instead of ignoring them.")] = (
        False
    )
    header_timeout: Annotated[
        float, Flag("Seconds for a request's head or a TLS handshake; a body has as long, plus 1 s per 8 KiB.", min=0.1)
    ] = 10.0

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names that clients use for the model. Answers have the first."""
        return self.served_model_name or (str(self.model_path),)

    @property
    def bound_control_host(self) -> str:
        return self.control_host or self.host

    @property
    def advertised_host(self) -> str:
        return self.advertise_host or self.bound_control_host
