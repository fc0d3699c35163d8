"""The registry: who is registered, who is used, in which order."""

import pytest

from control.messages import CheckpointIdentity, Heartbeat, Peer, Refused, Register, Registered
from gateway.registry import Capacity, NodeRegistry
from tests.identity import IDENTITY
from tests.work import calls_of

VIA = "gateway:1"


def peer(number: int, role: str = "decode", boot: str = "a") -> Peer:
    return Peer(role=role, address=f"10.0.0.{number}:8001", boot_id=f"{number}{boot}")  # type: ignore[arg-type]


def offer(role: str = "decode", **changes: object) -> Register:
    fields = {
        "via": VIA,
        "role": role,
        "identity": IDENTITY,
        "transports": ("tcp",),
        "page_size": 64,
        "max_request_tokens": 1000,
    }
    return Register.model_validate(fields | changes)


def beat(queued: int = 0, ready: bool = True) -> Heartbeat:
    return Heartbeat(via=VIA, ready=ready, queued_tokens=queued)


def test_ranks_of_a_group_that_died_are_the_last_to_be_tried(registry: NodeRegistry) -> None:
    for number, queued, group in ((2, 0, "a"), (3, 0, "a"), (4, 100, "")):
        registry.register(peer(number), offer(rank_group=group), 0.0)
        registry.heartbeat(peer(number), beat(queued), 0.0)
    assert [registry.rank_group(peer(number)) for number in (3, 4, 5)] == ["a", "", ""]
    assert registry.pick_decode(10, {"2a"}, 0.0) == peer(3)
    assert registry.pick_decode(10, {"2a"}, 0.0, avoid={"a"}) == peer(4)
    assert registry.pick_decode(10, {"2a"}, 0.0, avoid={"a", "4a"}) == peer(3), "the better of two that are avoided"


def test_kv_use_is_the_mean_of_live_decode_nodes(registry: NodeRegistry) -> None:
    registry.heartbeat(peer(1, "prefill"), beat(), 0.0)
    for number, usage in ((2, 0.5), (3, 1.0)):
        registry.heartbeat(peer(number), beat().model_copy(update={"kv_usage": usage}), float(number))
    assert registry.kv_usage(3.5) == 0.75
    assert registry.kv_usage(5.5) == 1.0
    assert registry.kv_usage(9.0) == 0.0


@pytest.fixture
def registry() -> NodeRegistry:
    registry = NodeRegistry()
    registry.register(peer(1, "prefill"), offer("prefill"), 0.0)
    registry.register(peer(2), offer(), 0.0)
    registry.register(peer(3), offer(), 0.0)
    return registry


def test_another_dtype_is_refused_with_both_values(registry: NodeRegistry) -> None:
    other = IDENTITY.model_copy(update={"dtype": "bfloat16"})
    answer = registry.register(peer(4, "prefill"), offer("prefill", identity=other), 0.0)
    assert isinstance(answer, Refused)
    assert answer.reason == (
        "prefill node 10.0.0.4:8001 refused: dtype bfloat16 != float32 of prefill node 10.0.0.1:8001"
    )
    assert registry.count("prefill", 0.0) == 1


def test_a_node_of_another_checkpoint_is_refused_with_both_values() -> None:
    own = CheckpointIdentity(vocab_size=100, config="c0", tokenizer="70")
    registry = NodeRegistry(own)

    def answer(**changes: object) -> Registered | Refused:
        return registry.register(peer(1), offer(checkpoint=own.model_copy(update=changes)), 0.0)

    assert isinstance(answer(), Registered)
    assert isinstance(answer(tokenizer=""), Registered), "a node needs no tokenizer"
    assert isinstance(registry.register(peer(2), offer(), 0.0), Registered), "an older release says nothing of it"
    refused = answer(vocab_size=101, tokenizer="71")
    assert isinstance(refused, Refused)
    assert refused.reason.endswith("refused: vocab_size 101 != 100, tokenizer 71 != 70 of this gateway")
    assert registry.count("decode", 0.0) == 1


