"""English text that every Python comes with: the language reference, as `help()` shows it.

So nothing has to be shipped or fetched. Versions of Python differ in it: the same seed gives the same passages on the
same minor version only.
"""

import random
from functools import cache
from pydoc_data.topics import topics

from benchmarks.passkey import BEGIN_ID


@cache
def reference_text() -> str:
    """All topics, some 400 KB of ASCII: a byte is a character."""
    joined = "\n\n".join(topics[name].strip() for name in sorted(topics))
    return joined.encode("ascii", errors="ignore").decode()


def passage(rng: random.Random, length: int, text: str = "") -> str:
    """So many characters of a text, by default the reference, from the beginning of a line on.

    Raises ValueError for more than half of the text, of which passages would hardly differ.
    """
    text = text or reference_text()
    if not 0 <= length <= len(text) // 2:
        raise ValueError(f"a passage has at most {len(text) // 2} characters, not {length}")
    start = text.index("\n", rng.randrange(len(text) // 2)) + 1
    return text[start : start + length]


def passage_ids(rng: random.Random, length: int, text: str = "") -> list[int]:
    """A passage as so many token ids of the model, the first of which begins a text. Raises ValueError as `passage`."""
    return [BEGIN_ID, *passage(rng, length - 1, text).encode()]
