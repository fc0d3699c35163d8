"""A gateway whose decode node says what a test scripts, in the formats of both families.

The decode node says bytes, each a token.
"""

from pathlib import Path
from typing import Any

import anthropic
import openai

from control.messages import Output
from gateway.config import GatewayConfig
from tests.gateway.fakes import EOS, MODEL, FakeDecodeNode, FakeNode, RunningGateway, write_checkpoint

CONTEXT = 1 << 15
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


class Service:
    """A gateway for one checkpoint, with a scripted decode node."""

    def __init__(self, checkpoint: Path, **flags: Any) -> None:
        config = GatewayConfig(model_path=checkpoint, served_model_name=MODEL, port=0, control_port=0, **flags)
        self.gateway = RunningGateway(config)
        address = self.gateway.control_address
        self.prefill = FakeNode(address, "prefill", max_request_tokens=CONTEXT).start()
        self.decode = FakeDecodeNode(address, max_request_tokens=CONTEXT)
        self.decode.start()
        self.client = openai.OpenAI(base_url=f"{self.gateway.url}/v1", api_key="none", max_retries=0, timeout=20)
        self.anthropic = anthropic.Anthropic(base_url=self.gateway.url, api_key="none", max_retries=0, timeout=20)

    def says(self, text: str) -> None:
        self.decode.reset()
        self.decode.chunks = said(text)

    def says_until_cut_off(self, text: str) -> None:
        """Ends for want of room, not because the model ends it."""
        self.decode.reset()
        self.decode.chunks = said(text)[:-1]

    def breaks_after(self, text: str) -> None:
        self.decode.reset()
        self.decode.chunks = said(text)[:-1]
        error = Output(request_id="any", start=len(text.encode()), finish_reason="error", error="scripted")
        self.decode.extra_outputs = [error]

    @property
    def prompt(self) -> str:
        """The last prompt that the decode node got."""
        return bytes(self.decode.generated[-1].prompt_ids).decode()

    def chat(self, *messages: dict[str, Any], **fields: Any) -> Any:
        fields = {"max_tokens": 4096, "tools": [WEATHER], **fields}
        return self.client.chat.completions.create(model=MODEL, messages=list(messages), **fields)  # type: ignore[call-overload]

    def close(self) -> None:
        self.client.close()
        self.anthropic.close()
        for node in (self.prefill, self.decode):
            node.die()
        self.gateway.stop()


def deepseek_service(directory: Path) -> Service:
    """As published, without a template."""
    return Service(write_checkpoint(directory, None, CONTEXT))


def glm_service(directory: Path) -> Service:
    return Service(write_checkpoint(directory, GLM_TEMPLATE, CONTEXT, "glm_moe_dsa"))