def test_another_transfer_protocol_is_refused_with_both_values(registry: NodeRegistry) -> None:
    answer = registry.register(peer(4), offer(transports=("rdma",)), 0.0)
    assert isinstance(answer, Refused)
    assert "transfer protocol rdma != tcp of" in answer.reason


def test_other_page_sizes_are_welcome(registry: NodeRegistry) -> None:
    assert isinstance(registry.register(peer(4), offer(page_size=16), 0.0), Registered)


def test_any_identity_is_taken_when_nobody_else_is_live(registry: NodeRegistry) -> None:
    other = offer(identity=IDENTITY.model_copy(update={"num_layers": 61}))
    assert isinstance(registry.register(peer(4), other, 1.0), Refused)
    assert isinstance(registry.register(peer(4), other, 10.0), Registered)
    # The silent ones come back and find that they no longer fit.
    assert not registry.heartbeat(peer(2), beat(), 10.0).known


def test_a_new_boot_replaces_the_old_one(registry: NodeRegistry) -> None:
    registry.register(peer(2, boot="b"), offer(), 1.0)
    assert registry.replaced(peer(2))
    assert registry.count("decode", 1.0) == 2
    assert not registry.heartbeat(peer(2), beat(), 1.0).known
    registry.leave(peer(2))
    assert registry.count("decode", 1.0) == 2


def test_heartbeats_are_answered_with_the_ranked_prefill_nodes(registry: NodeRegistry) -> None:
    registry.register(peer(4, "prefill"), offer("prefill"), 0.0)
    registry.heartbeat(peer(1, "prefill"), beat(queued=100), 0.5)
    ack = registry.heartbeat(peer(2), beat(), 0.5)
    assert ack.known
    assert [p.address for p in ack.prefill_nodes] == ["10.0.0.4:8001", "10.0.0.1:8001"]


def test_the_decode_node_with_the_fewest_outstanding_tokens_is_picked(registry: NodeRegistry) -> None:
    registry.heartbeat(peer(2), beat(queued=500), 0.5)
    registry.heartbeat(peer(3), beat(queued=100), 0.5)
    assert registry.pick_decode(10, (), 0.5) == peer(3)
    registry.assign(peer(3), 450)
    assert registry.pick_decode(10, (), 0.5) == peer(2)
    # The next heartbeat counts what was assigned.
    registry.heartbeat(peer(3), beat(queued=300), 1.0)
    assert registry.pick_decode(10, (), 1.0) == peer(3)
    assert registry.pick_decode(10, {"3a"}, 1.0) == peer(2)
    assert registry.pick_decode(1001, (), 1.0) is None


def test_prefill_nodes_that_take_so_long_a_prompt_come_first(registry: NodeRegistry) -> None:
    registry.register(peer(4, "prefill"), offer("prefill", max_request_tokens=5000), 0.0)
    registry.heartbeat(peer(4, "prefill"), beat(queued=9000), 0.0)
    assert registry.for_prefill(0.0, 1000)["prefill_nodes"] == (peer(1, "prefill"), peer(4, "prefill"))
    assert registry.for_prefill(0.0, 1001)["prefill_nodes"] == (peer(4, "prefill"), peer(1, "prefill"))
    assert registry.heartbeat(peer(2), beat(), 0.0).longest_prompts == {"1a": 1000, "4a": 5000}


def test_prefill_nodes_are_not_compared_with_each_other() -> None:
    """They are ranked for each request and each heartbeat."""

    def calls(count: int) -> int:
        registry = NodeRegistry()
        for number in range(count):
            registry.register(peer(number, "prefill"), offer("prefill"), 0.0)
        ranked: list[int] = []
        made = calls_of(lambda: ranked.append(len(registry.for_prefill(0.0, 1000)["prefill_nodes"])))
        assert ranked == [count]
        return made

    assert calls(1024) < 24 * calls(128), "in proportion it is 8 times as many, and 64 times if all are compared"


