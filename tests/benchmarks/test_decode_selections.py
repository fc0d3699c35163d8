"""What the requests of `bench decode` are made to select, and that they decode with all KV in HBM as without."""

from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from base.errors import StartupError
from benchmarks.decode import timing
from benchmarks.decode.bench import _select
from benchmarks.decode.config import DecodeBench
from benchmarks.decode.selections import PublishedSelections, read_selections
from benchmarks.decode.timing import PROFILED_STEPS, time_steps
from benchmarks.decode.workload import GivenSelection, Requests, model_of
from benchmarks.stepping import GREEDY, launch, next_tokens
from benchmarks.swap_in.workload import Shape
from engine.draft_policy import DraftPolicy
from engine.runner import ModelRunner
from hisparse.swap_in import SwapInCounters
from model.config import network_config
from model.loader import choose_backend
from model.roofline import RankModel
from model.sparse_model import SparseModel
from tests.benchmarks.test_decode import CPU, small, small_sizes

K, CONTEXT, BATCH = 32, 600, 3
SHAPE = Shape(K, 2 * K, 1, CONTEXT)


@torch.inference_mode()
def decode(model: RankModel, hot_size: int | None, steps: int) -> tuple[list[list[int]], SwapInCounters]:
    """Tokens of each step that selects as published, and what was swapped in."""
    torch.manual_seed(1)
    spec, selected = model.spec, PublishedSelections(SHAPE)
    requests = Requests(spec, CONTEXT, BATCH, hot_size, CPU)
    given = GivenSelection(choose_backend("auto", CPU, spec), spec, requests)
    network = SparseModel(model.network, spec, given)
    runner = ModelRunner(network, requests.coordinator, BATCH, spec.context_length, record=False)
    requests.restart()
    selected.begin(spec.num_index_layers, BATCH, CPU)
    tokens = [[1] * BATCH]
    for step in range(steps):
        requests.make_room()
        _select(selected, requests, given.positions, hot_size is None, step)
        for request_id, token in zip(requests.ids, tokens[-1], strict=True):
            runner.admit(request_id, [token], [], GREEDY)
        tokens.append(next_tokens(runner, launch(runner, requests.coordinator, requests.ids)))
    requests.close()
    return tokens, requests.coordinator.counters()


def test_requests_with_all_kv_in_hbm_decode_the_same_and_miss_nothing() -> None:
    model = small(DecodeBench(context=CONTEXT, quantization="none"), "glm_moe_dsa")
    tokens, counters = decode(model, 2 * K, steps=20)
    assert counters.misses > 0
    assert decode(model, None, steps=20) == (tokens, SwapInCounters(0, 0, 0, 0))


