"""What is swept follows from the flags."""

import pytest

from base.errors import StartupError
from benchmarks.flags import parse_choices, parse_numbers, parse_rates
from benchmarks.transfer.cases import DEFAULT, QUICK, Case, Fragmentation, Protocol, Sweep


def test_flags_may_be_repeated_and_take_lists_and_multiples() -> None:
    assert parse_numbers("--tokens", ["2048, 8K", "1m"]) == (2048, 8192, 1 << 20)
    assert parse_choices("--protocol", ["tcp,shm"], Protocol) == (Protocol.TCP, Protocol.SHM)
    assert parse_numbers("--tokens", None) == ()


@pytest.mark.parametrize("word", ["many", "", "8K,", "K"])
def test_a_word_that_is_no_number_is_refused_by_name(word: str) -> None:
    with pytest.raises(StartupError, match=f"--tokens {word}: expected numbers"):
        parse_numbers("--tokens", [word])


def test_a_rate_may_be_a_fraction_or_infinite() -> None:
    assert parse_rates("--request-rate", ["0.5,8", "inf"]) == (0.5, 8.0, float("inf"))


@pytest.mark.parametrize("word", ["fast", "0", "-1", "nan", ""])
def test_a_word_that_is_no_rate_is_refused_by_name(word: str) -> None:
    with pytest.raises(StartupError, match=f"--request-rate {word}: expected numbers above 0"):
        parse_rates("--request-rate", [word])


def test_a_word_that_is_no_choice_is_refused_by_name() -> None:
    with pytest.raises(StartupError, match="--protocol udp: expected tcp or rdma or shm"):
        parse_choices("--protocol", ["udp"], Protocol)


def test_a_sweep_combines_what_is_given_and_leaves_the_rest() -> None:
    sweep = Sweep(tokens=(1024, 2048), protocol=(Protocol.TCP, Protocol.SHM), concurrency=(1, 4))
    cases = sweep.cases(quick=False)
    assert len(cases) == len(set(cases)) == 8
    assert {case.layers for case in cases} == {Case().layers}


def test_without_a_wish_the_promised_cases_are_measured() -> None:
    assert Sweep().cases(quick=False) == list(DEFAULT)
    assert Sweep().cases(quick=True) == list(QUICK)
    for source in Fragmentation:
        assert Case(tokens=32768, layers=8, item_bytes=1152, source=source) in DEFAULT
    assert Case(tokens=32768, destination=Fragmentation.PAGES) in DEFAULT
    assert Case(protocol=Protocol.SHM, source=Fragmentation.ITEMS, destination=Fragmentation.ITEMS) in DEFAULT


def test_a_size_below_one_is_refused() -> None:
    with pytest.raises(StartupError, match="--page-size 0: expected at least 1"):
        Sweep(page_size=(0,)).cases(quick=False)
