"""What is measured: a service that runs, or one that is started for it on this machine."""

import json
import os
import ssl
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import httpx

from base.errors import StartupError
from benchmarks.passkey import CHECKPOINT, CONTEXT_LENGTH
from benchmarks.serving.client import Endpoint, error_message
from benchmarks.serving.config import ServingBench
from cli.config_show import read_serve_flags
from cli.serve import Child, check_start, free_port, is_ready, processes

_READY_S = 600.0
_ANSWER_S = 30.0
_MODEL = "bench"


class Service(Protocol):
    """A line of the tables and of the figure."""

    @property
    def label(self) -> str: ...

    def check(self) -> None:
        """Raises StartupError if it cannot be measured, as far as that is known before anything is."""
        ...

    def running(self) -> AbstractContextManager[Endpoint]:
        """The endpoint, while it is measured. Raises StartupError if it cannot be."""
        ...


@dataclass(frozen=True)
class Remote:
    """A service that somebody else runs. model: None for the only one that it serves."""

    label: str
    base_url: str
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        self._endpoint()

    @contextmanager
    def running(self) -> Iterator[Endpoint]:
        yield self._endpoint()

    def _endpoint(self) -> Endpoint:
        endpoint = Endpoint(self.label, self.base_url, self.model or "", self.api_key, self.extra_body)
        served = _served_models(endpoint)
        if self.model is None and len(served) != 1:
            raise StartupError(f"{self.base_url} serves {_listed(served)}: choose one with --model")
        if self.model is not None and self.model not in served:
            raise StartupError(f"{self.base_url} does not serve {self.model!r}, but {_listed(served)}")
        return replace(endpoint, model=self.model or served[0])


@dataclass(frozen=True)
class Local:
    """`hisparse-pd serve` with further flags, started for the measurement and ended with it."""

    label: str
    model_path: Path
    flags: tuple[str, ...] = ()
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        try:
            check_start(read_serve_flags(self._words(0)))
        except StartupError as error:
            raise StartupError(f"{self.label}: {error}") from error

    def _words(self, port: int) -> list[str]:
        own = ["--model-path", str(self.model_path), "--served-model-name", _MODEL, "--port", str(port)]
        return [*own, *self.flags]

    @contextmanager
    def running(self) -> Iterator[Endpoint]:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        # Which tokens came in one event, rather than one for each: this service can say so.
        extra_body = {"return_token_ids": True, **self.extra_body}
        with (
            tempfile.TemporaryFile() as log,
            processes([Child("serve", ["serve", *self._words(port)], port)], log) as children,
        ):
            try:
                wait_ready(url, children, _READY_S)
            except StartupError as error:
                log.seek(0)
                raise StartupError(f"{error}: {_reason(log.read().decode(errors='replace'))}") from error
            yield Endpoint(self.label, url, _MODEL, extra_body=extra_body, process_id=children["serve"].pid)


def check_labels(services: Sequence[Service]) -> None:
    """Raises StartupError for two services that reports could not tell apart."""
    labels = [service.label for service in services]
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise StartupError(f"two services are called {twice!r}: name them with LABEL=")


def remote(word: str, config: ServingBench) -> Service:
    """A service by its address, or by LABEL=address. Raises StartupError for what is no address."""
    label, equals, address = word.partition("=")
    if not equals or "/" in label:
        label, address = "", word
    base_url = address.rstrip("/").removesuffix("/v1")
    host = base_url.removeprefix("http://").removeprefix("https://")
    if host in ("", base_url):
        raise StartupError(f"--base-url {word}: expected http://HOST:PORT or https://HOST:PORT, or LABEL=URL")
    # Without the tokens of an answer a conversation cannot go on.
    extra_body = {**({"return_token_ids": True} if config.turns > 1 else {}), **config.extra_fields}
    return Remote(label or host, base_url, config.model, config.api_key, extra_body)


