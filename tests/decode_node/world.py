"""The world around a decode node's scheduler: it plays the gateway and the prefill node, and has a model that counts.

`remote_world.py` has the world of remote prefills alone, without a scheduler.
"""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

from base.block_hashes import BLOCK_TOKENS
from base.metrics import Metrics
from control.messages import (
    Abort,
    Destination,
    Generate,
    Outputs,
    Peer,
    PrefillDone,
    PrefillRequest,
    Quiesced,
    Sampling,
)
from decode_node.grammars import Grammars
from decode_node.outputs import OutputStream
from decode_node.remote_prefill import RemotePrefill
from decode_node.request import Limits, RequestState
from decode_node.scheduler import Scheduler
from decode_node.verifier import ChecksumTask
from engine.draft_policy import DraftPolicy
from engine.grammar import UnsupportedTokenizer
from engine.grammar.vocabulary import Vocabulary
from engine.runner import ModelRunner
from hisparse.config import HiSparseConfig
from hisparse.coordinator import HiSparseCoordinator
from hisparse.sizing import Sizes, step_window
from hisparse.step import DecodeStep
from hisparse.tiers import build_tiers
from kvcache.extents import Extent, HostSlots
from kvcache.format import DenseFormat
from kvcache.layout import KVLayout
from kvcache.prefix_cache import PrefixCache
from ranks.group import Ranks, SingleRank
from tests.identity import IDENTITY
from tests.prefill_node.fakes import FakeControl
from transfer.incoming import IncomingCut
from transfer.memory import BufferInfo, Session

CPU = torch.device("cpu")
GATEWAY = Peer(role="gateway", address="127.0.0.1:1", boot_id="gateway")
PREFILL = Peer(role="prefill", address="127.0.0.1:2", boot_id="prefill")

FORMAT = DenseFormat(torch.float32, item_dim=2, index_dim=2)
LAYOUT = KVLayout((0,), FORMAT.item_bytes, FORMAT.index_key_bytes)
DRAFTING = KVLayout((0, 1), FORMAT.item_bytes, FORMAT.index_key_bytes)
VOCAB = 512
HOT = 4


def destination(num_slots: int) -> Destination:
    """Two layers of items and one of index keys, at addresses that must not be read."""
    lengths = (16 * num_slots, 16 * num_slots, 8 * num_slots)
    return Destination(
        identity=IDENTITY,
        buffers=BufferInfo(ptrs=(1, 2, 3), lengths=lengths, item_lengths=(16, 16, 8)),
        sessions=(Session(transport="tcp", name="127.0.0.1:9"),),
    )


def tiers(
    layout: KVLayout,
    host_slots: int,
    device_slots: int,
    max_requests: int,
    has_prefix_cache: bool = False,
    max_drafts: int = 0,
    verify: bool = False,
) -> HiSparseCoordinator:
    sizes = Sizes(
        config=HiSparseConfig(device_buffer_size=HOT, top_k=HOT),
        layout=layout,
        max_requests=max_requests,
        max_context=1000,
        index_page_size=1,  # so that a slab is one hot slot, or the index key of one token
        num_host_slots=host_slots,
        num_slabs=device_slots + 6400,
        max_device_slots=device_slots,
        has_prefix_cache=has_prefix_cache,
        window=step_window(max_drafts),
    )
    return build_tiers(sizes, CPU, verify)


