"""An independent look at every byte: what the prefill computed, what landed, and what requests have and leave.

Each process writes down digests of its pools' rows in the order of positions, without the transfer's own code.

What landed must be what that attempt's prefill node had. What a request has, cached or not, must be what some node
computed for the same tokens: each whole block of 64 positions goes by the tokens up to its end.
"""

import hashlib
import json
import os
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from base.block_hashes import BLOCK_TOKENS

if TYPE_CHECKING:
    from kvcache.paged_pool import PagedKVPool
    from prefill_node.attempt import HeldAttempt


STAGES = ("fetched", "computed", "sent", "landed", "begun", "left")


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


Pool = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]
"""KV items and index keys, layer by layer, the draft layer's last."""


def blocks(pool: Pool, rows: Sequence[int], tokens: Sequence[int], start: int) -> dict[str, str]:
    """Of each whole block that ends after position `start`: what tokens end with it, and the digest of its rows.

    rows, tokens: of all positions. The draft layer's last row of a block depends on the next token: it is left out.
    """
    main = [layer for layers in pool for layer in layers[:-1]]
    draft = [layers[-1] for layers in pool]
    found = {}
    for end in range((start // BLOCK_TOKENS + 1) * BLOCK_TOKENS, len(rows) + 1, BLOCK_TOKENS):
        spelled = hashlib.blake2b(repr(list(tokens[:end])).encode(), digest_size=8).hexdigest()
        block = rows[end - BLOCK_TOKENS : end]
        found[spelled] = "".join(digests(main, block) + digests(draft, block[:-1]))
    return found


def watch_prefill(journal: Journal) -> None:
    """Note what a prefill node fetches, what each step computes, and what it had of an attempt when all was sent.

    The blocks that a step computes are cached even if their attempt is aborted. Then other attempts send them.
    """
    from control.messages import PrefillDone
    from engine.chunked import ChunkedPrefill, PrefillStep
    from prefill_node.attempt import HeldAttempt
    from prefill_node.planner import PrefillPlanner

    advance, mark_cached, complete = PrefillPlanner._advance, ChunkedPrefill.mark_cached, ChunkedPrefill.complete

    def noting_cached(prefill: ChunkedPrefill[HeldAttempt], job: HeldAttempt, stop: int) -> None:
        mark_cached(prefill, job, stop)
        has = _blocks_of(prefill.pool, job, 0, stop)
        journal.append({"stage": "fetched", "attempt": job.id, "num_tokens": stop, "has": has})

    def noting_complete(
        prefill: ChunkedPrefill[HeldAttempt], step: PrefillStep[HeldAttempt], without: Set[HeldAttempt] = frozenset()
    ) -> None:
        complete(prefill, step, without)
        for job, chunk in step.chunks:
            if job not in without:
                new = _blocks_of(prefill.pool, job, chunk.start, chunk.stop)
                journal.append({"stage": "computed", "attempt": job.id, "num_tokens": chunk.stop, "blocks": new})

    def noting_advance(planner: PrefillPlanner, job: HeldAttempt) -> None:
        told = len(planner._updates)
        advance(planner, job)
        if not any(isinstance(update, PrefillDone) for update in planner._updates[told:]):
            return
        pool, stop = planner._prefill.pool, job.num_tokens
        sent = digests([*pool.kv, *pool.index_keys], _rows_of(pool, job, stop)[job.start :])
        line = {"stage": "sent", "attempt": job.id, "num_tokens": stop, "digests": sent}
        journal.append({**line, "has": _blocks_of(pool, job, 0, stop)})

    PrefillPlanner._advance = noting_advance  # type: ignore[method-assign]
    ChunkedPrefill.mark_cached = noting_cached  # type: ignore[assignment,method-assign]
    ChunkedPrefill.complete = noting_complete  # type: ignore[assignment,method-assign]


def _rows_of(pool: "PagedKVPool", job: "HeldAttempt", stop: int) -> list[int]:
    assert job.pages is not None
    size = pool.page_size
    return [int(job.pages[position // size]) * size + position % size for position in range(stop)]


def _blocks_of(pool: "PagedKVPool", job: "HeldAttempt", start: int, stop: int) -> dict[str, str]:
    tokens = job.token_ids.tolist()[:stop]
    return blocks((list(pool.kv), list(pool.index_keys)), _rows_of(pool, job, stop), tokens, start)


def watch_decode(journal: Journal) -> None:
    """Note what of a prompt has landed, and what a request has then and when it gives its slots back."""
    from control.messages import PrefillDone
    from decode_node.attempt import PrefillAttempt
    from decode_node.remote_prefill import RemotePrefill
    from decode_node.request import Request, RequestState
    from decode_node.slots import SlotManager
    from hisparse.coordinator import HiSparseCoordinator
    from hisparse.swap_in import SwapInBackend
    from kvcache.extents import HostSlots
    from kvcache.host_pool import HostKVPool

    pools: list[HostKVPool] = []
    had: dict[str, int] = {}
    """How many tokens of a request had KV when it was about to run: it computes what follows itself."""
    begin, land = HiSparseCoordinator.__init__, RemotePrefill._land
    landed, release = SlotManager.landed, SlotManager.release

    def buffers() -> Pool:
        [pool] = pools
        return list(pool.kv), list(pool.index_keys)

    def note(stage: str, request: Request, slots: HostSlots) -> None:
        rows = slots.slots()[: request.kv_tokens].tolist()
        attempt = (request.request_id, request.epoch)
        own = had.setdefault(request.request_id, request.kv_tokens)
        has = blocks(buffers(), rows, request.tokens, 0)
        computed = dict(list(has.items())[own // BLOCK_TOKENS :])
        line = {"stage": stage, "attempt": attempt, "num_tokens": len(rows), "has": has, "blocks": computed}
        journal.append(line)

    def remembering_begin(coordinator: HiSparseCoordinator, backend: SwapInBackend, *args: Any, **kwargs: Any) -> None:
        pools.append(backend.host)
        begin(coordinator, backend, *args, **kwargs)

    def noting_land(remote: RemotePrefill, attempt: PrefillAttempt, done: PrefillDone) -> None:
        new = attempt.slots.slots()[: attempt.num_tokens - len(attempt.prefix)].tolist()
        line = {"stage": "landed", "attempt": attempt.id, "num_tokens": done.num_tokens}
        journal.append({**line, "digests": digests([*chain(*buffers())], new)})
        land(remote, attempt, done)

    def noting_landed(manager: SlotManager, request: Request, cached_tokens: int) -> None:
        had[request.request_id] = request.kv_tokens
        assert request.host_slots is not None
        note("begun", request, request.host_slots)
        landed(manager, request, cached_tokens)

    def noting_release(manager: SlotManager, request: Request, keep: bool = True) -> None:
        if request.state is RequestState.RUNNING:
            note("left", request, manager._coordinator._running[request.request_id].host_slots)
        elif request.state in (RequestState.LANDED, RequestState.RETRACTED):
            assert request.host_slots is not None
            note("left", request, request.host_slots)
        release(manager, request, keep)

    HiSparseCoordinator.__init__ = remembering_begin  # type: ignore[assignment,method-assign]
    RemotePrefill._land = noting_land  # type: ignore[method-assign]
    SlotManager.landed = noting_landed  # type: ignore[method-assign]
    SlotManager.release = noting_release  # type: ignore[method-assign]


@dataclass
class Audit:
    """What the journal says: how many prompts were seen at each stage, and those that are not what was computed.

    blocks: how many whole blocks requests had.
    """

    seen: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STAGES, 0))
    wrong: list[str] = field(default_factory=list)
    blocks: int = 0

    @staticmethod
    def of(directory: str | Path) -> "Audit":
        lines = read_journal(audit_path(directory))
        audit = Audit()
        attempts = {tuple(line["attempt"]): line for line in lines if line["stage"] == "sent"}
        computed: dict[str, set[str]] = {}
        for line in lines:
            for spelled, digest in line.get("blocks", {}).items():
                computed.setdefault(spelled, set()).add(digest)
        for line in lines:
            audit.seen[line["stage"]] += 1
            what = f"{line['stage']} {line['attempt']} of {line['num_tokens']} tokens"
            if line["stage"] == "landed":
                audit._compare(what, line, attempts.get(tuple(line["attempt"])))
            for number, (spelled, digest) in enumerate(line.get("has", {}).items()):
                audit.blocks += 1
                if digest not in computed.get(spelled, ()):
                    audit.wrong.append(f"{what}: nobody computed block {number}")
        return audit

    def _compare(self, what: str, line: dict[str, Any], origin: dict[str, Any] | None) -> None:
        """What landed with what its prefill node had."""
        if origin is None:
            self.wrong.append(f"{what}: nobody computed it")
        elif line["num_tokens"] != origin["num_tokens"]:
            self.wrong.append(f"{what}: computed for {origin['num_tokens']}")
        elif different := [
            buffer
            for buffer, (here, there) in enumerate(zip(line["digests"], origin["digests"], strict=True))
            if here != there
        ]:
            self.wrong.append(f"{what}: buffers {different} are not what was computed")