def local_services(checkpoint: Path, config: ServingBench) -> list[Service]:
    """A service to start for each HiSparse configuration, and of each for each variant."""
    services: list[Service] = []
    for hisparse in (config.hisparse_config, *config.compare_hisparse_config):
        flags = (*(("--hisparse-config", hisparse) if hisparse else ()), *config.serve_flags)
        for words in config.variants or [""]:
            service = variant(words, checkpoint, flags)
            label = hisparse or "default"
            if words:
                label = f"{label}, {service.label}" if config.compare_hisparse_config else service.label
            services.append(replace(service, label=label, extra_body=config.extra_fields))
    return services


def variant(words: str, model_path: Path, common: Sequence[str]) -> Local:
    """A service with further flags, separated by blanks, or LABEL=FLAGS. They come last: of two of a kind, they win."""
    label, equals, flags = words.partition("=")
    if not equals or label.startswith("-"):
        label, flags = words, words
    return Local(label or "default", model_path, (*common, *flags.split()))


def small_checkpoint(context_length: int) -> Path:
    """The trained model that comes with the benchmarks, and the environment in which it is served best.

    Raises StartupError for contexts that it does not take.
    """
    if context_length > CONTEXT_LENGTH:
        raise StartupError(
            f"{context_length} tokens of prompt and answer: the model that is served without --model-path takes "
            f"{CONTEXT_LENGTH}"
        )
    # On few cores, threads that wait for each other would only slow a small model down.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return CHECKPOINT


def vocab_size(checkpoint: Path) -> int:
    """Token ids of a checkpoint. Raises StartupError if there is none."""
    return _configured(checkpoint, "vocab_size")


def context_length(checkpoint: Path) -> int:
    """Tokens of the longest prompt and its answer. Raises StartupError if there is no checkpoint."""
    return _configured(checkpoint, "max_position_embeddings")


def _configured(checkpoint: Path, name: str) -> int:
    try:
        return int(json.loads((checkpoint / "config.json").read_text())[name])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StartupError(f"--model-path {checkpoint}: no config.json with a {name} ({error})") from error


def _served_models(endpoint: Endpoint) -> list[str]:
    url = f"{endpoint.base_url}/v1/models"
    # The certificates that the client trusts, and no proxy, as there.
    trust = ssl.create_default_context()
    try:
        response = httpx.get(url, headers=endpoint.headers(), timeout=_ANSWER_S, trust_env=False, verify=trust)
    except (httpx.RequestError, httpx.InvalidURL) as error:
        raise StartupError(f"no service answers at {url}: {error or type(error).__name__}") from error
    if response.status_code in (401, 403):
        raise StartupError(
            f"{endpoint.base_url} refuses the key (HTTP {response.status_code}): "
            f"{error_message(response.text)}; give it with --api-key or OPENAI_API_KEY"
        )
    try:
        response.raise_for_status()
        return [str(model["id"]) for model in response.json()["data"]]
    except (httpx.HTTPStatusError, ValueError, KeyError, TypeError) as error:
        raise StartupError(
            f"{url} answers HTTP {response.status_code}, expected a list of models: {error_message(response.text)}"
        ) from error


def _listed(models: list[str]) -> str:
    return ", ".join(map(repr, models)) or "no model"


def _reason(log: str) -> str:
    """What a service that did not start said last."""
    return next((line for line in reversed(log.splitlines()) if line.strip()), "it said nothing")


def wait_ready(base_url: str, children: Mapping[str, "subprocess.Popen[bytes]"], timeout: float) -> None:
    """Wait until the gateway can serve. Raises StartupError if a process ends first, or on timeout."""
    deadline = time.monotonic() + timeout
    while not is_ready(base_url):
        for name, child in children.items():
            if child.poll() is not None:
                raise StartupError(f"{name} ended with code {child.returncode} before the service was ready")
        if time.monotonic() > deadline:
            raise StartupError(f"the service at {base_url} was not ready within {timeout:.0f} s")
        time.sleep(0.1)
