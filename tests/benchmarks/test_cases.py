"""What is swept follows from the flags, and what cannot be measured is refused."""

from collections.abc import Callable

import pytest

from base.errors import StartupError
from benchmarks.flags import parse_choices, parse_numbers, parse_rates
from benchmarks.transfer.cases import Protocol


def test_flags_may_be_repeated_and_take_lists_multiples_and_fractions() -> None:
    assert parse_numbers("--tokens", ["2048, 8K", "1m"]) == (2048, 8192, 1 << 20)
    assert parse_choices("--protocol", ["tcp,shm"], Protocol) == (Protocol.TCP, Protocol.SHM)
    assert parse_numbers("--tokens", None) == ()
    assert parse_rates("--request-rate", ["0.5,8", "inf"]) == (0.5, 8.0, float("inf"))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        *((f"--tokens {word}", "numbers") for word in ("many", "", "8K,", "K")),
        *((f"--request-rate {word}", "numbers above 0") for word in ("fast", "0", "-1", "nan", "")),
        ("--protocol udp", "tcp or rdma or shm"),
    ],
)
def test_a_word_that_is_no_value_is_refused_by_name(words: str, expected: str) -> None:
    flag, _, word = words.partition(" ")
    parse: dict[str, Callable[[], object]] = {
        "--tokens": lambda: parse_numbers(flag, [word]),
        "--request-rate": lambda: parse_rates(flag, [word]),
        "--protocol": lambda: parse_choices(flag, [word], Protocol),
    }
    with pytest.raises(StartupError, match=f"{words}: expected {expected}"):
        parse[flag]()
