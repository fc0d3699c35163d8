"""The scheduler's policy, with real KV tiers and a model whose next token is its input plus one."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from base.metrics import Metrics
from control.messages import (
    Abort,
    AttemptId,
    BufferInfo,
    Checksum,
    Checksums,
    Generate,
    Outputs,
    Peer,
    PrefillDone,
    PrefillFailed,
    PrefillRequest,
    Quiesced,
    Sampling,
    Token,
)
from decode_node.grammars import Grammars
from decode_node.lent_prefixes import hold_cached_prefix
from decode_node.limits import Limits
from decode_node.outputs import OutputStream
from decode_node.remote_prefill import RemotePrefill
from decode_node.request import Request, RequestState
from decode_node.scheduler import Scheduler
from decode_node.verifier import Digesting, Verification, Verified
from engine.device import DeviceFailed
from engine.grammar.errors import UnsupportedTokenizer
from engine.grammar.vocabulary import Vocabulary
from engine.runner import LaunchedStep, ModelRunner
from engine.sampling import NoToken
from hisparse.config import HiSparseConfig
from hisparse.coordinator import HiSparseCoordinator
from hisparse.extents import Extent, HostSlots
from hisparse.format import DenseFormat
from hisparse.layout import KVLayout
from hisparse.sizing import Sizes
from hisparse.step import DecodeStep
from hisparse.tiers import build_tiers
from tests.decode_node.fakes import GATEWAY, destination
from tests.prefill_node.fakes import FakeControl
from transfer.checksum import Mismatch
from transfer.fencing import DRAIN_GRACE_S, LANDED_CAN_WAIT_S, ReservationTable
from transfer.incoming import IncomingCut

FORMAT = DenseFormat(torch.float32, item_dim=2, index_dim=2)
LAYOUT = KVLayout((0,), FORMAT.item_bytes, FORMAT.index_key_bytes)
PREFILL = Peer(role="prefill", address="127.0.0.1:2", boot_id="prefill")
VOCAB = 512
HOT = 4


class CountingModel:
    """Predicts input + 1, and appends recognisable KV as a real model would."""

    device = torch.device("cpu")
    spec = SimpleNamespace(vocab_size=VOCAB)

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.error: Exception | None = None
        self.overflows_after = -1
        self.violates_at = -1
        """The position that a token selects its successor of."""
        self.step_s = 0.0

    def decode(self, token_ids: torch.Tensor, positions: torch.Tensor, step: DecodeStep) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        self.batches.append(len(token_ids))
        pairs = torch.stack((token_ids, positions), 1)
        step.append_index_keys(0, FORMAT.encode_index_keys(pairs))
        step.append(0, FORMAT.encode_items(pairs))
        newest_selected = positions + (positions == self.violates_at)
        step.swap_in(0, (newest_selected[:, None] - torch.arange(HOT)).clamp(min=-1))
        time.sleep(self.step_s)
        logits = torch.nn.functional.one_hot(token_ids + 1, VOCAB).float()
        return logits.masked_fill((token_ids == self.overflows_after)[:, None], float("inf"))


def no_grammars() -> Vocabulary:
    raise UnsupportedTokenizer("this model has no tokenizer")


@dataclass
class Harness:
    """`turn` plays the prefill node: what was dispatched lands in the next turn, unless the request is `slow`, and what
    is aborted is quiet, if `quiet` is set."""

    host_slots: int = 1000
    device_slots: int = 100
    max_running: int = 8
    max_waiting: int = 100
    retries: int = 2
    slow: set[str] = field(default_factory=set)
    quiet: bool = True
    verify: Callable[[Verification | Digesting], bool] = lambda _: False
    control: FakeControl = field(default_factory=FakeControl)
    model: CountingModel = field(default_factory=CountingModel)
    metrics: Metrics = field(default_factory=Metrics)
    caching: bool = False
    lingering: bool = False
    """Whether the prefill node had something cut and posted again."""
    answers: dict[str, list[int]] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str | None] = field(default_factory=dict)
    vocabulary: Callable[[], Vocabulary] = no_grammars
    grammar_done: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        sizes = Sizes(
            config=HiSparseConfig(device_buffer_size=HOT, top_k=HOT),
            layout=LAYOUT,
            max_requests=self.max_running,
            max_context=1000,
            index_page_size=16,
            num_host_slots=self.host_slots,
            num_device_slots=self.device_slots,
            asked_device_slots=self.device_slots,
            num_index_pages=400,
            table_bytes=0,
            vocab_size=VOCAB if self.caching else None,
        )
        self.coordinator: HiSparseCoordinator = build_tiers(sizes, torch.device("cpu"))
        ptrs, lengths, item_lengths = self.coordinator.host.get_contiguous_buf_infos()
        self.buffers = BufferInfo(ptrs=tuple(ptrs), lengths=tuple(lengths), item_lengths=tuple(item_lengths))
        self.table: ReservationTable[HostSlots] = ReservationTable(
            self.coordinator.host.release, self.coordinator.host.retain, lambda: IncomingCut(())
        )
        self.remote = RemotePrefill(
            self.control,  # type: ignore[arg-type]
            destination(self.host_slots).model_copy(update={"buffers": self.buffers}),
            self.table,
            self.verify,
            self.metrics,
            patience=60.0,
            on_lost=lambda request, reason: self.scheduler.retry(request, reason),
            on_landed=lambda request, cached: self.scheduler.landed(request, cached),
            lend=partial(hold_cached_prefix, self.coordinator.host),
            take_back=self.coordinator.host.release,
        )
        self.remote.nodes.learn(GATEWAY.address, (PREFILL,), {})
        self.runner = ModelRunner(self.model, self.coordinator, self.max_running, 1000, record=False)  # type: ignore[arg-type]
        self.grammars = Grammars(self.vocabulary, self.max_running, pinned=False, wake=self.grammar_done.set)
        self.scheduler = Scheduler(
            self.runner,
            self.coordinator,
            self.remote,
            None,
            OutputStream(self.control, self.metrics),  # type: ignore[arg-type]
            self.metrics,
            Limits(1000, VOCAB, self.host_slots, self.max_running, self.max_waiting, self.retries),
            self.grammars,
        )

    def ask(self, request_id: str, prompt: tuple[int, ...] = (1, 2, 3), tokens: int = 6, **changes: object) -> object:
        fields: dict[str, object] = {"sampling": Sampling(temperature=0), **changes}
        generate = Generate(request_id=request_id, prompt_ids=prompt, max_new_tokens=tokens, **fields)  # type: ignore[arg-type]
        return self.scheduler.add(generate, GATEWAY)

    def land(self) -> None:
        """What the prefill node does while the decode node has a turn."""
        for key, (_, message) in list(self.control.repeated.items()):
            if isinstance(message, PrefillRequest) and message.attempt.request_id not in self.slow:
                self.control.answered(key)
                self.write(message)
                done = PrefillDone(attempt=message.attempt, num_tokens=len(message.token_ids), lingering=self.lingering)
                done = done.model_copy(update={"cached_tokens": message.start})
                self.remote.take(PREFILL, done)
            elif isinstance(message, Abort) and self.quiet:
                self.remote.take(PREFILL, Quiesced(attempt=message.attempt))

    def write(self, message: PrefillRequest) -> None:
        """The KV of what was asked for, as the model makes it."""
        tokens = torch.tensor(message.token_ids)
        pairs = torch.stack((tokens, torch.arange(len(tokens))), 1)[message.start :]
        slots = HostSlots(tuple(Extent(*extent) for extent in message.extents)).slots()
        at = torch.from_numpy(slots)[: len(pairs)]
        self.coordinator.host.kv[0][at] = FORMAT.encode_items(pairs)
        self.coordinator.host.index_keys[0][at] = FORMAT.encode_index_keys(pairs)

    def turn(self) -> None:
        self.land()
        self.scheduler.turn()
        for output in self.control.outputs():
            ids = self.answers.setdefault(output.request_id, [])
            assert output.start == len(ids), "no token is lost or repeated"
            ids += [token.token_id for token in output.tokens]
            if output.finish_reason:
                self.ended[output.request_id] = output.finish_reason
                self.errors[output.request_id] = output.error
                self.scheduler.outputs.ended(output.request_id, GATEWAY)
        self.control.take(Outputs)

    def run(self, turns: int = 2000) -> None:
        while self.scheduler.requests or self.scheduler.holds_something:
            turns -= 1
            assert turns > 0, "stuck"
            self.turn()
            if not self.scheduler.has_work and any(r.waits_for_grammar for r in self.scheduler.requests.values()):
                assert self.grammar_done.wait(20)
        self.scheduler.check_idle()
        assert self.coordinator.is_idle()

    def state(self, request_id: str) -> RequestState:
        return self.scheduler.requests[request_id].state


def counted(prompt: tuple[int, ...], tokens: int) -> list[int]:
    """The answer that the model gives."""
    return list(range(prompt[-1] + 1, prompt[-1] + 1 + tokens))


def test_a_request_runs_to_its_length() -> None:
    h = Harness()
    h.ask("a", prompt=(1, 2, 3), tokens=6)
    h.run()
    assert h.answers == {"a": [4, 5, 6, 7, 8, 9]}
    assert h.ended == {"a": "length"}


def test_a_stop_token_ends_a_request() -> None:
    h = Harness()
    h.ask("a", prompt=(1,), tokens=100, stop_token_ids=(5,))
    h.run()
    assert h.answers == {"a": [2, 3, 4, 5]}
    assert h.ended == {"a": "stop"}


def test_an_answer_of_one_token_takes_one_step() -> None:
    h = Harness()
    h.ask("a", tokens=1)
    h.run()
    assert h.answers == {"a": [4]}
    assert h.model.batches == [1]


def test_a_prompt_of_one_token_needs_no_prefill_node() -> None:
    h = Harness()
    h.remote.nodes.learn(GATEWAY.address, (), {})
    h.ask("a", prompt=(7,), tokens=20)
    h.run()
    assert h.answers == {"a": counted((7,), 20)}


def test_a_step_is_launched_before_the_tokens_of_the_one_before_are_read() -> None:
    h = Harness()
    h.ask("a", tokens=4)
    read: list[tuple[int, int]] = []
    collect = h.runner.collect

    def noting(step: LaunchedStep) -> list[Token | NoToken]:
        read.append((step.batch.places.number, len(h.model.batches)))
        return collect(step)

    h.runner.collect = noting  # type: ignore[method-assign]
    h.run()
    assert read == [(1, 2), (2, 3), (3, 4), (4, 4)], "(step, steps that were launched by then)"


def test_a_request_that_ended_is_in_one_more_step_for_nothing() -> None:
    h = Harness()
    h.ask("a", prompt=(1,), tokens=100, stop_token_ids=(5,))
    h.ask("b", prompt=(1,), tokens=10)
    h.run()
    assert h.answers == {"a": [2, 3, 4, 5], "b": counted((1,), 10)}
    assert h.model.batches == [2] * 5 + [1] * 5


def test_a_lower_priority_goes_first_and_then_the_earlier_request() -> None:
    h = Harness(max_running=1)
    for name, priority in (("a", 0), ("b", 5), ("c", -1), ("d", 5), ("e", -1)):
        h.ask(name, tokens=2, priority=priority)
    assert list(h.scheduler.requests) == ["c", "e", "a", "b", "d"]
    h.run()
    assert list(h.ended) == ["c", "e", "a", "b", "d"]


def test_of_two_priorities_the_higher_gives_its_device_slots_up() -> None:
    h = Harness(device_slots=HOT + 1 + 2)
    for name, priority in (("later", 1), ("sooner", 0)):
        h.ask(name, prompt=(10,), tokens=30, priority=priority)
    h.run()
    assert h.answers["later"] == h.answers["sooner"] == counted((10,), 30)
    assert list(h.ended) == ["sooner", "later"]
    assert h.metrics.retractions.labels("device")._value.get() > 0


def test_a_stop_token_is_not_drawn_before_the_least_number_of_tokens() -> None:
    h = Harness()
    h.ask("a", prompt=(1,), tokens=100, stop_token_ids=(3, 9), sampling=Sampling(temperature=0, min_tokens=4))
    h.ask("b", prompt=(1,), tokens=100, stop_token_ids=(3, 9))
    h.run()
    assert h.answers["b"] == [2, 3]
    assert h.answers["a"][0] == 2
    assert not {3, 9} & set(h.answers["a"][:4])
    assert h.answers["a"][-1] in (3, 9) or len(h.answers["a"]) == 100


def test_a_word_of_several_tokens_is_not_completed() -> None:
    h = Harness()
    h.ask("a", prompt=(1,), tokens=30, sampling=Sampling(temperature=0, bad_words=((4, 5), (40,))))
    h.ask("b", prompt=(4,), tokens=3, sampling=Sampling(temperature=0, bad_words=((4, 5),)))
    h.run()
    assert h.answers["a"][:3] == [2, 3, 4]
    assert (4, 5) not in list(pairwise(h.answers["a"]))
    assert 40 not in h.answers["a"]
    assert h.answers["b"][0] == 5, "words are looked for in the answer"


def test_what_changes_logits_is_the_same_after_a_retraction() -> None:
    def answers(device_slots: int) -> dict[str, list[int]]:
        h = Harness(device_slots=device_slots)
        for seed, name in enumerate("abcd"):
            changes = Sampling(seed=seed, temperature=8, frequency_penalty=1.5, repetition_penalty=1.4, min_p=0.01)
            h.ask(name, prompt=(10, 11), tokens=30, sampling=changes)
        h.run()
        assert bool(h.metrics.retractions.labels("device")._value.get()) == (device_slots < 100)
        return h.answers

    assert answers(HOT + 1 + 2) == answers(400)


def test_nothing_that_may_be_drawn_ends_a_request_with_an_error() -> None:
    h = Harness()
    h.ask("a", sampling=Sampling(allowed_token_ids=(5,), bad_words=((5,),)))
    h.ask("b", tokens=4)
    h.run()
    assert h.ended == {"a": "error", "b": "length"}


def test_requests_decode_together() -> None:
    h = Harness()
    for name in "abc":
        h.ask(name, tokens=20)
    h.run()
    assert max(h.model.batches) == 3
    assert all(ids == list(range(4, 24)) for ids in h.answers.values())


def test_when_device_slots_run_out_the_youngest_gives_way_and_resumes_exactly() -> None:
    """Nine device slots: two requests with one slot each are admitted, and each grows to five."""
    h = Harness(device_slots=HOT + 1 + 2)
    for name in "abcd":
        h.ask(name, prompt=(10,), tokens=30)
    h.run()
    assert all(ids == list(range(11, 41)) for ids in h.answers.values())


def test_when_host_slots_run_out_the_youngest_is_prefilled_again_with_what_it_has_emitted() -> None:
    h = Harness(host_slots=130)
    for name in "abc":
        h.ask(name, prompt=tuple(range(1, 21)), tokens=100)
    h.run()
    assert all(ids == list(range(21, 121)) for ids in h.answers.values())
    assert h.metrics.retractions.labels("host")._value.get() > 0


def test_the_oldest_is_never_the_one_that_gives_way() -> None:
    h = Harness(host_slots=130)
    for name in "abc":
        h.ask(name, prompt=tuple(range(1, 21)), tokens=100)
    ended: list[str] = []
    while h.scheduler.requests:
        h.turn()
        ended += [name for name in h.ended if name not in ended]
        if "a" in h.scheduler.requests and h.answers.get("a"):
            assert h.state("a") in (RequestState.RUNNING, RequestState.LANDED)
    assert ended[0] == "a"


def test_beyond_the_bounded_queue_requests_are_rejected_and_it_reopens() -> None:
    h = Harness(host_slots=100, max_waiting=2)
    prompt = tuple(range(1, 61))
    assert [h.ask(name, prompt=prompt) is None for name in "abcd"] == [True, True, True, False]
    rejected = h.ask("e", prompt=prompt)
    assert rejected.code == "queue_full"  # type: ignore[attr-defined]
    assert rejected.retry_after > 0  # type: ignore[attr-defined]
    h.run()
    assert h.ask("f", prompt=prompt) is None
    h.run()
    assert set(h.answers) == {"a", "b", "c", "f"}


def test_what_could_never_run_is_refused_with_numbers() -> None:
    h = Harness(host_slots=100)
    assert "exceed the context of 1000" in h.ask("a", prompt=(1,) * 990, tokens=20).reason  # type: ignore[attr-defined]
    assert "exceed the host pool of 100" in h.ask("b", prompt=(1,) * 90, tokens=20).reason  # type: ignore[attr-defined]
    assert "outside the vocabulary" in h.ask("c", prompt=(VOCAB,)).reason  # type: ignore[attr-defined]
    assert h.scheduler.requests == {}


def test_a_repeated_request_is_taken_once() -> None:
    h = Harness()
    h.ask("a")
    h.turn()
    h.ask("a")
    h.run()
    h.ask("a")
    assert h.scheduler.requests == {}
    assert h.answers["a"] == [4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("turns", [0, 1, 2, 5])
def test_a_request_can_be_cancelled_in_any_state(turns: int) -> None:
    h = Harness()
    h.ask("a", tokens=50)
    h.ask("b", tokens=10)
    for _ in range(turns):
        h.turn()
    h.scheduler.cancel("a", GATEWAY)
    h.run()
    assert h.ended == {"a": "abort", "b": "length"}


def test_a_request_that_waits_for_a_prefill_node_can_be_cancelled_and_its_slots_stay_fenced() -> None:
    h = Harness()
    h.ask("a")
    h.scheduler.turn()
    assert h.state("a") is RequestState.PREFILLING
    h.scheduler.cancel("a", GATEWAY)
    assert h.remote.abandoned.num_slots == 2
    assert h.coordinator.host.used == 2


def test_a_late_write_after_an_abort_hits_nobody() -> None:
    """sglang PRs 24580, 31357: a write that arrived after the abort corrupted another request."""
    h = Harness(host_slots=200, quiet=False)
    h.ask("aborted", tokens=50)
    h.scheduler.turn()
    [reservation] = h.table
    h.scheduler.cancel("aborted", GATEWAY)
    h.ask("other", tokens=8)
    h.turn()
    h.turn()
    assert h.state("other") is RequestState.RUNNING
    items = h.coordinator.host.kv[0]
    late = torch.from_numpy(reservation.resource.slots())
    before = items.clone()
    items[late] = 255
    untouched = torch.ones(len(items), dtype=torch.bool)
    untouched[late] = False
    assert torch.equal(items[untouched], before[untouched])
    while "other" in h.scheduler.requests:
        h.turn()
    assert h.answers["other"] == list(range(4, 12))
    assert h.coordinator.host.used == 2, "still fenced"
    h.remote.take(PREFILL, Quiesced(attempt=AttemptId("decode", "aborted", 1)))
    h.scheduler.check_idle()
    assert h.coordinator.is_idle()


def test_a_copy_that_was_cut_and_arrives_after_its_request_has_ended_hits_nobody() -> None:
    """A batch was cut and posted again. Its first copy came when the slots had been given to the next request."""
    h = Harness()
    h.lingering = True
    h.ask("r", tokens=4)
    h.turn()
    h.turn()
    [reservation] = h.table
    while h.scheduler.requests:
        h.turn()
    assert h.answers["r"] == list(range(4, 8))
    host = h.coordinator.host
    others = host.allocate(host.free)
    assert others is not None
    assert host.used == host.num_slots
    written_to = set(reservation.resource.slots().tolist())
    assert not written_to & set(others.slots().tolist())
    assert len(written_to) + len(others) == host.num_slots, "what it has decoded is free"
    host.release(others)
    h.remote.tick(time.monotonic() + DRAIN_GRACE_S + LANDED_CAN_WAIT_S)
    h.scheduler.check_idle()
    assert h.coordinator.is_idle()


def test_cancelling_what_is_unknown_is_answered() -> None:
    h = Harness()
    h.scheduler.cancel("never heard of", GATEWAY)
    h.turn()
    assert h.ended == {"never heard of": "abort"}


def test_too_many_lost_prefills_are_an_error() -> None:
    h = Harness(retries=1)
    h.ask("a")
    request = h.scheduler.requests["a"]
    for _ in range(2):
        request.again_at = 0.0
        h.scheduler.turn()
        h.remote._lose(request.attempt("decode"), "the node went away")
    h.turn()
    assert h.ended == {"a": "error"}


def test_a_node_that_has_failed_a_request_is_not_asked_for_it_again_at_once() -> None:
    """A refusal that would pass would use up all of its attempts within milliseconds."""
    h = Harness(retries=5)
    other = Peer(role="prefill", address="127.0.0.1:3", boot_id="other")
    h.remote.nodes.learn(GATEWAY.address, (PREFILL, other), {})
    h.ask("a")
    h.ask("behind")
    h.scheduler.turn()
    request = h.scheduler.requests["a"]

    def fail(node: Peer) -> float:
        """For how long the request then waits for a node that has failed it."""
        failed = PrefillFailed(attempt=request.attempt("decode"), reason="not now")
        h.remote.take(node, failed)
        h.scheduler.turn()
        return request.again_at - time.monotonic()

    fail(PREFILL)
    assert request.state is RequestState.PREFILLING, "the other node at once"
    assert request.tried == {"prefill", "other"}
    first = fail(other)
    assert request.state is RequestState.WAITING
    h.ask("later")
    h.scheduler.turn()
    assert h.state("later") is RequestState.PREFILLING, "nobody waits behind it"
    request.again_at = 0.0
    h.scheduler.turn()
    assert request.state is RequestState.PREFILLING
    assert fail(PREFILL) > first, "longer each time"


def test_the_end_of_a_request_is_said_until_its_gateway_has_heard_it() -> None:
    """Were it lost, the client would hang until --request-timeout."""
    h = Harness()
    h.ask("a", tokens=3)
    while h.scheduler.requests:
        h.land()
        h.scheduler.turn()
    key = ("ended", "a", GATEWAY.boot_id)
    gateway, message = h.control.repeated[key]
    assert gateway == GATEWAY
    assert isinstance(message, Outputs)
    [output] = message.outputs
    assert (output.start, output.finish_reason) == (2, "length")
    h.scheduler.outputs.ended("a", GATEWAY)
    assert not h.control.repeated


def test_a_mismatch_is_never_served() -> None:
    """Not even one token of it; with no attempts left the client gets an error."""
    h = Harness(retries=1, verify=lambda _: True)
    h.ask("a")
    for epoch in (1, 2):
        h.scheduler.requests["a"].again_at = 0.0
        h.scheduler.turn()
        checksums = Checksums.of([Checksum(buffer=0, start=0, stop=2, digest=1)])
        attempt = AttemptId("decode", "a", epoch)
        done = PrefillDone(attempt=attempt, num_tokens=2, checksums=checksums)
        h.remote.take(PREFILL, done)
        h.scheduler.turn()
        assert h.state("a") is RequestState.PREFILLING
        verified = Verified(attempt, None, 1, (Mismatch(Checksum(0, 0, 2, 1), 2),))
        h.remote.verified(verified)
        h.remote.take(PREFILL, Quiesced(attempt=attempt))
    h.turn()
    assert h.answers == {"a": []}
    assert h.ended == {"a": "error"}
    assert h.coordinator.is_idle()


def test_logits_that_are_not_finite_end_their_request_alone() -> None:
    """Also where the client wants log-probabilities, and whatever way it wants its tokens picked."""
    h = Harness()
    h.model.overflows_after = 42
    sampling = [Sampling(temperature=0), Sampling(temperature=1, top_k=1), Sampling(temperature=0, top_logprobs=3)]
    for number, each in enumerate(sampling):
        h.ask(f"overflows-{number}", prompt=(41,), sampling=each)
    h.ask("innocent", prompt=(1, 2, 3), tokens=6)
    h.run()
    assert (h.answers.pop("innocent"), h.ended.pop("innocent")) == ([4, 5, 6, 7, 8, 9], "length")
    assert list(h.answers.values()) == [[42]] * 3, "what was sampled before is a token"
    assert list(h.ended.values()) == ["error"] * 3


def test_a_step_that_fails_ends_its_requests_and_leaks_nothing() -> None:
    h = Harness()
    h.ask("a", tokens=50)
    for _ in range(3):
        h.turn()
    h.model.error = RuntimeError("too much at once")
    h.turn()
    h.turn()
    assert h.ended == {"a": "error"}
    h.model.error = None
    h.ask("b")
    h.run()
    assert h.ended["b"] == "length"


def test_a_prompt_that_cannot_be_copied_to_the_host_ends_its_request_alone() -> None:
    h = Harness()
    h.ask("staged")
    h.ask("other")
    request = h.scheduler.requests["staged"]
    request.move(RequestState.LOCAL_PREFILL)
    request.move(RequestState.STAGING)
    failed = [(request, RuntimeError("an illegal address"))]
    local = SimpleNamespace(
        has_work=True,
        is_idle=True,
        step=lambda: None,
        staged=lambda: ([], [failed.pop()] if failed else []),
        cancel=lambda request: False,
    )
    h.scheduler._local = h.scheduler._slots._local = local  # type: ignore[assignment]
    h.run()
    assert h.ended == {"staged": "error", "other": "length"}


def test_without_a_prefill_node_requests_wait() -> None:
    h = Harness()
    h.remote.nodes.learn(GATEWAY.address, (), {})
    h.ask("a")
    h.turn()
    assert h.state("a") is RequestState.WAITING
    h.remote.nodes.learn(GATEWAY.address, (PREFILL,), {})
    h.run()
    assert h.ended == {"a": "length"}


def test_states_follow_one_another_only_as_drawn() -> None:
    request = Request(Generate(request_id="r", prompt_ids=(1,), max_new_tokens=1), GATEWAY)
    with pytest.raises(RuntimeError, match="waiting and cannot become running"):
        request.move(RequestState.RUNNING)


def test_a_prompt_that_no_node_takes_now_does_not_hold_up_shorter_ones() -> None:
    h = Harness()
    longer = Peer(role="prefill", address="127.0.0.1:9", boot_id="longer")
    h.remote.nodes.learn(GATEWAY.address, (PREFILL, longer), {PREFILL.boot_id: 2, "longer": 100})
    h.remote.health.suspect(longer, time.monotonic())
    h.ask("long", prompt=(1, 2, 3, 4))
    h.ask("short", prompt=(1, 2, 3))
    h.scheduler.turn()
    assert [request.request_id for request in h.scheduler.requests.in_state(RequestState.PREFILLING)] == ["short"]


# --- host slots run out while prefills are under way ---


def test_an_older_request_keeps_its_kv_when_host_slots_run_out_and_a_younger_one_is_being_prefilled() -> None:
    """1,000 slots: A runs with 564, B's prompt of 370 is on its way, and A's growth finds nothing left."""
    h = Harness(slow={"b"}, quiet=False)
    prompt_a, prompt_b = (1,) * 565, (2,) * 371
    h.ask("a", prompt=prompt_a, tokens=300)
    h.ask("b", prompt=prompt_b, tokens=5)
    for _ in range(200):
        h.turn()
    assert h.state("b") is RequestState.WAITING, "its attempt was given up"
    assert h.remote.abandoned.num_slots == 370
    assert h.state("a") is RequestState.RUNNING
    assert h.scheduler.requests["a"].epoch == 1, "it was never prefilled again"
    got = len(h.answers["a"])
    assert got > 60
    for _ in range(50):
        h.turn()
    assert len(h.answers["a"]) == got, "it sits out until slots come back, however long that takes"
    assert not h.scheduler.has_work, "the loop waits for a message meanwhile"
    h.quiet = True
    h.slow.clear()
    h.run()
    assert h.answers == {"a": counted(prompt_a, 300), "b": counted(prompt_b, 5)}
    assert h.metrics.retractions.labels("host")._value.get() >= 1


def test_requests_that_grow_at_the_same_time_lose_no_more_than_they_need() -> None:
    """Three equal ones fill the pool and lack 64 slots each: one gives 128 up, which are enough for the others."""
    h = Harness(host_slots=384)
    for name in "abc":
        h.ask(name, prompt=(1,) * 65, tokens=100)
    while not h.metrics.retractions.labels("host")._value.get():
        h.turn()
    assert [h.state(name) for name in "ab"] == [RequestState.RUNNING] * 2
    for _ in range(5):
        h.turn()
    assert h.metrics.retractions.labels("host")._value.get() == 1
    h.run()
    assert h.answers == {name: counted((1,), 100) for name in "abc"}


@pytest.mark.parametrize("patient", [True, False])
def test_of_those_that_are_being_prefilled_only_as_many_give_way_as_are_needed(
    monkeypatch: pytest.MonkeyPatch, patient: bool
) -> None:
    """Their slots are in quarantine, and usually free at once. If they are not for long, the next gives way."""
    if not patient:
        monkeypatch.setattr("decode_node.slots._FRESH_S", 0.0)
    h = Harness(host_slots=400, slow={"b", "c"}, quiet=False)
    h.ask("a", prompt=(1,) * 129, tokens=100)
    for name in "bc":
        h.ask(name, prompt=(2,) * 101, tokens=5)
    for _ in range(120):
        h.turn()
    assert h.state("a") is RequestState.RUNNING
    assert h.state("b") is (RequestState.PREFILLING if patient else RequestState.WAITING)
    assert h.state("c") is RequestState.WAITING
    h.quiet = True
    h.slow.clear()
    h.run()
    assert h.answers == {"a": counted((1,), 100), "b": counted((2,), 5), "c": counted((2,), 5)}


def test_others_go_on_while_one_waits_for_host_slots() -> None:
    """318 slots: 61 of an aborted prefill are in quarantine, and two requests grow by 64 each."""
    h = Harness(host_slots=318, slow={"aborted"}, quiet=False)
    h.ask("first", prompt=(1,) * 101, tokens=120)
    h.ask("aborted", prompt=(3,) * 62)
    h.turn()
    h.scheduler.cancel("aborted", GATEWAY)
    while len(h.answers.get("first", ())) < 40:
        h.turn()
    h.ask("second", prompt=(2,) * 30, tokens=60)
    while "second" in h.scheduler.requests:
        h.turn()
        if "second" in h.answers:
            assert h.state("first") is RequestState.RUNNING
    assert h.answers["second"] == counted((2,), 60)
    assert len(h.answers["first"]) == 64, "it waited for the slots in quarantine, and took nobody's"
    h.quiet = True
    h.run()
    assert h.answers["first"] == counted((1,), 120)


# --- errors and endings while a step is in flight ---


def test_a_device_that_is_lost_ends_the_node_and_not_one_request_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    h = Harness()
    h.ask("a", tokens=50)
    h.ask("waits", tokens=50)
    for _ in range(3):
        h.turn()

    def lost(device: torch.device) -> None:
        raise DeviceFailed(f"{device} cannot be used any more: an illegal memory access was encountered")

    monkeypatch.setattr("engine.runner.check_device", lost)
    h.model.error = RuntimeError("an illegal memory access was encountered")
    with pytest.raises(DeviceFailed) as failure:
        h.turn()
    h.scheduler.fail_all(str(failure.value))
    ends = {output.request_id: output.error for output in h.control.outputs() if output.finish_reason == "error"}
    assert ends == dict.fromkeys(("a", "waits"), str(failure.value))


@pytest.mark.parametrize("turns", range(1, 12))
def test_whatever_a_step_in_flight_meets_nothing_is_lost_repeated_or_left_behind(turns: int) -> None:
    """A cancellation, a retraction and a step that fails, at every turn of the requests' lives."""
    h = Harness(device_slots=HOT + 1 + 4, host_slots=200)
    for name in "abc":
        h.ask(name, prompt=(10, 11), tokens=20)
    h.ask("stops", prompt=(10,), tokens=20, stop_token_ids=(13,))
    for _ in range(turns):
        h.turn()
    h.scheduler.cancel("b", GATEWAY)
    h.turn()
    if turns % 3 == 0:
        h.model.error = RuntimeError("too much at once")
        h.turn()
        h.model.error = None
    h.run()
    for name, reason in h.ended.items():
        if reason == "length":
            assert h.answers[name] == counted((11,), 20)
    assert h.ended["b"] in ("abort", "length", "error")
    if turns % 3:
        assert h.ended["a"] == h.ended["c"] == "length"
        assert (h.answers["stops"], h.ended["stops"]) == ([11, 12, 13], "stop")
