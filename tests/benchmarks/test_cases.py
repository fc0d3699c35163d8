"""What is swept follows from the flags, and what cannot be measured is refused."""

from collections.abc import Callable

import pytest
import torch

from base.errors import StartupError
from benchmarks import attention, top_k
from benchmarks.decode.bench import run_decode_bench
from benchmarks.decode.config import DecodeBench
from benchmarks.flags import parse_choices, parse_numbers, parse_rates
from benchmarks.prefill.bench import run_prefill_bench
from benchmarks.prefill.config import PrefillBench
from benchmarks.transfer.cases import DEFAULT, QUICK, Case, Protocol, Sweep


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


def test_a_sweep_combines_what_is_given_and_leaves_the_rest() -> None:
    sweep = Sweep(tokens=(1024, 2048), protocol=(Protocol.TCP, Protocol.SHM), concurrency=(1, 4))
    cases = sweep.cases(quick=False)
    assert len(cases) == len(set(cases)) == 8
    assert {case.layers for case in cases} == {Case().layers}
    assert (Sweep().cases(quick=False), Sweep().cases(quick=True)) == (list(DEFAULT), list(QUICK))
    with pytest.raises(StartupError, match="--page-size 0: expected at least 1"):
        Sweep(page_size=(0,)).cases(quick=False)


@pytest.mark.parametrize(
    "bench",
    [
        attention.main,
        top_k.main,
        lambda: run_decode_bench(DecodeBench()),
        lambda: run_prefill_bench(PrefillBench()),
    ],
)
def test_a_gpu_benchmark_says_if_none_is_there(bench: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(StartupError, match="CUDA device"):
        bench()


@pytest.mark.parametrize("name", ["torch", "torch:no_such_function", "no_such_module:top"])
def test_something_beside_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(StartupError, match=f"--beside {name}: expected module:function"):
        top_k._imported(name)
