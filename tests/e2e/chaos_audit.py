"""An independent look at every byte: what the prefill computed, what landed, and what was left at the end.

Each process writes down BLAKE2b digests of KV in the order of positions. They share nothing with what is audited: not
the transfer's checksums, nor its runs and gathering, but pool tensors that are indexed position by position.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


class Journal:
    """A file of JSON lines to which many processes append; a line is there entirely or not at all."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def append(self, line: dict[str, Any]) -> None:
        os.write(self._file, json.dumps(line).encode() + b"\n")


def read_journal(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def audit_path(directory: str | Path) -> Path:
    return Path(directory) / "audit.jsonl"


def digests(layers: Sequence[torch.Tensor], rows: Sequence[int]) -> list[str]:
    """Of each layer's rows, in their order: tensors [rows, dim]."""
    wanted = torch.as_tensor(rows)
    return [
        hashlib.blake2b(layer[wanted].contiguous().view(torch.uint8).numpy().tobytes(), digest_size=16).hexdigest()
        for layer in layers
    ]


def watch_prefill(journal: Journal) -> None:
    """Note what a prefill node computed, whenever it is about to say that all of an attempt was sent."""
    from control.messages import PrefillDone
    from prefill_node.job import TransferJob
    from prefill_node.model_engine import ModelEngine

    advance = ModelEngine._advance

    def noting_advance(engine: ModelEngine, job: TransferJob) -> None:
        told = len(engine._updates)
        advance(engine, job)
        if not any(isinstance(update, PrefillDone) for update in engine._updates[told:]):
            return
        pool, pages = engine._prefill.pool, job.pages
        assert pages is not None
        size = pool.page_size
        rows = [int(pages[position // size]) * size + position % size for position in range(job.num_tokens)]
        journal.append(
            {
                "stage": "computed",
                "attempt": job.attempt,
                "num_tokens": job.num_tokens,
                "digests": digests([*pool.kv, *pool.index_keys], rows),
            }
        )

    ModelEngine._advance = noting_advance  # type: ignore[method-assign]


def watch_decode(journal: Journal) -> None:
    """Note what a decode node has of a prompt when it has landed, and when the request gives its slots back."""
    from control.messages import AttemptId, PrefillDone
    from decode_node.attempt import PrefillAttempt
    from decode_node.remote_prefill import RemotePrefill
    from decode_node.request import Request, RequestState
    from decode_node.slots import SlotManager
    from hisparse.coordinator import HiSparseCoordinator
    from hisparse.extents import HostSlots
    from hisparse.host_pool import HostKVPool
    from hisparse.swap_in import SwapInBackend

    pools: list[HostKVPool] = []
    landed: dict[str, tuple[AttemptId, int]] = {}
    """The attempt that filled each request's slots, and for how many tokens."""
    begin, land, release = HiSparseCoordinator.__init__, RemotePrefill._land, SlotManager.release

    def note(stage: str, request_id: str, slots: HostSlots) -> None:
        if request_id not in landed:
            return  # a prompt of one token: nothing was prefilled
        attempt, count = landed[request_id]
        [pool] = pools
        held = digests([*pool.kv, *pool.index_keys], slots.slots()[:count].tolist())
        journal.append({"stage": stage, "attempt": attempt, "num_tokens": count, "digests": held})

    def remembering_begin(coordinator: HiSparseCoordinator, backend: SwapInBackend, *args: Any, **kwargs: Any) -> None:
        pools.append(backend.host)
        begin(coordinator, backend, *args, **kwargs)

    def noting_land(remote: RemotePrefill, attempt: PrefillAttempt, done: PrefillDone) -> None:
        landed[attempt.id.request_id] = attempt.id, done.num_tokens
        note("landed", attempt.id.request_id, attempt.slots)
        land(remote, attempt, done)

    def noting_release(manager: SlotManager, request: Request) -> None:
        if request.state is RequestState.RUNNING:
            note("left", request.request_id, manager._coordinator._running[request.request_id].host_slots)
        elif request.state in (RequestState.LANDED, RequestState.RETRACTED):
            assert request.host_slots is not None
            note("left", request.request_id, request.host_slots)
        release(manager, request)

    HiSparseCoordinator.__init__ = remembering_begin  # type: ignore[assignment,method-assign]
    RemotePrefill._land = noting_land  # type: ignore[method-assign]
    SlotManager.release = noting_release  # type: ignore[method-assign]


@dataclass
class Audit:
    """What the journal says: how many prompts were seen at each stage, and those that are not what was computed."""

    seen: dict[str, int] = field(default_factory=lambda: {"computed": 0, "landed": 0, "left": 0})
    wrong: list[str] = field(default_factory=list)

    @staticmethod
    def of(directory: str | Path) -> "Audit":
        lines = read_journal(audit_path(directory))
        audit = Audit()
        computed = {tuple(line["attempt"]): line for line in lines if line["stage"] == "computed"}
        for line in lines:
            audit.seen[line["stage"]] += 1
            origin = computed.get(tuple(line["attempt"]))
            what = f"{line['stage']} {line['attempt']} of {line['num_tokens']} tokens"
            if origin is None:
                audit.wrong.append(f"{what}: nobody computed it")
            elif line["num_tokens"] != origin["num_tokens"]:
                audit.wrong.append(f"{what}: computed for {origin['num_tokens']}")
            elif different := [
                buffer
                for buffer, (here, there) in enumerate(zip(line["digests"], origin["digests"], strict=True))
                if here != there
            ]:
                audit.wrong.append(f"{what}: buffers {different} are not what was computed")
        return audit
