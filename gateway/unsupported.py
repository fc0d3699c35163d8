"""Fields of OpenAI's API, and of vLLM's additions to it, that this service does not implement.

A field that cannot change the answer is ignored, and so are null and a value that asks for the default. Every other
field, known or not, is refused: no answer is better than one that ignores a part of the request.
"""

from collections.abc import Mapping
from typing import Any

from gateway.errors import ApiError, shown

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
"""Fields for accounts, scheduling and caches, which do not change the text."""

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
"""By field, the values that ask for the default."""

OF_MESSAGES: Mapping[str, tuple[Any, ...]] = {"annotations": ([],), "tool_calls": ([],)}
"""The same for the fields of a message: clients send back answers with these."""

OF_STREAMS: Mapping[str, tuple[Any, ...]] = {"continuous_usage_stats": (False,), "include_obfuscation": (True, False)}
"""The same for stream_options. Obfuscation pads chunks, which no client depends on."""


def refuse(fields: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]], path: str = "") -> None:
    """Raises ApiError (400) for the first field with a value that is not neutral. path: prefix of the field's name."""
    for name, value in fields.items():
        allowed = neutral.get(name, ())
        if value is None or any(_same(value, other) for other in allowed):
            continue
        other_than = f" other than {' or '.join(map(repr, allowed))}, found {shown(value)}" if allowed else ""
        raise ApiError(400, f"{path}{name}: not supported here{other_than}", param=path + name)


def _same(value: Any, other: Any) -> bool:
    """Equal, where 1 does not equal true."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)
