"""How request bodies are read: JSON into pydantic models, and errors that name the field.

Types are strict: neither "5" nor true is an integer. As in OpenAI's API, null means the default. Of the fields that are
not declared, one that is known, changes the answer and is not carried out is refused: no answer is better than one that
ignores a part of the request. Null is accepted, and so is a value that asks for the default. A field that nobody knows
is ignored, as other servers do, and logged once.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, TypeVar, get_args

import structlog
from pydantic import AfterValidator, ConfigDict, Discriminator, GetCoreSchemaHandler, Tag, ValidationError
from pydantic_core import CoreSchema, PydanticCustomError
from pydantic_core.core_schema import tagged_union_schema

from base.wire import FailFastModel, first_error
from gateway.errors import ApiError, brief, shown, wrong

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
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "custom_logit_processor": (),
    "detokenize": (True,),
    "documents": ([],),
    "ebnf": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_reasoning": (True,),
    "json_schema": (),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "lora_path": (),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "regex": (),
    "separate_reasoning": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_regex": ([],),
    "suffix": ("",),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""Fields of OpenAI's, vLLM's and SGLang's APIs that are not carried out here."""

OF_GENERATION: Neutral = {
    "background": (False,),
    "best_of": (1,),
    "chat_template_kwargs": ({},),
    "conversation": (),
    "echo": (False,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include": ([],),
    "include_stop_str_in_output": (False,),
    "instructions": (),
    "logprobs": (False,),
    "max_completion_tokens": (),
    "max_output_tokens": (),
    "max_tokens": (),
    "max_tool_calls": (),
    "n": (1,),
    "output_config": ({},),
    "output_format": (),
    "parallel_tool_calls": (True,),
    "previous_response_id": (),
    "reasoning": ({},),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "return_draft_counts": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "stop_sequences": ([],),
    "stream_options": ({"include_usage": True}, {"include_usage": False}),
    "structured_outputs": (),
    "system": (),
    "text": ({}, {"format": {"type": "text"}}),
    "thinking": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "truncation": ("disabled",),
}
"""The same for fields of single endpoints that generate, at the others, and for OpenAI's stored conversations."""

OF_MESSAGES: Neutral = {"annotations": ([],), "audio": (), "function_call": (), "prefix": (False,)}
"""The same for the fields of a message: clients send back answers with these."""

OF_STREAMS: Neutral = {"include_obfuscation": (True, False)}
"""The same for stream_options. Obfuscation pads chunks, which no client depends on."""

_CODES = {"thread": "thread_unsupported_request"}
"""By field that is refused, the code by which clients know that they have to do without it."""

_MOST_NAMES = 1000
_MOST_CHARACTERS = 64


class FieldPolicy:
    """What becomes of fields that are not declared. strict: unknown ones are refused, too. Threads may share it."""

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
            # Equal, where 1 does not equal true.
            elif not any(
                value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral[name]
            ):
                allowed = " or ".join(map(repr, neutral[name]))
                other_than = f" other than {allowed}, found {shown(value)}" if allowed else ""
                message = f"{path}{name}: not supported here{other_than}"
                raise ApiError(400, message, param=path + name, code=_CODES.get(name))

    def _unknown(self, name: str, path: str) -> None:
        if self._strict:
            raise wrong(path + brief(name), "not known here")
        short = name[:_MOST_CHARACTERS]
        if short not in self._logged and len(self._logged) < _MOST_NAMES:
            self._logged.add(short)
            log.warning("ignored a field of requests that is not known", field=short)


OTHER_KIND = "other_kind"
"""The type of the error of an element whose `type` is not one of those expected."""


class Piece(FailFastModel):
    """A piece of a body."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")


class RequestBody(Piece):
    """The body of a request."""

    generates: ClassVar[bool] = False
    """Whether the answer is generated, so that `OF_GENERATION` matters."""
    neutral: ClassVar[Neutral] = {}
    """Like `NEUTRAL`, for this endpoint alone."""
    names: ClassVar[Mapping[str, str]] = {}
    """By the name of a chat completion's field, its name here, where that is another one."""

    @classmethod
    def not_carried_out(cls) -> Neutral:
        """The fields that are refused here, unless they ask for the default."""
        return {**NEUTRAL, **(OF_GENERATION if cls.generates else {}), **cls.neutral}

    def check_fields(self, policy: FieldPolicy) -> None:
        """Raises ApiError for a field that asks for what is not carried out."""
        policy.check(self.model_extra or {}, self.not_carried_out())
        if isinstance(options := getattr(self, "stream_options", None), Piece):
            policy.check(options.model_extra or {}, OF_STREAMS, "stream_options.")

    @classmethod
    @contextmanager
    def renaming(cls) -> Iterator[None]:
        """Errors that come from within name the fields as this endpoint does."""
        try:
            yield
        except ApiError as error:
            field, _, rest = (error.param or "").partition(".")
            name = cls.names.get(field, field)
            message = re.sub(rf"^{re.escape(field)}\b", name, error.message) if field else error.message
            message = re.sub(r"\bmax_tokens\b", cls.names.get("max_tokens", "max_tokens"), message)
            raise replace(error, message=message, param=".".join(filter(None, (name, rest))) or None) from error


def _finite(value: dict[str, Any]) -> dict[str, Any]:
    """The value. Numbers such as 1e999 and NaN are read as Python's, which no answer can repeat."""
    try:
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        raise PydanticCustomError("finite", "expected JSON with finite numbers, not nested too deeply") from None
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_finite)]
"""An object of which nothing more is known, such as a JSON schema."""

