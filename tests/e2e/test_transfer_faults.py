"""What goes wrong with a transfer, one cause at a time, with real processes and real transports."""

import json
import signal
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decode_node.prefill_nodes import SILENCE_S
from prefill_node.lanes import LEASE_S
from tests.e2e.asking import Job, assert_exact, complete, random_prompts
from tests.e2e.chaos_audit import Audit, read_journal
from tests.e2e.cluster import Cluster, Node, wait_until
from tests.e2e.conftest import TOKEN_BYTES, Reference, References
from tests.e2e.faulty_node import MODULE, Faults, Switches, journal_path
from tests.e2e.spawn import execute, fork

PROMPT, OTHER, SHORT = random_prompts((800, 750, 300), seed=8)
TCP_FIRST = ("tcp", pytest.param("shm", marks=pytest.mark.slow))
SHM_FIRST = ("shm", pytest.param("tcp", marks=pytest.mark.slow))


class Surroundings:
    """A cluster whose processes meet with the faults that a test asks for."""

    def __init__(self, model_path: Path, directory: Path, reference: Reference) -> None:
        self.reference = reference
        self.asking = ThreadPoolExecutor(4)
        self.directory = directory / "faults"
        self.directory.mkdir()
        self.switches = Switches(self.directory)
        self.faults = Faults(str(self.directory), "", journal=True)
        self.cluster = Cluster(model_path, directory, MODULE, self._environment, spawn=fork)

    def start(
        self, transport: str, prefill_nodes: int = 1, decode_nodes: int = 1, host_slots: int = 2400, **flags: object
    ) -> None:
        """A gateway, decode nodes and prefill nodes that reach them by this transport, all ready.

        flags: of prefill nodes.
        """
        longest: dict[str, object] = {"context_length": 1200}
        self.cluster.gateway(served_model_name="tiny")
        for number in range(prefill_nodes):
            self.cluster.prefill(
                f"prefill-{number}",
                transfer_protocol=transport,
                transfer_checksum="full",
                chunked_prefill_size=256,
                page_size=16,
                **longest,
                **flags,
            )
        config = {"device_buffer_size": 128, "host_pool_gib": host_slots * TOKEN_BYTES / 2**30}
        for number in range(decode_nodes):
            self.cluster.decode(
                f"decode-{number}",
                transfer_protocol="auto",
                hisparse_config=json.dumps(config),
                debug_verify_swap_in=True,
                **longest,
            )
        self.cluster.wait_ready()

    @property
    def decode(self) -> Node:
        return self.cluster.nodes["decode-0"]

    @property
    def prefill(self) -> list[Node]:
        return [node for name, node in self.cluster.nodes.items() if name.startswith("prefill")]

    def writes(self) -> list[dict[str, Any]]:
        """Every batch that was posted, in order."""
        return read_journal(journal_path(self.directory))

    def ask(self, prompt: list[int], tokens: int) -> "Future[list[list[int]]]":
        """Ask for a completion in the background."""
        return self.asking.submit(complete, self.cluster.url, [Job(prompt, tokens)])

    def assert_serves(self, *prompts: list[int]) -> None:
        assert_exact(self.cluster.url, self.reference, [Job(prompt, 16) for prompt in prompts], len(prompts))

    def failures(self, reason: str) -> float:
        return self.decode.metric("transfer_failures_total", reason=reason)

    def quarantined(self) -> float:
        return self.decode.metric("host_slots", state="quarantined")

    def assert_nothing_is_left(self) -> None:
        """Nothing wrong was ever in a request's slots, and all of them are free again."""
        wait_until(lambda: self.quarantined() == 0, 20, "the quarantine to end")
        self.decode.wait_unused("host_slots")
        audit = Audit.of(self.directory)
        assert audit.wrong == []
        assert audit.seen["landed"] > 0

    def _environment(self, name: str) -> Mapping[str, str]:
        return replace(self.faults, name=name).environment()


@pytest.fixture
def surroundings(checkpoints: dict[str, Path], references: References, tmp_path: Path) -> Iterator[Surroundings]:
    made = Surroundings(checkpoints["deepseek_v32"], tmp_path, references["deepseek_v32"])
    with made.cluster, made.asking:
        yield made


