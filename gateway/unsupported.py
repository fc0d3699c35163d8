"""Fields of the OpenAI API, and of vLLM's additions to it, that this service does not carry out.

One that cannot change the answer is ignored, and so is one that asks for what is done anyway. Every other one, known or
not, is refused: an answer that silently is not what was asked for is worse than none. A null asks for nothing.
"""

from collections.abc import Mapping
from typing import Any

from gateway.errors import ApiError

HARMLESS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "priority",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""For accounts, scheduling and caches: none of it is about the text."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "best_of": (1,),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
}
"""What asks for nothing: without tools there is none to choose, and so on."""

OF_MESSAGES: Mapping[str, tuple[Any, ...]] = {"annotations": ([],), "tool_calls": ([],)}
"""The same for the fields of a message: the client's own answers come back with them."""

OF_STREAMS: Mapping[str, tuple[Any, ...]] = {"continuous_usage_stats": (False,), "include_obfuscation": (True, False)}
"""The same for stream_options. Obfuscation pads chunks, which none of ours need."""


def refuse(fields: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]], path: str = "") -> None:
    """Raises ApiError (400) for the first field that asks for something. `path` is where the fields are."""
    for name, value in fields.items():
        allowed = neutral.get(name, ())
        if value is None or any(_same(value, other) for other in allowed):
            continue
        found = repr(value)
        found = found if len(found) <= 80 else found[:77] + "..."
        other_than = f" other than {' or '.join(repr(other) for other in allowed)}, found {found}" if allowed else ""
        raise ApiError(400, f"{path}{name}: not supported here{other_than}", param=path + name)


def _same(value: Any, other: Any) -> bool:
    """Equal, and not as 1 equals true."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)
