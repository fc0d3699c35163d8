"""Checks JSON as it comes, character by character, so that a long value can be passed on before its end."""

import re

MAX_DEPTH = 256
"""Of arrays and objects. Deeper ones are refused: readers have limits, too, Python's some 1,000."""
_MAX_NUMBER = 1000
"""Characters of a number. Python's reader takes integers of 4,300 digits at most."""

_SPACE = " \t\n\r"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPE = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_PREFIX = re.compile(r"\\(u[0-9a-fA-F]{0,3})?")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_NUMBER_PREFIX = re.compile(r"-?(0|[1-9][0-9]*)?((?<=[0-9])\.[0-9]*)?((?<=[0-9])[eE][+-]?[0-9]*)?")
_NAMES = ("true", "false", "null")
_VALUE = '"[{-0123456789tfn'
"""The characters that a value may begin with."""


class JsonPrefix:
    """How far a text is the beginning of one JSON value (RFC 8259), read piece by piece."""

    def __init__(self) -> None:
        self._expects = _VALUE
        """The characters that may come next, outside of strings, numbers and names; none after the value. White space
        may always come."""
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
        return not self._expects or (not self._open and self._scalar_is_complete)

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
            longer = self._scalar + character
            if _NUMBER_PREFIX.fullmatch(longer) or any(name.startswith(longer) for name in _NAMES):
                self._scalar = longer
                return len(longer) <= _MAX_NUMBER
            if not self._scalar_is_complete:
                return False
            self._value_ends()
        return character in _SPACE or self._take_token(character)

    def _take_in_string(self, character: str) -> bool:
        if self._escape or character == "\\":
            self._escape += character
            if _ESCAPE.fullmatch(self._escape):
                self._escape = ""
                return True
            return _ESCAPE_PREFIX.fullmatch(self._escape) is not None
        if character != '"':
            return False  # a control character
        self._in_string = False
        if self._is_key:
            self._expects = ":"
        else:
            self._value_ends()
        return True

    def _take_token(self, character: str) -> bool:
        if character not in self._expects:
            return False
        match character:
            case ":":
                self._expects = _VALUE
            case ",":
                self._expects = '"' if self._open[-1] == "}" else _VALUE
            case "]" | "}":
                self._open.pop()
                self._value_ends()
            case "[":
                self._open.append("]")
                self._expects = _VALUE + "]"
            case "{":
                self._open.append("}")
                self._expects = '"}'
            case '"':
                self._in_string, self._is_key = True, "[" not in self._expects
            case _:
                self._scalar = character
        return len(self._open) <= MAX_DEPTH

    def _value_ends(self) -> None:
        self._scalar = ""
        self._expects = f",{self._open[-1]}" if self._open else ""
