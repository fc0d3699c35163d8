"""`hisparse-pd bench serving`: which services are asked what, and what becomes of the figures."""

import asyncio
import sys
from collections.abc import Iterator, Sequence

from rich.console import Console

from benchmarks.disturbance import Disturbance
from benchmarks.machine import this_machine
from benchmarks.passkey import CONTEXT_LENGTH
from benchmarks.serving.config import ServingBench
from benchmarks.serving.conversation import Conversations
from benchmarks.serving.measure import PointResult, measure
from benchmarks.serving.plan import points, slo
from benchmarks.serving.plot import write_png, write_prefix_png
from benchmarks.serving.progress import Bar
from benchmarks.serving.replay import Scale, TraceReplay, read_replay
from benchmarks.serving.report import Report, document, print_report, write_json
from benchmarks.serving.services import (
    Service,
    check_labels,
    context_length,
    local_services,
    remote,
    small_checkpoint,
    vocab_size,
)
from benchmarks.serving.workload import RandomPrompts, TextPrompts, Workload, read_prompts

_ANY_VOCAB = 256
"""Token ids that every model has."""


class NothingAnswered(Exception):
    """A load point without a single answer: there is nothing to report of it."""


def run_serving_bench(config: ServingBench) -> Report:
    """Measure, print the tables, write JSON and PNG.

    Raises StartupError for what cannot be measured, before anything is if that is known by then. Raises after the
    report what ended a later service, and NothingAnswered for a load point that failed as a whole.
    """
    config.check()
    disturbance = Disturbance()
    services, workload = _subjects(config)
    check_labels(services)
    for service in services:
        service.check()
    options = config.options
    if isinstance(workload, TraceReplay) and workload.left_out:
        options = {**options, "left_out": workload.left_out}
        print(f"{config.trace}: {workload.left_out} requests do not fit and are left out", file=sys.stderr)
    results: list[PointResult] = []
    failure: Exception | None = None
    try:
        for of_service in _measure(config, services, workload):
            results += of_service
    except Exception as error:
        if not results:
            raise
        failure = error
    # Services elsewhere cannot be told from other processes.
    others = None if config.base_urls else disturbance.cores()
    report = Report.of(results, slo(config), options, this_machine(), others, config.finds_prefixes)
    print_report(report, Console())
    write_json(config.json, document(report))
    (write_prefix_png if config.finds_prefixes else write_png)(config.png, report)
    print(f"written: {config.json}, {config.png}", file=sys.stderr)
    if failure is not None:
        raise failure
    for point in report.points:
        if not point.summary.answered:
            raise NothingAnswered(f"{point.label} answered no request at {point.load}")
    return report


def _measure(config: ServingBench, services: Sequence[Service], workload: Workload) -> Iterator[list[PointResult]]:
    """The results of each service, as soon as it was measured."""
    loads = points(config, workload.schedule(config.speed) if isinstance(workload, TraceReplay) else None)
    with Bar(len(services) * sum(point.most_requests for point in loads)) as bar:
        for service in services:
            bar.service(service.label)
            with service.running() as endpoint:
                yield asyncio.run(measure(endpoint, workload, loads, config.request_timeout, progress=bar.request_done))


def _subjects(config: ServingBench) -> tuple[list[Service], Workload]:
    """The services to measure, and what to ask all of them."""
    if config.base_urls:
        services = [remote(word, config) for word in config.base_urls]
        return services, _workload(config, RandomPrompts, _ANY_VOCAB, context=None)
    if config.model_path:
        vocab = config.vocab_size or vocab_size(config.model_path)
        workload = _workload(config, RandomPrompts, vocab, context_length(config.model_path))
        return local_services(config.model_path, config), workload
    workload = _workload(config, TextPrompts, _ANY_VOCAB, CONTEXT_LENGTH)
    return local_services(small_checkpoint(workload.longest), config), workload


def _workload(config: ServingBench, kind: type[RandomPrompts], vocab: int, context: int | None) -> Workload:
    """context: tokens of the longest prompt and answer that the services take, if that is known."""
    if config.prompts:
        _, output_tokens = config.lengths
        return read_prompts(config.prompts, output_tokens)
    if config.trace:
        scale = Scale(config.block_tokens, config.max_output, config.max_input, context)
        return read_replay(config.trace, config.limit, scale, config.vocab_size or vocab, config.seed)
    if config.finds_prefixes:
        # Not text: passages of it are few enough to be equal by chance.
        return Conversations(_drawn_prompts(config, RandomPrompts, vocab), config.turns, config.shared_prefix)
    return _drawn_prompts(config, kind, vocab)


def _drawn_prompts(config: ServingBench, kind: type[RandomPrompts], vocab: int) -> RandomPrompts:
    """Random token ids if the flags have a vocabulary to draw them from."""
    kind, vocab = (RandomPrompts, config.vocab_size) if config.vocab_size else (kind, vocab)
    return kind(*config.lengths, range_ratio=config.range_ratio, vocab_size=vocab, seed=config.seed)
