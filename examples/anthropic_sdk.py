"""A streamed answer by the Anthropic SDK."""

from anthropic import Anthropic

QUESTION = "The pass key of river is 40917. The pass key of castle is 11304.\nWhat is the pass key of castle?"

client = Anthropic()
model = client.models.list().data[0].id
with client.messages.stream(
    model=model, messages=[{"role": "user", "content": QUESTION}], max_tokens=64, extra_body={"temperature": 0}
) as stream:
    for text in stream.text_stream:
        print(text, end="", flush=True)
    usage = stream.get_final_message().usage
print(f"\n{usage.input_tokens} prompt tokens, {usage.output_tokens} in the answer")
