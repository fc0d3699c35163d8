"""LangChain's ChatOpenAI against the gateway at argv[1]: chat, streams and tools, over both of OpenAI's endpoints."""

import json
import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

URL, TOOL = sys.argv[1], json.loads(sys.argv[2])
ASKED = HumanMessage("How is it in Rome?")

for responses in (False, True):
    model = ChatOpenAI(
        model="tiny",
        base_url=f"{URL}/v1",
        api_key="none",
        max_retries=0,
        use_responses_api=responses,
        stream_usage=True,
    ).bind_tools([TOOL])
    answer = model.invoke([ASKED])
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Rome"}), answer
    again = model.invoke([ASKED, answer, ToolMessage("sunny", tool_call_id=call["id"])])
    assert again.tool_calls, again
    whole = None
    for chunk in model.stream([ASKED]):
        whole = chunk if whole is None else whole + chunk
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == [("weather", {"city": "Rome"})], whole
    assert whole.usage_metadata["output_tokens"] > 0, whole