def stop_in_the_middle_of_a_transfer(surroundings: Surroundings) -> tuple["Future[list[list[int]]]", Node]:
    """Ask for a completion of PROMPT, and stop the prefill node that has begun to write: (the answer, that node).

    Other writes are under way, and land when it goes on.
    """
    surroundings.switches.chaos.touch()
    answer = surroundings.ask(PROMPT, 16)
    first = wait_until(surroundings.writes, what="a first write")[0]
    node = surroundings.cluster.nodes[first["node"]]
    node.signal(signal.SIGSTOP)
    surroundings.switches.chaos.unlink()
    return answer, node


@pytest.mark.parametrize("transport", TCP_FIRST)
def test_late_writes_of_a_stopped_node_hit_only_quarantined_slots(surroundings: Surroundings, transport: str) -> None:
    """sglang PRs 24580, 31357: pages were freed while the prefill node was still writing to them."""
    # Far apart, so that some are under way when the first has landed.
    surroundings.faults = replace(surroundings.faults, slow=1.0, slow_s=(0.3, 1.5))
    # Room for two prompts: if the first attempt's slots were free, the next request would have them.
    surroundings.start(transport, prefill_nodes=2, host_slots=2048)
    answer, stopped = stop_in_the_middle_of_a_transfer(surroundings)
    assert answer.result() == [surroundings.reference.generate(PROMPT, 16)], "by the other node"
    assert surroundings.quarantined() == len(PROMPT) - 1, "silence is no proof of death"

    running = surroundings.ask(OTHER, 400)
    wait_until(lambda: surroundings.decode.metric("requests", state="running") == 1, what="another request to run")
    went_on = time.monotonic()
    stopped.signal(signal.SIGCONT)
    wait_until(lambda: surroundings.quarantined() == 0, what="the stopped node to say that it is quiet")
    late = [write for write in surroundings.writes() if write["node"] == stopped.name and write["at"] > went_on]
    assert late, "what was under way when it was stopped"
    assert all(write["posted_at"] < went_on for write in late), "nothing is posted without a new answer"
    [answer] = running.result()
    assert len(answer) == 400
    assert answer == surroundings.reference.likeliest(OTHER, answer)
    surroundings.assert_serves(*[PROMPT] * 4)
    surroundings.assert_nothing_is_left()


@pytest.mark.parametrize("transport", TCP_FIRST)
def test_writes_to_a_decode_node_do_not_reach_its_next_process(surroundings: Surroundings, transport: str) -> None:
    """sglang 16903: after its peer's restart a node went on with what it knew of the old one."""
    surroundings.faults = replace(surroundings.faults, slow=1.0, slow_s=(0.4, 0.5))
    surroundings.start(transport)
    answer, prefill = stop_in_the_middle_of_a_transfer(surroundings)
    old_pool = surroundings.writes()[0]["pool"]
    surroundings.decode.kill()
    killed_at = time.monotonic()
    with pytest.raises(AssertionError, match="no live decode node is registered"):
        answer.result()
    surroundings.cluster.spawn = execute  # it takes its time to come back, and has its pool at another address
    surroundings.cluster.restart(surroundings.decode)
    wait_until(surroundings.decode.is_up, 60, "the decode node to be back")
    went_on = time.monotonic()
    prefill.signal(signal.SIGCONT)

    surroundings.cluster.wait_ready()  # the prefill node was silent for as long as the decode node took to be back
    surroundings.assert_serves(PROMPT)
    surroundings.assert_serves(SHORT)

    wait_until(lambda: prefill.metric("prefill_pages", state="used") == 0, 20, "its pages to come back")
    noticed = ("transfer failed", "decode node is silent")
    assert any(event in prefill.log for event in noticed), "by the transport, or by the silence"
    assert went_on - killed_at > LEASE_S
    pools = {write["pool"] for write in surroundings.writes() if write["posted_at"] > went_on}
    assert old_pool not in pools, "what it finds in its mailbox is what the old process said before it died"
    surroundings.assert_nothing_is_left()


