"""Fields of request bodies that the models do not declare.

A field that is known, changes the answer and is not carried out is refused: no answer is better than one that ignores a
part of the request. Null is accepted, and so is a value that asks for the default. A field that nobody knows is
ignored, as other servers do, and logged once.
"""

from collections.abc import Mapping
from typing import Any

import structlog

from gateway.errors import ApiError, shown

log = structlog.get_logger(__name__)

HARMLESS = frozenset(
    {
        "metadata",
        "mm_processor_kwargs",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Fields for accounts, caches and speed, which do not change the text."""

Neutral = Mapping[str, tuple[Any, ...]]
"""By field, the values that ask for the default."""

NEUTRAL: Neutral = {
    "add_generation_prompt": (True,),
    "audio": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "custom_logit_processor": (),
    "detokenize": (True,),
    "documents": ([],),
    "ebnf": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "json_schema": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "lora_path": (),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "regex": (),
    "spaces_between_special_tokens": (True,),
    "stop_regex": ([],),
    "suffix": ("",),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""Fields of OpenAI's, vLLM's and SGLang's APIs that are not carried out here."""

OF_MESSAGES: Neutral = {"annotations": ([],), "audio": (), "function_call": (), "prefix": (False,)}
"""The same for the fields of a message: clients send back answers with these."""

OF_STREAMS: Neutral = {"include_obfuscation": (True, False)}
"""The same for stream_options. Obfuscation pads chunks, which no client depends on."""

_MOST_NAMES = 1000
_MOST_CHARACTERS = 64


class FieldPolicy:
    """What becomes of fields that are not declared. Threads may share it.

    strict: what nobody knows is refused, too.
    """

    def __init__(self, strict: bool) -> None:
        self._strict = strict
        self._logged: set[str] = set()

    def check(self, fields: Mapping[str, Any], neutral: Neutral, path: str = "") -> None:
        """Raises ApiError (400) for the first field that is refused. path: what its name begins with."""
        for name, value in fields.items():
            if value is None or name in HARMLESS:
                continue
            if name not in neutral:
                self._unknown(name, path)
            elif not any(_same(value, other) for other in neutral[name]):
                allowed = " or ".join(map(repr, neutral[name]))
                other_than = f" other than {allowed}, found {shown(value)}" if allowed else ""
                raise ApiError(400, f"{path}{name}: not supported here{other_than}", param=path + name)

    def _unknown(self, name: str, path: str) -> None:
        if self._strict:
            raise ApiError(400, f"{path}{name}: not known here", param=path + name)
        short = name[:_MOST_CHARACTERS]
        if short not in self._logged and len(self._logged) < _MOST_NAMES:
            self._logged.add(short)
            log.warning("ignored a field of requests that is not known", field=short)


def _same(value: Any, other: Any) -> bool:
    """Equal, where 1 does not equal true."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)
