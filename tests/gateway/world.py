"""A gateway in this process on real sockets, with scripted nodes, a byte-level checkpoint and official clients."""

import asyncio
import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import anthropic
import httpx
import openai
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from base.metrics import Metrics
from control.messages import Output
from control.plane import ControlPlaneFailed
from gateway.config import GatewayConfig
from gateway.held_answers import HeldAnswers
from gateway.process import Gateway
from tests.gateway.nodes import CONTEXT, FakeDecodeNode, FakeNode, wait_until

MODEL = "tiny"
BOS, EOS = 256, 257
VOCAB = 258
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m.role[0] }}{{ m.name or '' }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    "{% if thinking %}<think>{% endif %}"
)

LONG_CONTEXT = 1 << 15
DSML = "｜DSML｜"  # noqa: RUF001
GLM_TEMPLATE = (
    "{% if reasoning_effort in ['low', 'high'] %}Reasoning Effort: {{ reasoning_effort }}\n{% endif %}"
    "{% if tools %}tools: {% for tool in tools %}{{ tool | tojson }}{% endfor %}\n{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>"
    "{% endfor %}</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}</think>{% else %}<think>{% endif %}{% endif %}"
)
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
QUESTION: dict[str, Any] = {"role": "user", "content": "How is it in Rome?"}

_CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6}
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 6},
    "/v1/chat/completions": _CHAT,
    "/v1/responses": {"input": "hi", "max_output_tokens": 6},
    "/v1/messages": _CHAT,
}
"""Bodies for six tokens."""


def held_answers(per_request: int = 1 << 30, total: int = 1 << 30) -> HeldAnswers:
    """What a gateway counts answers with; by default it takes all."""
    return HeldAnswers(per_request, total, Metrics().answers_ended)