def test_the_queries_of_a_step_select_as_consecutive_tokens() -> None:
    drafting, plain = PublishedSelections(SHAPE), PublishedSelections(SHAPE)
    warm_up = drafting.begin(2, BATCH, CPU)
    assert plain.begin(2, BATCH, CPU) == warm_up
    together, alone = torch.zeros(2, BATCH, 3, K).long(), torch.zeros(2, BATCH, 1, K).long()
    history = 2
    for step in range(history):
        drafting.write(step, CONTEXT + 3 * step, together)
        plain.write(step, CONTEXT + 3 * step, alone)
        assert (together == alone).all()
    for step in range(history, history + 3):
        drafting.write(step, CONTEXT + 3 * step, together)
        for query in range(3):
            plain.write(step, CONTEXT + 3 * step + query, alone)
            assert torch.equal(together[:, :, query], alone[:, :, 0])
    assert not torch.equal(together[0], together[1]), "each index layer has sequences of its own"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Of 100 tokens that select 8 positions each, the last of 150."""
    path = tmp_path / "traces" / "layer-0.npz"
    path.parent.mkdir()
    positions = np.random.default_rng(0).permuted(np.tile(np.arange(50), (100, 1)), axis=1)[:, :8]
    np.savez_compressed(path, positions=positions, first=50)
    return path


def test_recorded_selections_are_played_from_different_steps(trace: Path) -> None:
    recorded = read_selections(f"recorded:{trace}", SHAPE, num_steps=5, queries=2)
    assert recorded.name == "traces/layer-0"
    recorded.begin(2, BATCH, CPU)
    into = torch.zeros(2, BATCH, 2, K).long()
    recorded.write(3, CONTEXT, into)
    positions = np.load(trace)["positions"]
    starts = set()
    for selection in into.flatten(0, 1):
        at = [int((positions == query[: K // 4 * 4 : 4].numpy()).all(1).argmax()) for query in selection]
        assert at[1] == at[0] + 1, "queries are consecutive tokens"
        for step, query in zip(at, selection, strict=True):
            expected = {position + 150 * place for position in positions[step].tolist() for place in range(4)}
            assert set(query.tolist()) == expected
        starts.add(at[0])
    assert len(starts) > 1


@pytest.mark.parametrize(
    ("shape", "num_steps", "word", "message"),
    [
        (SHAPE, 61, "recorded:{}", "at least 101 tokens"),
        (Shape(K, 2 * K, 1, 599), 5, "recorded:{}", "--context of at least 600"),
        (Shape(12, 24, 1, CONTEXT), 5, "recorded:{}", "a divisor of 12 in"),
        (SHAPE, 5, "recorded:{}.not", "No such file"),
        (Shape(K, 2 * K, 1, 8 * K - 1), 5, "published", "need 256 tokens, found 255"),
        (SHAPE, 5, "random", "expected published or recorded:FILE"),
    ],
)
def test_what_cannot_be_selected_is_refused(shape: Shape, num_steps: int, word: str, message: str, trace: Path) -> None:
    with pytest.raises(StartupError, match=message):
        read_selections(word.format(trace), shape, num_steps, queries=1)


@pytest.fixture
def without_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(timing, "profile", MagicMock())


@pytest.mark.usefixtures("without_device")
def test_with_device_memory_enough_requests_become_whole() -> None:
    config = DecodeBench(context=CONTEXT, quantization="none")
    model = small(config)
    spec = model.spec
    requests = Requests(spec, CONTEXT, BATCH, 2 * K, CPU, pool_bytes=2**30)
    pool = requests.coordinator.device
    assert pool.resident_rows == 0
    selected = PublishedSelections(SHAPE)
    warm_up = selected.begin(spec.num_index_layers, BATCH, CPU)
    given = GivenSelection(choose_backend("auto", CPU, spec), spec, requests)
    network = SparseModel(model.network, spec, given)
    runner = ModelRunner(network, requests.coordinator, BATCH, spec.context_length, record=False)
    select = partial(_select, selected, requests, given.positions, False)
    timed = time_steps(requests, runner, spec.vocab_size, select, warm_up, steps=10)
    assert len(timed.filling_ms) > BATCH
    assert (pool.resident_rows, timed.misses) == (BATCH, 0)
    requests.close()

    with pytest.raises(StartupError, match="3 requests do not fit: "):
        Requests(spec, CONTEXT, BATCH, 2 * K, CPU, pool_bytes=700 << 10)


@pytest.mark.usefixtures("without_device")
@pytest.mark.parametrize(("drafts", "resident"), [(0, False), (2, False), (2, True)])
def test_a_step_takes_its_tokens_and_drafts(drafts: int, resident: bool) -> None:
    config = DecodeBench(context=CONTEXT, quantization="none", speculative_num_steps=drafts)
    model = model_of(network_config(small_sizes(num_nextn_predict_layers=1)), config, CPU, drafts=drafts > 0)
    spec, selected = model.spec, PublishedSelections(SHAPE)
    requests = Requests(spec, CONTEXT, BATCH, None if resident else 2 * K, CPU, drafts)
    given = GivenSelection(choose_backend("auto", CPU, spec), spec, requests, 1 + drafts)
    network = SparseModel(model.network, spec, given)
    runner = ModelRunner(
        network, requests.coordinator, BATCH, spec.context_length, record=False, policy=DraftPolicy(drafts)
    )
    warm_up, steps = selected.begin(spec.num_index_layers, BATCH, CPU), 10
    select = partial(_select, selected, requests, given.positions, resident)
    timed = time_steps(requests, runner, spec.vocab_size, select, warm_up, steps)
    assert requests.newest == CONTEXT + (warm_up + steps + PROFILED_STEPS) * (1 + drafts)
    assert timed.misses / K == pytest.approx(0 if resident else 0.134, abs=0.05)
    requests.close()