def test_a_request_may_be_as_large_as_the_largest_node_takes(registry: NodeRegistry) -> None:
    assert registry.capacity(8000, 0.0) == Capacity(context=1000, prompt=1000)
    registry.register(peer(4), offer(max_request_tokens=4000, local_prefill=True), 0.0)
    assert registry.capacity(8000, 0.0) == Capacity(context=4000, prompt=1000)
    assert registry.capacity(500, 0.0) == Capacity(context=500, prompt=500)
    registry.leave(peer(1, "prefill"))
    assert registry.capacity(8000, 0.0) == Capacity(context=4000, prompt=4000), "that node computes prompts, too"
    assert registry.capacity(8000, 60.0) == Capacity(context=8000, prompt=8000), "nobody is there to take less"


def test_silence_is_no_death(registry: NodeRegistry) -> None:
    registry.heartbeat(peer(1, "prefill"), beat(), 4.0)
    registry.heartbeat(peer(2), beat(), 4.0)
    assert registry.pick_decode(10, {"2a"}, 4.0) is None
    assert registry.heartbeat(peer(3), beat(), 5.0).known
    assert registry.pick_decode(10, {"2a"}, 5.0) == peer(3)
    assert not registry.heartbeat(peer(3), beat(), 70.0).known


def test_a_leaving_node_takes_nothing_more_but_may_finish(registry: NodeRegistry) -> None:
    registry.leave(peer(2))
    assert registry.pick_decode(10, {"3a"}, 0.0) is None
    assert registry.heartbeat(peer(2), beat(), 1.0).known
    assert registry.pick_decode(10, {"3a"}, 1.0) is None
    assert isinstance(registry.register(peer(2), offer(), 1.0), Registered)
    assert registry.pick_decode(10, {"3a"}, 1.0) == peer(2)


def test_readiness_says_what_is_missing(registry: NodeRegistry) -> None:
    assert registry.unready_reason(0.0) is None
    registry.leave(peer(1, "prefill"))
    assert "no live prefill node" in (registry.unready_reason(0.0) or "")
    registry.register(peer(4), offer(local_prefill=True), 0.0)
    assert registry.unready_reason(0.0) is None
    # Without prefill nodes only a node that prefills itself is of use.
    assert registry.pick_decode(10, (), 0.0) == peer(4)
    assert "no live decode node" in (registry.unready_reason(10.0) or "")


def test_decode_nodes_hear_which_prefill_nodes_leave(registry: NodeRegistry) -> None:
    registry.leave(peer(1, "prefill"))
    assert registry.for_prefill(0.5)["prefill_nodes"] == ()
    ack = registry.heartbeat(peer(2), beat(), 0.5)
    assert (ack.prefill_nodes, ack.leaving) == ((), ("1a",))
    assert registry.heartbeat(peer(1, "prefill"), beat(), 0.6).known, "it may be finishing what it has"
    registry.register(peer(1, "prefill", boot="b"), offer("prefill"), 1.0)
    ack = registry.heartbeat(peer(2), beat(), 1.0)
    assert (ack.prefill_nodes, ack.leaving) == ((peer(1, "prefill", boot="b"),), ())


def test_nodes_hear_of_every_rank_of_a_prefill_node_as_soon_as_of_the_node(registry: NodeRegistry) -> None:
    """They are writers, too: a decode node has to know them before it names slots."""
    ranks = (peer(6, "prefill"), peer(7, "prefill"))
    registry.register(peer(5, "prefill"), offer("prefill", ranks=ranks), 0.0)
    ack = registry.heartbeat(peer(2), beat(), 1.0)
    assert {node.boot_id for node in ack.prefill_nodes} == {"1a", "5a"}
    assert ack.prefill_ranks == registry.for_prefill(1.0)["prefill_ranks"] == {"5a": ranks}
    assert registry.count("prefill", 1.0) == 2


def test_a_node_that_is_lost_or_found_is_told_once(registry: NodeRegistry) -> None:
    registry.leave(peer(3))
    registry.heartbeat(peer(2), beat(), 4.0)
    assert registry.liveness_changes(4.0) == [(peer(1, "prefill"), False)], "one that leaves is not lost"
    assert registry.liveness_changes(5.0) == []
    registry.heartbeat(peer(1, "prefill"), beat(), 6.0)
    assert registry.liveness_changes(6.0) == [(peer(1, "prefill"), True)]
