"""A request that the decode node prefills for itself, given up at every stage."""

import threading

import pytest
import torch

from control.messages import Generate, Sampling
from decode_node.local_prefill import LocalPrefill
from decode_node.request import Request, RequestState
from engine.chunked import ChunkedPrefill
from kvcache.paged_pool import PagedKVPool
from tests.decode_node.world import GATEWAY, tiers
from tests.e2e.cluster import wait_until
from tests.prefill_node.fakes import LAYOUT, FakeModel


class Harness:
    """Local prefill with real KV tiers; `copying` holds the copy stream back until it is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.coordinator = tiers(LAYOUT, host_slots=64, device_slots=16, max_requests=2)
        self.copying = threading.Event()
        backend = self.coordinator._backend
        stage = backend.stage

        self.error: Exception | None = None

        def held_stage(*arguments: object) -> None:
            self.copying.wait(10)
            if self.error is not None:
                raise self.error
            stage(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(backend, "stage", held_stage)
        self.pool = PagedKVPool(LAYOUT, num_pages=8, page_size=4, device=torch.device("cpu"))
        self.model = FakeModel()
        self.local = LocalPrefill(self.model, ChunkedPrefill(self.pool, chunk_size=6), self.coordinator)  # type: ignore[arg-type]

    def start(self, prompt_logprobs: int | None = None, on_host: int = 0) -> Request:
        generate = Generate(
            request_id="r",
            prompt_ids=tuple(range(11)),
            max_new_tokens=4,
            sampling=Sampling(temperature=0),
            prompt_logprobs=prompt_logprobs,
        )
        request = Request(generate, GATEWAY)
        request.host_slots = self.coordinator.host.allocate(10)
        self.local.start(request, on_host)
        return request

    def finish(self) -> None:
        """Give the loop its turns until nothing is left to do."""
        self.copying.set()

        def turn() -> bool:
            self.local.step()
            self.local.staged()
            return not self.local.has_work

        wait_until(turn, timeout=5)

    def assert_as_full_as_at_start(self) -> None:
        assert self.local.is_idle
        assert self.pool.free_pages == 8
        assert self.coordinator.is_idle()


@pytest.fixture
def h(monkeypatch: pytest.MonkeyPatch) -> Harness:
    return Harness(monkeypatch)


def test_a_prompt_but_for_its_last_token_is_computed_and_copied(h: Harness) -> None:
    request = h.start(prompt_logprobs=1)
    h.local.step()
    assert request.state is RequestState.LOCAL_PREFILL
    h.local.step()
    assert request.state is RequestState.STAGING
    assert h.local.staged() == ([], [])
    h.copying.set()
    [landed] = wait_until(lambda: h.local.staged()[0], timeout=5)
    assert (landed, request.state) == (request, RequestState.LANDED)
    assert request.host_slots is not None
    items = h.coordinator.host.kv[1][torch.from_numpy(request.host_slots.slots())]
    assert items[:, 0].tolist() == list(range(10))
    assert request.prompt_logprobs is not None
    assert request.prompt_logprobs.complete
    assert request.prompt_logprobs.ints[:, 0].tolist() == list(range(1, 11)), "the tokens behind each position"
    assert request.prompt_logprobs.floats[:, 0].tolist() == [-position for position in range(1, 11)]
    h.coordinator.host.release(request.host_slots)
    h.assert_as_full_as_at_start()


def test_slots_that_are_shared_are_not_copied_over(h: Harness) -> None:
    request = h.start(on_host=6)
    assert request.host_slots is not None
    items = h.coordinator.host.kv[1]
    slots = torch.from_numpy(request.host_slots.slots())
    items[slots] = 99
    h.finish()
    assert request.state is RequestState.LANDED
    assert items[slots][:, 0].tolist() == [99] * 6 + [6, 7, 8, 9]
    h.coordinator.host.release(request.host_slots)
    h.assert_as_full_as_at_start()


@pytest.mark.parametrize("steps", [0, 1])
def test_given_up_while_it_computes(h: Harness, steps: int) -> None:
    request = h.start()
    for _ in range(steps):
        h.local.step()
    assert h.local.cancel(request) is True
    assert request.host_slots is not None
    h.coordinator.host.release(request.host_slots)
    h.assert_as_full_as_at_start()


def test_given_up_while_it_is_copied_it_is_freed_once_the_copy_is_over(h: Harness) -> None:
    """sglang PR 22131: a request given up in staging leaked or was freed twice."""
    request = h.start()
    h.local.step()
    h.local.step()
    assert h.local.cancel(request) is False
    assert h.coordinator.host.used == 10, "the copy may still write to these slots"
    assert h.pool.free_pages == 8 - 3
    assert h.local.has_work, "the loop has to come back for it"
    h.finish()
    h.assert_as_full_as_at_start()


def test_a_copy_that_fails_costs_its_request_and_leaves_nothing_behind(h: Harness) -> None:
    request = h.start()
    h.local.step()
    h.local.step()
    h.error = RuntimeError("an illegal address")
    h.copying.set()
    [(failed, error)] = wait_until(lambda: h.local.staged()[1], timeout=5)
    assert failed is request
    assert error == "copying the prompt's KV to host memory failed: an illegal address"
    assert h.local.cancel(request) is False, "its host slots are free already"
    h.assert_as_full_as_at_start()
