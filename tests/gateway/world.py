"""A gateway in this process on real sockets, with scripted nodes, a byte-level checkpoint and official clients."""

import asyncio
import json
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import anthropic
import httpx
import numpy as np
import openai
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from base.metrics import Metrics
from benchmarks.scripted_node import ScriptedNode
from control.messages import (
    Accepted,
    Cancel,
    Ended,
    Generate,
    HeartbeatAck,
    Message,
    ModelIdentity,
    Output,
    Outputs,
    Peer,
    Refused,
    Rejected,
    Resend,
    Token,
)
from control.plane import ControlPlaneFailed
from control.prompt_logprobs import PromptLogprobs
from gateway.config import GatewayConfig
from gateway.held_answers import HeldAnswers
from gateway.process import Gateway

MODEL = "tiny"
CONTEXT = 512
BOS, EOS = 256, 257
VOCAB = 258
IDENTITY = ModelIdentity(
    fingerprint="f00d",
    dtype="torch.float32",
    kv_format="float32",
    draft_layer=False,
    num_layers=2,
    num_index_layers=2,
    item_bytes=1152,
    index_key_bytes=256,
)
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m.role[0] }}{{ m.name or '' }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    "{% if thinking %}<think>{% endif %}"
)

LONG_CONTEXT = 1 << 15
DSML = "｜DSML｜"  # noqa: RUF001
GLM_TEMPLATE = (
    "{% if tools %}tools: {% for tool in tools %}{{ tool | tojson }}{% endfor %}\n{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>"
    "{% endfor %}</tool_call>{% endfor %}{% endfor %}"
    "<|assistant|>{% if enable_thinking is defined and not enable_thinking %}</think>{% else %}<think>{% endif %}"
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


def wait_until(condition: Callable[[], object], timeout: float = 10.0) -> None:
    until = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < until, "the condition did not come true"
        time.sleep(0.005)


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


class FakeNode(ScriptedNode):
    """A scripted node that keeps what gateways tell it."""

    def __init__(self, gateway_address: str, role: Literal["prefill", "decode"], **options: Any) -> None:
        self.refusals: list[str] = []
        self.prefill_nodes: tuple[Peer, ...] = ()
        super().__init__(gateway_address, role, **{"identity": IDENTITY, "max_request_tokens": CONTEXT, **options})

    @property
    def me(self) -> Peer:
        return self.control.me

    @property
    def port(self) -> int:
        return int(self.me.address.rpartition(":")[2])

    def start(self) -> Self:
        self.run(tick_s=0.02)
        wait_until(lambda: self.membership.is_member or self.refusals)
        return self

    def deliver(self, sender: Peer, message: Message) -> None:
        match message:
            case Refused(reason=reason):
                self.refusals.append(reason)
                return
            case HeartbeatAck(prefill_nodes=prefill_nodes):
                self.prefill_nodes = prefill_nodes
        super().deliver(sender, message)


class FakeDecodeNode(FakeNode):
    """Answers with the prompt over and over, one token per message.

    hold_after: how many tokens to send before waiting for a Cancel. reject: refuse with this code. chunks: send these
    token ids, one list per message, instead of the prompt.
    """

    def __init__(self, gateway_address: str, **options: object) -> None:
        self.reset()
        super().__init__(gateway_address, "decode", **options)  # type: ignore[arg-type]

    def reset(self) -> None:
        """Forget the script and what was seen."""
        self.hold_after: int | None = None
        self.reject: Literal["queue_full", "too_long", "draining"] | None = None
        self.invalid: str | None = None
        """Why no node can carry requests out."""
        self.chunks: Sequence[Sequence[int]] | None = None
        self.lost: frozenset[int] = frozenset()
        """Numbers of the messages with tokens that are lost on the way; the other ones arrive."""
        self.lost_prompt = 0
        """How many pieces of the prompt's log probabilities are lost on the way."""
        self.deaf_to_resend = 0
        """How many times it does not hear that it is asked for tokens again."""
        self.resent: list[Resend] = []
        """What it was asked for again."""
        self._answers: dict[str, list[Output]] = {}
        self.cached_tokens: Sequence[int] = (0,)
        """Tokens of the prompt that were not computed, of one request after the other, round and round."""
        self.extra_outputs: list[Output] = []
        """Sent after the tokens; their request ids are replaced."""
        self.asked: list[Generate] = []
        """Messages that asked it for requests, as they came."""
        self.generated: list[Generate] = []
        """The requests, each once."""
        self.cancelled: list[str] = []
        self.ended: list[str] = []
        """Requests of which the gateway has said that it knows of their end."""

    def deliver(self, sender: Peer, message: Message) -> None:
        match message:
            case Generate():
                self.asked.append(message)
                seen = {request.request_id for request in self.generated}
                for request in message.each():
                    if request.request_id not in seen:
                        self.generated.append(request)
                        self._generate(sender, request)
            case Cancel():
                self.cancelled.append(message.request_id)
                self.send(sender, Output(request_id=message.request_id, start=0, finish_reason="abort"))
            case Ended():
                self.ended.append(message.request_id)
            case Resend():
                self.resent.append(message)
                if len(self.resent) > self.deaf_to_resend:
                    self._resend(sender, message)
            case _:
                super().deliver(sender, message)

    def send(self, to: Peer, *outputs: Output) -> None:
        self.control.send(to, Outputs.of(outputs))

    def _generate(self, sender: Peer, request: Generate) -> None:
        if self.reject is not None:
            rejected = Rejected(
                request_id=request.request_id, code=self.reject, reason="scripted refusal", retry_after=7.0
            )
            self.control.send(sender, rejected)
            return
        self.control.send(sender, Accepted(request_id=request.request_id))
        if self.invalid is not None:
            ended = Output(request_id=request.request_id, start=0, finish_reason="invalid", error=self.invalid)
            self.send(sender, ended)
            return
        start = 0
        answer = self._answers[request.request_id] = []
        for number, piece in enumerate(self._prompt_logprobs(request)):
            output = Output(request_id=request.request_id, start=0, prompt_logprobs=piece)
            answer.append(output)
            if number >= self.lost_prompt:
                self.send(sender, output)
        for number, (ids, finish) in enumerate(self._script(request)):
            tokens = tuple(self._token(token_id, request) for token_id in ids)
            output = Output(request_id=request.request_id, start=start, tokens=tokens, finish_reason=finish)
            if not start:
                cached = self.cached_tokens[(len(self.generated) - 1) % len(self.cached_tokens)]
                output = output._replace(cached_tokens=cached)
            answer.append(output)
            if number not in self.lost:
                self.send(sender, output)
            start += len(tokens)
        for output in self.extra_outputs:
            self.send(sender, output._replace(request_id=request.request_id))

    def _resend(self, sender: Peer, asked: Resend) -> None:
        outputs = self._answers[asked.request_id]
        self.send(sender, *(output for output in outputs if output.start >= asked.start))

    def _script(self, request: Generate) -> list[tuple[Sequence[int], Literal["stop", "length"] | None]]:
        prompt = request.prompt_ids
        chunks = self.chunks or [[prompt[i % len(prompt)]] for i in range(request.max_new_tokens)]
        script: list[tuple[Sequence[int], Literal["stop", "length"] | None]] = []
        for index, ids in enumerate(chunks):
            if self.hold_after is not None and index == self.hold_after:
                return script
            if ids and ids[-1] in request.stop_token_ids:
                return [*script, (ids, "stop")]
            last = index == len(chunks) - 1 and self.hold_after is None and not self.extra_outputs
            script.append((ids, "length" if last else None))
        return script

    @staticmethod
    def _prompt_logprobs(request: Generate) -> list[PromptLogprobs]:
        """Of position p: -p, rank p, and the alternatives token p + 0, p + 1 ... with -p - 0.5, -p - 1.5 ..."""
        pieces = []
        for start in range(1, len(request.prompt_ids), 2) if request.prompt_logprobs is not None else ():
            stop = min(start + 2, len(request.prompt_ids))
            columns = range(1 + (request.prompt_logprobs or 0))
            ints = [[p + max(0, i - 1) for i in columns] for p in range(start, stop)]
            floats = [[-p - (i - 0.5 if i else 0.0) for i in columns] for p in range(start, stop)]
            pieces.append(PromptLogprobs.of(start, np.array(ints, np.int32), np.array(floats, np.float32)))
        return pieces

    @staticmethod
    def _token(token_id: int, request: Generate) -> Token:
        alternatives = request.sampling.top_logprobs
        if alternatives is None:
            return Token(token_id=token_id)
        top = tuple(((token_id + i) % 256, -0.5 - i) for i in range(alternatives))
        return Token(token_id=token_id, logprob=-0.5, top_logprobs=top)


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
        config = GatewayConfig(model_path=checkpoint, served_model_name=MODEL, port=0, control_port=0, **flags)
        self.gateway = RunningGateway(config)
        address = self.gateway.control_address
        self.prefill = FakeNode(address, "prefill", max_request_tokens=context).start()
        self.decode = FakeDecodeNode(address, max_request_tokens=context).start()
        self.client = openai.OpenAI(base_url=f"{self.gateway.url}/v1", api_key="none", max_retries=0, timeout=20)
        self.anthropic = anthropic.Anthropic(base_url=self.gateway.url, api_key="none", max_retries=0, timeout=20)

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
        return self.client.chat.completions.create(model=MODEL, messages=list(messages), **fields)  # type: ignore[call-overload]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.client.close()
        self.anthropic.close()
        for node in (self.prefill, self.decode):
            node.die()
        self.gateway.stop()


def deepseek_service(directory: Path) -> World:
    """As published, without a template."""
    return World(write_checkpoint(directory, None, LONG_CONTEXT))


def glm_service(directory: Path) -> World:
    return World(write_checkpoint(directory, GLM_TEMPLATE, LONG_CONTEXT, "glm_moe_dsa"))
