"""litellm against the gateway at argv[1]: chat, streams, tools, responses, Anthropic's API, fallbacks."""

import json
import sys

import litellm

URL, TOOL = sys.argv[1], json.loads(sys.argv[2])
OPENAI = {"model": "openai/tiny", "api_base": f"{URL}/v1", "api_key": "none"}
ANTHROPIC = {"model": "anthropic/tiny", "api_base": URL, "api_key": "none", "max_tokens": 500}
ASKED = [{"role": "user", "content": "How is it in Rome?"}]


def is_complete(message) -> None:
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Rome"}), message
    assert message.content.strip() == "I look.", message
    assert message.reasoning_content == "Rome, then.", message


is_complete(litellm.completion(**OPENAI, messages=ASKED, tools=[TOOL]).choices[0].message)
is_complete(litellm.completion(**ANTHROPIC, messages=ASKED, tools=[TOOL]).choices[0].message)
for service in (OPENAI, ANTHROPIC):
    chunks = list(litellm.completion(**service, messages=ASKED, tools=[TOOL], stream=True))
    is_complete(litellm.stream_chunk_builder(chunks, messages=ASKED).choices[0].message)
function = {"type": "function", **TOOL["function"]}
response = litellm.responses(**OPENAI, input="How is it in Rome?", tools=[function])
assert [item.type for item in response.output] == ["reasoning", "message", "function_call"], response
refusal = ""
try:
    litellm.completion(**OPENAI, messages=ASKED, temperature=-1)
except litellm.BadRequestError as error:
    refusal = str(error)
assert "temperature" in refusal, refusal

# What is too long goes to another model.
LONG = [{"role": "user", "content": "a" * 100_000}]
larger = {"model": "openai/larger", "api_key": "none", "mock_response": "There is room."}
for service in (OPENAI, ANTHROPIC):
    models = [{"model_name": name, "litellm_params": of} for name, of in (("tiny", service), ("larger", larger))]
    router = litellm.Router(model_list=models, context_window_fallbacks=[{"tiny": ["larger"]}], num_retries=0)
    assert router.completion(model="tiny", messages=LONG).choices[0].message.content == "There is room."
refused = []
for ask in (
    lambda: litellm.completion(**OPENAI, messages=LONG),
    lambda: litellm.completion(**ANTHROPIC, messages=LONG, stream=True),
    lambda: litellm.responses(**OPENAI, input="a" * 100_000),
):
    try:
        ask()
    except litellm.ContextWindowExceededError as error:
        refused.append(error)
assert len(refused) == 3, refused
