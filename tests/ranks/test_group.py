"""Ranks in processes of their own: they agree, compare, exchange, and notice each other's end."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from base.phase import Phase
from kernels.fp8 import quantise_activations
from model.shard import NO_EXCHANGE
from model.tiny import write_tiny_checkpoint
from ranks.barrier import GroupFailed
from ranks.place import RankPlace
from tests.gpu.ranks_program import run_ranks
from tests.kernels.fp8_cases import randn, routed
from tests.ranks.ranks_harness import forked, join

STEPS = 200


def test_a_place_passes_through_the_environment_of_one_process() -> None:
    reading, writing = os.pipe()
    place = RankPlace(1, 2, reading, writing, (reading, writing))
    environment = place.variables()
    assert RankPlace.taken(environment) == place
    assert not os.get_inheritable(reading)
    assert environment == {}
    assert RankPlace.taken(environment) is None
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_exchange_tokens_and_partial_sums(tmp_path: Path, size: int) -> None:
    def body(place: RankPlace) -> None:
        group = join(place)
        exchange = group.connect()
        for count in (1, 3, 8):
            for dtype in (torch.float32, torch.bfloat16):
                brought = [torch.randn(count, 6, generator=_seed(rank), dtype=dtype) for rank in range(size)]
                gathered = exchange.gather(brought[place.rank])
                assert torch.equal(gathered, torch.cat(brought))
                own = exchange.own(count)
                assert torch.equal(gathered[own.start : own.stop], brought[place.rank])
                partial = [gathered * (rank + 1) for rank in range(size)]
                total = torch.zeros(size * count, 6)
                for part in partial:
                    total += part.float()
                reduced = exchange.reduce(partial[place.rank])
                assert reduced.dtype == dtype
                assert torch.equal(reduced, total.to(dtype)[own.start : own.stop])
            hidden, weights = randn(size * count, 272), randn(size * count, 3)
            ids = torch.arange(size * count * 3).view(-1, 3)
            own_tokens = slice(own.start, own.stop)
            tokens = routed(hidden[own_tokens], ids[own_tokens], weights[own_tokens], True).gathered(exchange)
            values, scales = quantise_activations(hidden, True)
            assert torch.equal(tokens.values.float(), values.float())
            assert torch.equal(tokens.scales, scales)
            assert torch.equal(tokens.ids.long(), ids)
            assert torch.equal(tokens.weights, weights)
        assert torch.equal(NO_EXCHANGE.reduce(NO_EXCHANGE.gather(brought[0])), brought[0])
        while not group.done():
            time.sleep(0.01)
        group.close()

    with forked(size, tmp_path, body) as ranks:
        assert [ranks.wait(rank) for rank in range(size)] == [0] * size, ranks.said(0)


def _seed(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


@pytest.mark.parametrize(
    ("size", "dtype"), [(2, "float32"), pytest.param(4, "float32", marks=pytest.mark.slow), (2, "bfloat16")]
)
def test_layers_whose_experts_are_divided_compute_what_whole_ones_do(tmp_path: Path, size: int, dtype: str) -> None:
    """As tests/gpu/test_ranks.py has it on GPUs."""
    write_tiny_checkpoint(tmp_path / "tiny", "deepseek_v32", seed=3)
    run_ranks(size, tmp_path / "tiny", dtype, "cpu")


@pytest.mark.parametrize("hosts", [1, 2])
def test_ranks_with_other_checkpoints_refuse_each_other_by_name(tmp_path: Path, hosts: int) -> None:
    def body(place: RankPlace) -> None:
        group = join(place)
        group.check_same_config({"version": "1", "sizes": (1, 2)})
        assert group.share(place.rank) == [0, 1]
        group.check_same_config({"version": "1", "fingerprint": "abc" if place.rank else "def"})

    with forked(2, tmp_path, body, hosts) as ranks:
        assert [ranks.wait(rank) for rank in range(2)] == [1, 1]
        expected = "StartupError: rank {} has fingerprint {}, rank {} has {}: all ranks of a group need the same"
        assert ranks.said(0) == expected.format(1, "abc", 0, "def")
        assert ranks.said(1) == expected.format(0, "def", 1, "abc")


def test_the_others_notice_a_killed_rank_whether_they_step_or_sleep(tmp_path: Path) -> None:
    def body(place: RankPlace) -> None:
        woken = threading.Event()
        group = join(place, wake=woken.set)
        group.watch_steps()
        steps = 0
        while True:
            if place.rank and not group.barrier.spin_before_sleep(lambda: False):
                woken.wait(0.1)
                woken.clear()
            if place.rank == 2 and steps >= STEPS:
                os.kill(os.getpid(), signal.SIGKILL)
            steps += bool(group.barrier.wait(0 if place.rank else 1))

    with forked(3, tmp_path, body) as ranks:
        assert ranks.wait(2) == -signal.SIGKILL
        since = time.monotonic()
        assert [ranks.wait(0), ranks.wait(1)] == [1, 1]
        assert time.monotonic() - since < 3
        assert ranks.said(0) == ranks.said(1) == f"{GroupFailed.__name__}: rank 2 ended"


def test_a_rank_that_is_stopped_before_a_step_is_named(tmp_path: Path) -> None:
    def body(place: RankPlace) -> None:
        group = join(place, step_timeout=1.0)
        group.watch_steps()
        for step in range(STEPS):
            if place.rank == 1 and step == 20:
                os.kill(os.getpid(), signal.SIGSTOP)
            group.barrier.wait(1)

    with forked(2, tmp_path, body) as ranks:
        assert ranks.wait(0) == 1
        assert ranks.said(0) == "GroupFailed: rank 1 did not come to step 21 within 1 s"


def test_a_step_that_hangs_in_a_collective_ends_the_process_that_hangs(tmp_path: Path) -> None:
    """Its thread waits in the library, for ever: nobody else can say so."""

    def body(place: RankPlace) -> None:
        group = join(place, step_timeout=1.0)
        exchange = group.connect()
        group.watch_steps()
        group.barrier.wait(1)
        if place.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        exchange.gather(torch.zeros(1, 4))

    with forked(2, tmp_path, body) as ranks:
        assert ranks.wait(0, timeout=5) == 1
        assert ranks.status.reported(0) == ("rank 1 is stopped: step 1 did not end within 1 s", 1)


def test_ranks_leave_when_all_are_done_and_then_nobody_is_missed(tmp_path: Path) -> None:
    def body(place: RankPlace) -> None:
        group = join(place)
        group.watch_steps()
        if place.rank == 0:
            assert group.sync_phase(Phase.DRAINING) is Phase.DRAINING
        while group.sync_phase(Phase.SERVING if place.rank else Phase.DRAINING) is Phase.SERVING:
            time.sleep(0.01)
        left = 50 if place.rank else 0
        while left or not group.done():
            left -= bool(left and group.barrier.wait(1))
            group.barrier.wait(0)
        time.sleep(0.2 * place.rank)
        assert group.barrier.wait(0) == 0
        group.close()

    with forked(3, tmp_path, body) as ranks:
        assert [ranks.wait(rank) for rank in range(3)] == [0, 0, 0], ranks.said(0) + ranks.said(1)
        assert all(ranks.status.turns(rank) > 50 for rank in range(3)), "who started them saw their loops turn"
