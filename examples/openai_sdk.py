"""A streamed answer by the OpenAI SDK."""

from openai import OpenAI

QUESTION = "The pass key of river is 40917. The pass key of castle is 11304.\nWhat is the pass key of river?"

client = OpenAI()
model = client.models.list().data[0].id
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": QUESTION}],
    max_tokens=64,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
    if chunk.usage is not None:
        print(f"\n{chunk.usage.prompt_tokens} prompt tokens, {chunk.usage.completion_tokens} in the answer")
