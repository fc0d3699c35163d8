"""A small trained model that finds pass keys in long texts, and questions to ask it.

Unlike random weights it selects what its answers depend on: hit rates mean something, and wrong KV gives wrong answers.
"""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
"""The model's directory; its README says how it was made and what it can do."""

BEGIN_ID = 256
"""The token that a text of its own begins with. Ids below are bytes."""

CONTEXT_LENGTH = 16384
"""Tokens, which are bytes, of the longest prompt and its answer."""