@pytest.mark.parametrize("transport", SHM_FIRST)
def test_a_torn_transfer_is_never_served_and_its_nodes_go_on(surroundings: Surroundings, transport: str) -> None:
    """vllm 44238, sglang 23020: concurrent transfers corrupted KV; sglang 13054: one error failed a pair for ever."""
    surroundings.start(transport, prefill_nodes=2)
    for node in surroundings.prefill:
        surroundings.switches.spoil(node.name).touch()
    surroundings.assert_serves(PROMPT)
    assert surroundings.failures("checksum") == 2
    assert surroundings.decode.log.count("transferred KV is not what was sent") == 2
    assert not any(surroundings.switches.spoil(node.name).exists() for node in surroundings.prefill)
    wait_until(lambda: surroundings.quarantined() == 0, what="both nodes to say that they are quiet")

    surroundings.assert_serves(PROMPT, OTHER)
    assert surroundings.decode.metric("prefill_retries_total") == 2
    surroundings.assert_nothing_is_left()


@pytest.mark.parametrize("transport", TCP_FIRST)
def test_after_idleness_a_request_is_served_as_at_first(surroundings: Surroundings, transport: str) -> None:
    """sglang 9266: requests failed after hours of idleness. Here, connections are closed after a moment of it."""
    surroundings.faults = replace(surroundings.faults, idle_close_s=0.1)
    surroundings.start(transport)

    def seconds(idle: float) -> float:
        time.sleep(idle)
        started = time.monotonic()
        surroundings.assert_serves(SHORT)
        return time.monotonic() - started

    first = seconds(0.0)
    # Longer than anybody takes for silence, or for the end of a thread or a connection that nobody needs. Another
    # process may have the processor once, a time-out passes each time.
    assert any(seconds(SILENCE_S + 1) < first + 1 for _ in range(3)), "no time-out had to pass first"
    assert surroundings.decode.metric("prefill_retries_total") == 0
    surroundings.assert_nothing_is_left()


def test_another_serves_a_request_whose_decode_node_falls_silent(surroundings: Surroundings) -> None:
    """The prefill node works on it for both: over TCP, its writes to the silent one take a minute to fail."""
    surroundings.faults = replace(surroundings.faults, slow=1.0, slow_s=(0.4, 0.5))
    surroundings.start("tcp", decode_nodes=2)
    decodes = [node for name, node in surroundings.cluster.nodes.items() if name.startswith("decode")]
    [prefill] = surroundings.prefill
    surroundings.switches.chaos.touch()
    started = time.monotonic()
    answer = surroundings.ask(PROMPT, 16)
    wait_until(surroundings.writes, what="a first write")
    silent = next(node for node in decodes if node.metric("requests", state="prefilling"))
    silent.signal(signal.SIGSTOP)
    surroundings.switches.chaos.unlink()
    [tokens] = answer.result()
    assert time.monotonic() - started < 30, "the prefill node did not wait for its writes to the silent one to fail"
    assert len(tokens) == 16
    assert tokens == surroundings.reference.likeliest(PROMPT, tokens)

    silent.signal(signal.SIGCONT)
    silent.wait_unused("host_slots")
    wait_until(lambda: silent.metric("host_slots", state="quarantined") == 0, what="the prefill node's answer")
    wait_until(lambda: prefill.metric("prefill_pages", state="used") == 0, 20, "its pages to come back")
    surroundings.assert_serves(*[OTHER] * 4)
    surroundings.assert_nothing_is_left()


def test_a_prefill_node_that_hears_nobody_is_passed_over_until_it_does(surroundings: Surroundings) -> None:
    """A partition in one direction: it still says that it lives.

    To a decode node that it wrote to not for long, here: its pings, too, are signs of life.
    """
    surroundings.faults = replace(surroundings.faults, watch_s=2.0)
    surroundings.start("tcp", prefill_nodes=2)
    first, second = surroundings.prefill
    for deaf, healthy in ((first, second), (second, first)):
        prefilled = tokens_of(healthy)
        surroundings.switches.deaf(deaf.name).touch()
        surroundings.assert_serves(*[SHORT] * 3)
        assert tokens_of(healthy) == prefilled + 3 * (len(SHORT) - 1)
        surroundings.switches.deaf(deaf.name).unlink()
    surroundings.assert_nothing_is_left()


def tokens_of(prefill: Node) -> float:
    """Prompt tokens that a prefill node computed, had, or fetched from the decode node."""
    names = ("prompt_tokens_total", "prefix_fetched_tokens_total")
    return sum(map(prefill.metric, names)) + prefill.metric("prefix_cache_hits_total", side="prefill")