def counted(prompt: tuple[int, ...], tokens: int) -> list[int]:
    """The answer that the model gives."""
    return list(range(prompt[-1] + 1, prompt[-1] + 1 + tokens))


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Tokens below 100, so that answers of a few hundred tokens stay in the vocabulary."""
    return tuple(random.Random(seed).randrange(100) for _ in range(length))


class CountingModel:
    """Predicts input + 1, and appends recognisable KV as a real model would."""

    device = CPU

    def __init__(self, guesses: Callable[[int], int] = lambda token_id: token_id + 1) -> None:
        """guesses: the draft of the token after one, of a node that drafts."""
        self.spec = SimpleNamespace(vocab_size=VOCAB, num_layers=2, draft_layer=1)
        self.guesses = guesses
        self.batches: list[int] = []
        self.error: Exception | None = None
        self.overflows_after = -1
        self.scale = 1.0
        """The logit of the predicted token."""
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
        return token_ids[:, None]

    def draft(
        self,
        next_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        step: DecodeStep,
        picked: torch.Tensor | None,
        reuse: bool = False,
    ) -> torch.Tensor | None:
        pairs = torch.stack((next_ids, positions), 1)
        step.append_index_keys(1, FORMAT.encode_index_keys(pairs))
        step.append(1, FORMAT.encode_items(pairs))
        if picked is None:
            return None
        step.swap_in(1, (positions[picked, None] - torch.arange(HOT)).clamp(min=-1))
        # `logits` predicts the token after it.
        return torch.tensor([[self.guesses(token_id) - 1] for token_id in next_ids[picked].tolist()])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.scale * torch.nn.functional.one_hot((hidden[:, 0] + 1) % VOCAB, VOCAB).float()
        return logits.masked_fill(hidden == self.overflows_after, float("inf"))


def kv_pairs(tokens: torch.Tensor, layout: KVLayout) -> list[torch.Tensor]:
    """What the model stores of all tokens but the last, in each layer: the draft layer's entry depends on the next."""
    positions = torch.arange(len(tokens) - 1)
    return [torch.stack((of, positions), 1) for of in (tokens[:-1], tokens[1:])][: layout.num_layers]


def no_grammars() -> Vocabulary:
    raise UnsupportedTokenizer("this model has no tokenizer")


