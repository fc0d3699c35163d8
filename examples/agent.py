"""An agent: the model asks for a tool, this program runs it, and the model answers with the result.

The first turn requires a call; a model that was trained to call tools needs no `tool_choice`.
"""

import json

from openai import OpenAI

PASS_KEYS = {"river": "40917", "castle": "11304"}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "The pass key of a place",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "enum": list(PASS_KEYS)}},
            "required": ["place"],
            "additionalProperties": False,
        },
    },
}

client = OpenAI()
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "What is the pass key of river?"}]
for tool_choice in ("required", "none"):
    answer = client.chat.completions.create(
        model=model,
        messages=messages,
        tools=[TOOL],
        tool_choice=tool_choice,
        parallel_tool_calls=False,
        max_tokens=256,
        temperature=0,
    )
    message = answer.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls or []:
        arguments = json.loads(call.function.arguments)
        result = PASS_KEYS[arguments["place"]]
        print(f"{call.function.name}({arguments}) -> {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
print(f"answer: {message.content}")