_T = TypeVar("_T")
_Text = TypeVar("_Text", bound=str)
TEXT_OR_OTHER = Discriminator(lambda value: "<text>" if isinstance(value, str) else "<other>")
"""Tells a string, which is tagged `<text>`, from anything else, which is tagged `<other>`."""
JsonOrText = Annotated[Annotated[JsonObject, Tag("<other>")] | Annotated[str, Tag("<text>")], TEXT_OR_OTHER]
TextOrOther = Annotated[Annotated[_Text, Tag("<text>")] | Annotated[_T, Tag("<other>")], TEXT_OR_OTHER]
TextOr = TextOrOther[str, list[_T]]
"""Text, or a list of pieces."""


def text_of(content: Any) -> str:
    """What a `TextOr` says, whose pieces have a text."""
    return content if isinstance(content, str) else "\n".join(piece.text for piece in content or ())


@dataclass(frozen=True)
class KindsOf:
    """Tells the members of a union of models apart by their `type`.

    expected: for the error of another type. default: the type of a value that has none.
    """

    expected: str
    default: str | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        members = {
            f"<{kind}>": handler.generate_schema(member)
            for member in get_args(source)
            for kind in get_args(member.model_fields["type"].annotation)
        }
        expected = f"expected {self.expected}"
        return tagged_union_schema(members, self._kind, custom_error_type=OTHER_KIND, custom_error_message=expected)

    def _kind(self, value: object) -> str:
        found = value.get("type", self.default) if isinstance(value, dict) else getattr(value, "type", None)
        return f"<{found}>"


_Body = TypeVar("_Body", bound=RequestBody)


def parse(kind: type[_Body], body: bytes | Mapping[str, Any], policy: FieldPolicy) -> _Body:
    """A validated request. body: JSON, or what it says. Raises ApiError (400), which names field and mistake."""
    try:
        request = kind.model_validate_json(body) if isinstance(body, bytes) else kind.model_validate(body)
    except ValidationError as error:
        raise _invalid(error) from error
    request.check_fields(policy)
    return request


def _invalid(error: ValidationError) -> ApiError:
    """The first error of a validation, as clients are told."""
    first = first_error(error)
    # Tags of unions are no part of a field's name. Keys are the client's, and may be of any length.
    field = ".".join(brief(str(part)) for part in first["loc"] if not str(part).startswith("<"))
    found = first["input"]
    message = f"{field}: {first['msg']}" if field else first["msg"]
    if first["type"] == OTHER_KIND and isinstance(found, dict) and "type" in found:
        message += f", found one of type {shown(found['type'])}"
    elif field and first["type"] != "missing":
        message += f", found {shown(found)}"
    return ApiError(400, message, param=field or None)