@dataclass
class World:
    """`turn` plays the prefill node: what was dispatched lands in the next turn, unless the request is `slow`, and what
    is aborted is quiet, if `quiet` is set."""

    host_slots: int = 1000
    device_slots: int = 100
    max_running: int = 8
    max_waiting: int = 100
    retries: int = 2
    slow: set[str] = field(default_factory=set)
    quiet: bool = True
    verify: Callable[[ChecksumTask], bool] = lambda _: False
    control: FakeControl = field(default_factory=FakeControl)
    model: CountingModel = field(default_factory=CountingModel)
    metrics: Metrics = field(default_factory=Metrics)
    caching: bool = False
    max_drafts: int = 0
    policy: DraftPolicy | None = None
    lingering: bool = False
    """Whether the prefill node had something cut and posted again."""
    answers: dict[str, list[int]] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str | None] = field(default_factory=dict)
    vocabulary: Callable[[], Vocabulary] = no_grammars
    grammar_done: threading.Event = field(default_factory=threading.Event)
    ranks: Ranks = field(default_factory=lambda: SingleRank(CPU))

    def __post_init__(self) -> None:
        layout, drafts = (DRAFTING, self.max_drafts) if self.max_drafts else (LAYOUT, 0)
        self.coordinator = tiers(
            layout, self.host_slots, self.device_slots, self.max_running, self.caching, drafts, verify=drafts > 0
        )
        self.buffers = self.coordinator.host.get_contiguous_buf_infos()
        self.remote = RemotePrefill(
            self.control,  # type: ignore[arg-type]
            destination(self.host_slots).model_copy(update={"buffers": self.buffers}),
            self.coordinator.host,
            lambda: IncomingCut(()),
            self.verify,
            self.metrics,
            patience=60.0,
            on_lost=lambda request, reason: self.scheduler.retry(request, reason),
            on_landed=lambda request, cached: self.scheduler.slots.landed(request, cached),
        )
        self.table = self.remote._reservations
        self.remote.nodes.learn(GATEWAY.address, (PREFILL,), {})
        self.runner = ModelRunner(
            self.model,  # type: ignore[arg-type]
            self.coordinator,
            self.max_running,
            1000,
            record=False,
            policy=self.policy or DraftPolicy(self.max_drafts),
        )
        max_tokens = self.max_running * self.runner.policy.max_width
        self.grammars = Grammars(self.vocabulary, max_tokens, pinned=False, wake=self.grammar_done.set)
        self.scheduler = Scheduler(
            self.runner,
            self.coordinator,
            self.remote,
            None,
            OutputStream(self.control, self.metrics),  # type: ignore[arg-type]
            self.metrics,
            Limits(1000, VOCAB, self.host_slots, self.max_running, self.max_waiting, self.retries),
            self.grammars,
            self.ranks,
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
        tokens = torch.tensor((*message.token_ids, message.last_token_id))
        slots = HostSlots(tuple(Extent(*extent) for extent in message.extents)).slots()
        for layer, pairs in enumerate(kv_pairs(tokens, self.coordinator.host.layout)):
            at = torch.from_numpy(slots)[: len(pairs) - message.start]
            self.coordinator.host.kv[layer][at] = FORMAT.encode_items(pairs[message.start :])
            self.coordinator.host.index_keys[layer][at] = FORMAT.encode_index_keys(pairs[message.start :])

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
                self.grammar_done.clear()
            if self.coordinator.staging:
                time.sleep(0.001)  # a thread copies
        self.scheduler.check_idle()
        assert self.coordinator.is_idle()

    def state(self, request_id: str) -> RequestState:
        return self.scheduler.requests[request_id].state


class Caching(World):
    """A world with a prefix cache, which looks at every byte of the KV that requests have, in every turn."""

    def __init__(self, **options: object) -> None:
        super().__init__(caching=True, **options)  # type: ignore[arg-type]
        self.asked: list[PrefillRequest] = []
        self.max_cached = 0

    @property
    def cache(self) -> PrefixCache:
        cache = self.coordinator.host.prefixes
        assert cache is not None
        return cache

    def turn(self) -> None:
        super().turn()
        for _, message in self.control.repeated.values():
            if isinstance(message, PrefillRequest) and message not in self.asked:
                self.asked.append(message)
        self.max_cached = max(self.max_cached, self.cache.blocks.blocks * BLOCK_TOKENS)
        self.audit()

    def audit(self) -> None:
        """What a request will read is the KV of its own tokens; and the books add up."""
        host = self.coordinator.host
        host.check_integrity()
        self.cache.check_integrity()
        for request in self.scheduler.requests.values():
            slots = request.host_slots
            if request.state is RequestState.RUNNING:
                slots = self.coordinator._running[request.request_id].host_slots
            if slots is None or request.state is RequestState.LOCAL_PREFILL:
                continue
            known = len(slots) if request.state is RequestState.PREFILLING else request.kv_tokens
            tokens = torch.tensor(request.tokens[: known + 1])
            at = torch.from_numpy(slots.slots()[:known])
            for layer, pairs in enumerate(kv_pairs(tokens, host.layout)):
                # The draft layer's entry at the end of a cached block was made with what followed the block elsewhere.
                same = [place for place in range(known) if not layer or (place + 1) % BLOCK_TOKENS]
                found = host.kv[layer][at][same], host.index_keys[layer][at][same]
                expected = FORMAT.encode_items(pairs[same]), FORMAT.encode_index_keys(pairs[same])
                assert all(map(torch.equal, found, expected)), (request.request_id, request.state, layer)

    def run(self, turns: int = 2000) -> None:
        super().run(turns)
        assert self.coordinator.host.used == 0
        self.cache.check_integrity()
        self.cache.clear()
        self.scheduler.check_idle()
        assert self.coordinator.host.free == self.coordinator.host.num_slots
        assert self.coordinator.host.cached == self.cache.blocks.blocks == 0

    def serve(self, request_id: str, **fields: object) -> None:
        """Ask, and go on until there are no requests; the cache stays."""
        self.ask(request_id, **fields)  # type: ignore[arg-type]
        while self.scheduler.requests or self.scheduler.holds_something:
            self.turn()

    def sent(self, request_id: str) -> list[tuple[int, int]]:
        """From which position on, and how many, for each attempt of a request."""
        return [
            (message.start, len(message.token_ids) - message.start)
            for message in self.asked
            if message.attempt.request_id == request_id
        ]

    def count(self, metric: str) -> int:
        return int(getattr(self.metrics, metric).labels("decode")._value.get())
