"""Checks JSON as it comes, character by character, so that a long value can be passed on before its end."""

import re
from enum import Enum, auto

MAX_DEPTH = 256
"""Of arrays and objects. Deeper ones are refused: readers have limits, too, Python's some 1,000."""
_MAX_NUMBER = 1000
"""Characters of a number. Python's reader takes integers of 4,300 digits at most."""

_SPACE = " \t\n\r"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_NUMBER_PREFIX = re.compile(r"-?(0|[1-9][0-9]*)?((?<=[0-9])\.[0-9]*)?((?<=[0-9])[eE][+-]?[0-9]*)?")
_NAMES = ("true", "false", "null")


class _Expects(Enum):
    """What comes next, outside of strings, numbers and names."""

    VALUE = auto()
    VALUE_OR_END = auto()
    """Behind "[", where "]" may come as well."""
    KEY = auto()
    KEY_OR_END = auto()
    """Behind "{", where "}" may come as well."""
    COLON = auto()
    COMMA_OR_END = auto()
    NOTHING = auto()
    """The value is complete. White space may follow."""


class JsonPrefix:
    """How far a text is the beginning of one JSON value (RFC 8259), read piece by piece."""

    def __init__(self) -> None:
        self._expects = _Expects.VALUE
        self._open: list[str] = []
        """The brackets that are to close, the innermost last."""
        self._in_string = False
        self._is_key = False
        self._escape = ""
        """An escape sequence in a string, as far as it was read."""
        self._scalar = ""
        """A number or a name, as far as it was read."""

    @property
    def complete(self) -> bool:
        """Whether the text is a value. (Of a number, more may come.)"""
        return self._expects is _Expects.NOTHING or (not self._open and self._scalar_is_complete)

    @property
    def _scalar_is_complete(self) -> bool:
        return self._scalar in _NAMES or _NUMBER.fullmatch(self._scalar) is not None

    def read(self, text: str) -> int:
        """How many characters of the text continue the value. If it is not all of them, it cannot be continued."""
        at = 0
        while at < len(text):
            if self._in_string and not self._escape and (plain := _PLAIN.match(text, at)):
                at = plain.end()
            elif self._take(text[at]):
                at += 1
            else:
                return at
        return at

    def _take(self, character: str) -> bool:
        if self._in_string:
            return self._take_in_string(character)
        if self._scalar:
            if self._begins_scalar(self._scalar + character):
                self._scalar += character
                return len(self._scalar) <= _MAX_NUMBER
            if not self._scalar_is_complete:
                return False
            self._value_ends()
        return character in _SPACE or self._take_token(character)

    def _take_in_string(self, character: str) -> bool:
        if self._escape:
            self._escape += character
            if len(self._escape) == 2:
                if character != "u":
                    self._escape = ""
                return character in '"\\/bfnrtu'
            if len(self._escape) == 6:
                self._escape = ""
            return character in "0123456789abcdefABCDEF"
        if character == "\\":
            self._escape = character
            return True
        if character != '"':
            return False  # a control character
        self._in_string = False
        if self._is_key:
            self._expects = _Expects.COLON
        else:
            self._value_ends()
        return True

    def _take_token(self, character: str) -> bool:
        match self._expects, character:
            case _Expects.NOTHING, _:
                return False
            case _Expects.COLON, ":":
                self._expects = _Expects.VALUE
            case _Expects.COMMA_OR_END, ",":
                self._expects = _Expects.KEY if self._open[-1] == "}" else _Expects.VALUE
            case ((_Expects.COMMA_OR_END | _Expects.VALUE_OR_END | _Expects.KEY_OR_END), ("]" | "}")):
                if self._open[-1] != character:
                    return False
                self._open.pop()
                self._value_ends()
            case ((_Expects.KEY | _Expects.KEY_OR_END), '"'):
                self._in_string = self._is_key = True
            case ((_Expects.VALUE | _Expects.VALUE_OR_END), _):
                return self._begin(character)
            case _:
                return False
        return True

    def _begin(self, character: str) -> bool:
        if character == '"':
            self._in_string, self._is_key = True, False
        elif character in "[{":
            self._open.append("]" if character == "[" else "}")
            self._expects = _Expects.VALUE_OR_END if character == "[" else _Expects.KEY_OR_END
            return len(self._open) <= MAX_DEPTH
        elif self._begins_scalar(character):
            self._scalar = character
        else:
            return False
        return True

    @staticmethod
    def _begins_scalar(text: str) -> bool:
        return _NUMBER_PREFIX.fullmatch(text) is not None or any(name.startswith(text) for name in _NAMES)

    def _value_ends(self) -> None:
        self._scalar = ""
        self._expects = _Expects.COMMA_OR_END if self._open else _Expects.NOTHING
