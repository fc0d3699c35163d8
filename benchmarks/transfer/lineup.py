"""Which methods are measured in a case."""

from collections.abc import Collection, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial

from benchmarks.transfer import nixl_agent, wire
from benchmarks.transfer.cases import Case, Fragmentation, Group, Protocol
from benchmarks.transfer.large_writes import CopyThreads, RawEngine, memmove
from benchmarks.transfer.methods import Method, MethodFailed, Posting
from benchmarks.transfer.placement import Placement, coalesced, in_one_piece, per_page, per_token, pieces
from benchmarks.transfer.workbench import Pools, Workbench
from transfer.copy_runs import stream_runs
from transfer.shm import COPY_THREADS


def has_whole_pages(case: Case) -> bool:
    """Whether a page can travel in one piece; otherwise a descriptor per page is one per token."""
    return case.page_size > 1 and Fragmentation.ITEMS not in (case.source, case.destination)


@contextmanager
def methods(bench: Workbench, case: Case, placement: Placement, groups: Collection[Group]) -> Iterator[list[Method]]:
    """All of these groups, without NIXL."""
    pools = bench.pools(case)
    sending = bench.sending(case.protocol)
    ours = sending.method(case, placement, pools.kv, pools.destination)
    with ExitStack() as at_end:
        at_end.callback(ours.close)
        if case.protocol is Protocol.SHM:
            if pools.destination.shared is None:
                raise MethodFailed("the target shares no memory")
            threads = at_end.enter_context(closing(CopyThreads(pools.destination.shared, COPY_THREADS)))
            others = _by_memcpy(case, placement, pools, threads)
        else:
            others = _by_engine(RawEngine(sending.mooncake), case, placement, pools)
        yield [method for method in (ours, *others) if method.group in groups]


@contextmanager
def nixl(bench: Workbench, case: Case, placement: Placement) -> Iterator[list[Method]]:
    """NIXL, with agents on both sides that live as long as this context."""
    pools = bench.pools(case)
    tls = nixl_agent.UCX_TLS[case.protocol]
    agent = nixl_agent.Agent("initiator", tls)
    try:
        agent.register(pools.source)
        agent.connect(bench.link.ask(wire.OpenNixl(ucx_tls=tls), wire.NixlOpened).metadata)
        plan = partial(coalesced, placement, pools.source, pools.target)
        yield [Posting("NIXL over UCX", Group.NIXL, placement, plan, agent.write)]
        # Not after an error: then the whole run ends, and the target with the link.
        agent.disconnect()
        bench.link.ask(wire.CloseNixl(), wire.Done)
    finally:
        agent.close()


def _by_engine(raw: RawEngine, case: Case, placement: Placement, pools: Pools) -> Iterator[Method]:
    """Mooncake with descriptors of each size, in both ways in which it can be called."""
    session = next(s.name for s in pools.destination.sessions if s.transport == case.protocol)
    for how, post in (("polled", raw.submit_and_poll), ("synchronous", raw.call_synchronously)):
        write = partial(post, session)
        plan = partial(per_token, placement, pools.source, pools.target)
        yield Posting(f"per token, {how}", Group.TOKEN, placement, plan, write)
        if has_whole_pages(case):
            plan = partial(per_page, placement, case.page_size, pools.source, pools.target)
            yield Posting(f"per page, {how}", Group.PAGE, placement, plan, write)
        plan = partial(pieces, case.concurrency * case.tokens, pools.source, pools.target)
        yield Posting(f"1 MiB, {how}", Group.LARGE, in_one_piece(case), plan, write)


def _by_memcpy(case: Case, placement: Placement, pools: Pools, threads: CopyThreads) -> Iterator[Method]:
    """Copies of each size by as many threads as this project uses."""
    plan = partial(per_token, placement, pools.source, pools.target)
    yield Posting("copy per token", Group.TOKEN, placement, plan, partial(threads.copy, how=stream_runs))
    if has_whole_pages(case):
        plan = partial(per_page, placement, case.page_size, pools.source, pools.target)
        yield Posting("copy per page", Group.PAGE, placement, plan, partial(threads.copy, how=stream_runs))
    plan = partial(pieces, case.concurrency * case.tokens, pools.source, pools.target)
    name = f"memcpy, {COPY_THREADS} threads"
    yield Posting(name, Group.LARGE, in_one_piece(case), plan, partial(threads.copy, how=memmove))
