"""Requests of the trained model come and go; rows become resident, shrink and are retracted; every token is right.

HISPARSE_PD_CHAOS_SECONDS (60 by default) and HISPARSE_PD_CHAOS_SEED say how long, and which requests.
"""

import json
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from benchmarks.passkey import CHECKPOINT
from benchmarks.passkey.text import passage_ids
from hisparse.filling import FillEnd
from tests.e2e.asking import Job, complete
from tests.e2e.chaos_clients import SEED, Prompt
from tests.e2e.cluster import Cluster, wait_until
from tests.e2e.conftest import Reference
from tests.e2e.restless import MODULE
from tests.e2e.spawn import fork
from tests.e2e.test_chaos import suspicious_lines

SECONDS = float(os.environ.get("HISPARSE_PD_CHAOS_SECONDS", "60"))
LENGTHS = (2, 9, 20, 35, 50, 64, 90, 127, 191, 193, 220, 260, 300, 340, 380, 420)
MOST_TOKENS = 160
CONTEXT = 640
HOT = 192
DEVICE_SLOTS = 7 * 128
"""Slabs of 128, of which a hot buffer takes two. Four short requests are admitted, or a long one is resident."""
HOST_SLOTS = 2500
SLOT_BYTES = 4 * 7 * (64 + 32 + 64)
"""Items and index keys of six layers and the draft layer in float32."""
MOST_AT_A_TIME = 20
CLEAR = 1e-3
"""Two tokens whose log probabilities differ by less change places when sums are taken in another order."""
HAPPENS: dict[str, tuple[str, dict[str, str]]] = {
    "filled": ("fills_total", {"end": "resident"}),
    "shrunk": ("shrunk_rows_total", {}),
    "retracted": ("retractions_total", {"pool": "device"}),
}


def prompts_with_answers(url: str, reference: Reference) -> list[Prompt]:
    """What the service says, which is what transformers finds likeliest. Answers end where that is not clear."""
    asked = [passage_ids(random.Random(length), length) for length in LENGTHS]
    prompts = []
    for ids, answer in zip(asked, complete(url, [Job(ids, MOST_TOKENS) for ids in asked], 8), strict=True):
        best = reference.logprobs([*ids, *answer[:-1]])[len(ids) - 1 :].topk(2)
        unclear = (best.values[:, 0] - best.values[:, 1] < CLEAR).tolist()
        exact = answer[: unclear.index(True)] if True in unclear else answer
        assert exact == best.indices[: len(exact), 0].tolist(), f"prompt of {len(ids)} tokens"
        prompts.append(Prompt(ids, exact))
    assert sum(len(prompt.answer) for prompt in prompts) > MOST_TOKENS * len(prompts) / 2
    return prompts


class Visitors:
    """Ask until it is over, in phases that differ in how many ask at a time, and for which prompts.

    Phases are counted in answers, and begin when no more requests than theirs are left, so that they are as different
    on a slow machine. Each answer is compared. prompts: the first half are the short ones.
    """

    def __init__(self, url: str, prompts: Sequence[Prompt], rng: random.Random) -> None:
        self.answers: list[list[int]] = []
        self._url, self._prompts, self._rng = url, prompts, rng

    def run(self, is_over: Callable[[], bool]) -> None:
        """is_over: asked between phases."""
        under_way: set[Future[list[int]]] = set()
        with ThreadPoolExecutor(MOST_AT_A_TIME) as pool:
            for wanted, prompts in self._phases():
                under_way = self._answered(under_way, wanted)
                enough = len(self.answers) + 6 + self._rng.randint(wanted, 2 * wanted)
                while len(self.answers) < enough:
                    under_way |= {pool.submit(self._ask, *self._draw(prompts)) for _ in range(wanted - len(under_way))}
                    under_way = self._answered(under_way, wanted - 1)
                if is_over():
                    break
            self._answered(under_way, 0)

    def _answered(self, under_way: set[Future[list[int]]], most: int) -> set[Future[list[int]]]:
        """Take answers until no more than that are under way. Returns those."""
        while len(under_way) > most:
            done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            self.answers += [one.result() for one in done]
        return under_way

    def _phases(self) -> Iterator[tuple[int, Sequence[Prompt]]]:
        """How many at a time, and what they ask for. First what has rows retracted, filled and shrunk."""
        half = len(self._prompts) // 2
        short, long = self._prompts[:half], self._prompts[half:]
        yield from ((MOST_AT_A_TIME, short), (1, long), (MOST_AT_A_TIME, self._prompts))
        while True:
            yield self._rng.choice((1, 2, 4, 10, MOST_AT_A_TIME)), self._rng.choice((short, long, self._prompts))

    def _draw(self, prompts: Sequence[Prompt]) -> tuple[Prompt, Job]:
        prompt = self._rng.choice(prompts)
        max_tokens = min(self._rng.choice((1, 16, 80, MOST_TOKENS, MOST_TOKENS)), len(prompt.answer))
        leaves = self._rng.random() < 0.25
        return prompt, Job(prompt.ids, max_tokens, self._rng.randrange(max_tokens) if leaves else None)

    def _ask(self, prompt: Prompt, job: Job) -> list[int]:
        [answer] = complete(self._url, [job])
        assert answer == list(prompt.answer[: len(answer)]), f"prompt of {len(prompt.ids)} tokens"
        assert len(answer) == job.max_tokens or job.abort_after is not None
        return answer


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 1000)
def test_rows_grow_shrink_and_are_retracted_and_no_token_is_wrong(tmp_path: Path) -> None:
    with Cluster(CHECKPOINT, tmp_path, MODULE, spawn=fork) as cluster:
        cluster.gateway(served_model_name="tiny")
        prefill = cluster.prefill(context_length=CONTEXT)
        decode = cluster.decode(
            context_length=CONTEXT,
            hisparse_config=json.dumps({"device_buffer_size": HOT, "host_pool_gib": HOST_SLOTS * SLOT_BYTES / 2**30}),
            max_running_requests=MOST_AT_A_TIME,
            max_device_slots=DEVICE_SLOTS,
            debug_verify_swap_in=True,
        )
        cluster.wait_ready()
        visitors = Visitors(cluster.url, prompts_with_answers(cluster.url, Reference(CHECKPOINT)), random.Random(SEED))
        least, most = time.monotonic() + SECONDS, time.monotonic() + SECONDS + 200

        def happened() -> dict[str, float]:
            return {what: decode.metric(name, **labels) for what, (name, labels) in HAPPENS.items()}

        def is_over() -> bool:
            """On a slow machine things take longer to happen."""
            now = time.monotonic()
            return now > least and (all(happened().values()) or now > most)

        print(f"HISPARSE_PD_CHAOS_SEED={SEED} HISPARSE_PD_CHAOS_SECONDS={SECONDS:g}")
        visitors.run(is_over)
        tokens = sum(map(len, visitors.answers))
        ends = {end.value: decode.metric("fills_total", end=end.value) for end in FillEnd}
        dropped = decode.metric("retractions_total", pool="host")
        print(f"{len(visitors.answers)} answers of {tokens} tokens; {happened()}; prefilled again: {dropped}; {ends}")
        assert all(happened().values()), happened()
        assert ends["failed"] == 0
        assert decode.metric("swap_in_violations_total") == 0
        for pool in ("host_slots", "device_slots"):
            decode.wait_unused(pool)
        prefill.wait_unused("prefill_pages")
        states = ("resident", "filling", "buffered")
        wait_until(lambda: not any(decode.metric("hot_slots", state=state) for state in states))
        assert suspicious_lines(cluster) == []