def byte_tokenizer() -> Tokenizer:
    """Token id = byte, plus two special tokens."""
    alphabet = bytes_to_unicode()
    tokenizer = Tokenizer(models.BPE(vocab={alphabet[b]: b for b in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<bos>", special=True), AddedToken("<eos>", special=True)])
    return tokenizer


def write_checkpoint(
    directory: Path, chat_template: str | None = CHAT_TEMPLATE, context: int = CONTEXT, model_type: str = "deepseek_v32"
) -> Path:
    """What a gateway needs of a checkpoint: tokenizer, chat template if there is one, and config."""
    directory.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        **({"chat_template": chat_template} if chat_template else {}),
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    config = {
        "model_type": model_type,
        "vocab_size": VOCAB,
        "max_position_embeddings": context,
        "eos_token_id": EOS,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


class RunningGateway:
    """A gateway on a thread with a loop of its own."""

    def __init__(self, config: GatewayConfig) -> None:
        self.gateway = Gateway(config)
        self.scheme = "http" if config.ssl_certfile is None else "https"
        self.error: ControlPlaneFailed | None = None
        """What it ended with."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.gateway.port}"

    @property
    def control_address(self) -> str:
        return self.gateway.control.me.address

    @property
    def connections(self) -> int:
        """Open HTTP connections."""
        return len(self.gateway._http.server_state.connections)

    def counted(self, name: str, reason: str) -> float:
        """A counter of its metrics, by its label `reason`."""
        registry = self.gateway.metrics.registry
        return registry.get_sample_value(f"hisparse_pd_{name}_total", {"reason": reason}) or 0.0

    @property
    def serving(self) -> int:
        """HTTP requests that are being served."""
        return self.gateway._admission.serving

    def drain(self) -> None:
        self._loop.call_soon_threadsafe(self.gateway.signalled, signal.SIGTERM)

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self.gateway.signalled, signal.SIGINT)
            self.join()

    def join(self) -> None:
        """Wait until it has ended."""
        self._thread.join(timeout=20)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self.gateway.serve())
        except ControlPlaneFailed as error:
            self.error = error
        self._loop.close()


def dsml_call(city: str, days: int | None = None) -> str:
    days_text = "" if days is None else f'<{DSML}parameter name="days" string="false">{days}</{DSML}parameter>\n'
    return (
        f'<{DSML}invoke name="weather">\n<{DSML}parameter name="city" string="true">{city}</{DSML}parameter>\n'
        f"{days_text}</{DSML}invoke>\n"
    )


def dsml_calls(*calls: str) -> str:
    return f"\n\n<{DSML}function_calls>\n{''.join(calls)}</{DSML}function_calls>"


def glm_call(city: str) -> str:
    return f"<tool_call>weather<arg_key>city</arg_key><arg_value>{city}</arg_value></tool_call>"


def said(text: str) -> list[list[int]]:
    """Messages of a few bytes, and the end of the answer."""
    raw = text.encode()
    return [*(list(raw[start : start + 5]) for start in range(0, len(raw), 5)), [EOS]]


def chunks_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream of OpenAI's older endpoints."""
    *chunks, done = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert done == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream that names them."""
    *blocks, rest = answer.text.split("\n\n")
    assert rest == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def first_of_each_run(kinds: list[str]) -> list[str]:
    return [kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before]


class World:
    """A gateway for one checkpoint with a prefill and a decode node, which says bytes, each a token."""

    def __init__(self, checkpoint: Path, context: int = LONG_CONTEXT, **flags: Any) -> None:
        flags = {"served_model_name": (MODEL,), **flags}
        config = GatewayConfig(model_path=checkpoint, port=0, control_port=0, **flags)
        self.gateway = RunningGateway(config)
        self._more: list[FakeNode] = []
        self._background = ThreadPoolExecutor(4)
        address = self.gateway.control_address
        self.prefill = FakeNode(address, "prefill", max_request_tokens=context).start()
        self.decode = FakeDecodeNode(address, max_request_tokens=context).start()
        self.http = httpx.Client(base_url=self.gateway.url, timeout=20)
        self.client: Any = openai.OpenAI(base_url=f"{self.gateway.url}/v1", api_key="none", max_retries=0, timeout=20)
        self.anthropic: Any = anthropic.Anthropic(base_url=self.gateway.url, api_key="none", max_retries=0, timeout=20)

    def says(self, text: str) -> None:
        self.decode.reset()
        self.decode.chunks = said(text)

    def says_until_cut_off(self, text: str) -> None:
        """Ends for want of room, not because the model ends it."""
        self.says(text)
        self.decode.chunks = said(text)[:-1]

    def breaks_after(self, text: str) -> None:
        self.says_until_cut_off(text)
        error = Output(request_id="any", start=len(text.encode()), finish_reason="error", error="scripted")
        self.decode.extra_outputs = [error]

    @property
    def prompt(self) -> str:
        """The last prompt that the decode node got."""
        return bytes(self.decode.generated[-1].prompt_ids).decode()

    def chat(self, *messages: dict[str, Any], **fields: Any) -> Any:
        fields = {"max_tokens": 4096, "tools": [WEATHER], **fields}
        return self.client.chat.completions.create(model=MODEL, messages=list(messages), **fields)

    def complete(self, **fields: Any) -> Any:
        """Ask for a completion by the official client."""
        return self.client.completions.create(model=MODEL, **fields)

    def post(self, **fields: Any) -> httpx.Response:
        """Ask for a completion."""
        return self.http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 100, **fields})

    def post_later(self, **fields: Any) -> Future[httpx.Response]:
        return self._background.submit(self.post, **fields)

    @contextmanager
    def stream(self, **fields: Any) -> Iterator[Iterator[str]]:
        """The data of a completion's events. At the end of the context the client leaves."""
        body = {"prompt": "abc", "max_tokens": 100, "stream": True, **fields}
        with self.http.stream("POST", "/v1/completions", json=body) as response:
            yield (line.removeprefix("data: ") for line in response.iter_lines() if line)

    def start_prefill(self, **options: Any) -> FakeNode:
        self._more.append(FakeNode(self.gateway.control_address, "prefill", **options))
        return self._more[-1].start()

    def start_decode(self, **options: Any) -> FakeDecodeNode:
        node = FakeDecodeNode(self.gateway.control_address, **options)
        self._more.append(node)
        return node.start()

    def start_full_decode(self) -> FakeDecodeNode:
        """Another decode node, which gets only what the first one does not take."""
        node, registry = self.start_decode(queued_tokens=10**6), self.gateway.gateway.registry
        wait_until(lambda: registry.nodes[node.me.address].load >= 10**6)
        return node

    def leaves(self, node: FakeNode) -> None:
        """The gateway gives that node nothing more."""
        node.membership.leave()
        registry = self.gateway.gateway.registry
        wait_until(lambda: registry.nodes[node.me.address].leaving)

    def metrics(self) -> str:
        return self.http.get("/metrics").text

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for client in (self.client, self.anthropic, self.http):
            client.close()
        # Before the nodes: it waits for their answers to its cancels.
        self.gateway.stop()
        for node in (self.prefill, self.decode, *self._more):
            node.die()
        self._background.shutdown()


def deepseek_service(directory: Path) -> World:
    """As published, without a template."""
    return World(write_checkpoint(directory, None, LONG_CONTEXT))


def glm_service(directory: Path) -> World:
    return World(write_checkpoint(directory, GLM_TEMPLATE, LONG_CONTEXT, "glm_moe_dsa"))
