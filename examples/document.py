"""Many questions about one long document. The document comes first, so that its KV is computed once and then cached."""

import sys
import time
from pathlib import Path

from openai import OpenAI

client = OpenAI()
model = client.models.list().data[0].id
document = Path(sys.argv[1]).read_text()
for question in sys.argv[2:]:
    asked = time.monotonic()
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": f"{document}\n{question}"}], max_tokens=64, temperature=0
    )
    usage = answer.usage
    print(
        f"{answer.choices[0].message.content} ({time.monotonic() - asked:.2f} s, "
        f"{usage.prompt_tokens_details.cached_tokens} of {usage.prompt_tokens} prompt tokens cached)"
    )
