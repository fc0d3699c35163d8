"""The incremental check of JSON against the standard library's reader."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.formats.json_prefix import MAX_DEPTH, JsonPrefix
from gateway.formats.tools import parse_json

_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
_VALUES = st.recursive(_SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


def is_json(text: str) -> bool:
    try:
        parse_json(text)
    except ValueError:
        return False
    return True


def accepts(text: str) -> bool:
    prefix = JsonPrefix()
    return prefix.read(text) == len(text) and prefix.complete


@given(_VALUES, st.booleans(), st.sampled_from([None, 1, "\t"]))
def test_a_value_is_read_and_no_beginning_is_refused(value: object, ascii_only: bool, indent: int | str | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    whole, single = JsonPrefix(), JsonPrefix()
    assert whole.read(text) == len(text)
    assert whole.complete
    for at, character in enumerate(text):
        assert single.complete == is_json(text[:at])
        assert single.read(character) == 1


@given(st.text(alphabet='{}[],:"\\u0a1-+.eEtrufalsn \n\x01', max_size=12))
def test_it_agrees_with_the_standard_reader(text: str) -> None:
    assert accepts(text) == is_json(text)


def test_it_agrees_on_values_with_small_faults() -> None:
    chance = random.Random(0)
    text = json.dumps({"a": [1, -2.5e-3, 'b\\"\u00e9\n', None, True], "c": {"d": [], "e": {}}, "": False})
    for _ in range(20_000):
        at, to = sorted(chance.randrange(len(text) + 1) for _ in range(2))
        other = chance.choice(["", chance.choice(text), text[at : at + 2]])
        broken = text[:at] + other + text[min(to, at + chance.randint(0, 3)) :]
        assert accepts(broken) == is_json(broken), broken


@pytest.mark.parametrize(
    ("text", "good"), [("[1, x]", 4), ("01", 1), ("[1}", 2), ('{"a" 1}', 5), ("truE", 3), ("1 2", 2)]
)
def test_it_says_how_far_a_text_is_good(text: str, good: int) -> None:
    assert JsonPrefix().read(text) == good


def test_nesting_has_a_limit() -> None:
    assert accepts("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    assert JsonPrefix().read("[" * 1000) == MAX_DEPTH
