"""`python -m tests.e2e.migration_pause`: how long a stream pauses when its decode node dies or is cut off.

One stream at a time, and nothing else to do. The pause is the longest time between two of its tokens. Each prompt is
new: its time to the first token is that of a prefill of which nothing is cached.
"""

import os
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from benchmarks.machine import this_machine
from model.tiny import write_tiny_checkpoint
from tests.e2e.asking import ids_in, random_prompts, streamed
from tests.e2e.cluster import Cluster
from tests.e2e.decode_faults import Fault, bring_about, two_decode_nodes, undo

ROUNDS = 10
PROMPT_TOKENS = 300
FAULT_AFTER, TOKENS = 10, 60


def measure(cluster: Cluster, fault: Fault | None, prompt: list[int]) -> tuple[float, float]:
    """Seconds to the first token, and the longest time between two tokens."""
    decodes = [cluster.nodes[f"decode-{number}"] for number in range(2)]
    asked, times = time.monotonic(), list[float]()
    with streamed(cluster.url, prompt, TOKENS) as lines:
        for line in lines:
            if not ids_in(line):
                continue
            times.append(time.monotonic())
            if fault is not None and len(times) == FAULT_AFTER:
                node = next(one for one in decodes if one.metric("requests", state="running"))
                bring_about(fault, node, cluster)
    if fault is not None:
        undo(fault, node, cluster)
        cluster.wait_ready(decode=2)
    for node in decodes:
        node.wait_unused("host_slots")
    return times[0] - asked, max(after - before for before, after in pairwise(times))


def main() -> None:
    print(f"{this_machine()}; load {os.getloadavg()[0]:.1f}")
    print(f"{'seconds':<14}{'first token, median':>20}{'pause, median':>16}{'longest':>10}", flush=True)
    prompts = iter(random_prompts([PROMPT_TOKENS] * 3 * ROUNDS, seed=3))
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        write_tiny_checkpoint(model, "deepseek_v32", seed=7, index_topk=64)
        with two_decode_nodes(model, Path(directory)) as cluster:
            for fault in (None, Fault.DIES, Fault.CUT_OFF):
                firsts, pauses = zip(*(measure(cluster, fault, next(prompts)) for _ in range(ROUNDS)), strict=True)
                first, pause = statistics.median(firsts), statistics.median(pauses)
                name = "undisturbed" if fault is None else fault.name
                print(f"{name:<14}{first:>20.2f}{pause:>16.2f}{max(pauses):>10.2f}", flush=True)
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
