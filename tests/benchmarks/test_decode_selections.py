"""What the requests of `bench decode` are made to select, and that they decode with all KV in HBM as without."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from base.errors import StartupError
from benchmarks.decode.batch import DecodingBatch
from benchmarks.decode.config import DecodeBench
from benchmarks.decode.in_turns import HISPARSE, WAYS, measure
from benchmarks.decode.selections import NewPositions, PublishedSelections, read_selections
from benchmarks.decode.timing import describe_filling
from benchmarks.decode.workload import GIB, model_of
from benchmarks.stepping import GREEDY, launch, next_tokens
from benchmarks.swap_in.workload import Shape
from hisparse.swap_in import SwapInCounters
from model.config import network_config
from model.roofline import RankModel
from tests.benchmarks.test_decode import CPU, small, small_sizes

K, CONTEXT, BATCH = 32, 600, 3
SHAPE = Shape(K, 2 * K, 1, CONTEXT)


@torch.inference_mode()
def decode(model: RankModel, resident: bool, steps: int) -> tuple[list[list[int]], SwapInCounters]:
    """Tokens of each step that selects as published, and what was swapped in."""
    torch.manual_seed(1)
    config = DecodeBench(context=CONTEXT, device_buffer_size=2 * K, resident=resident)
    decoding, selected = DecodingBatch(config, model, BATCH, CPU), PublishedSelections(SHAPE)
    runner, requests = decoding.runner, decoding.requests
    selected.begin(model.spec.num_index_layers, BATCH, CPU)
    tokens = [[1] * BATCH]
    for _ in range(steps):
        decoding.prepare(selected)
        for request_id, token in zip(requests.ids, tokens[-1], strict=True):
            runner.admit(request_id, [token], [], GREEDY)
        tokens.append(next_tokens(runner, launch(runner, requests.coordinator, requests.ids)))
    decoding.close()
    return tokens, requests.coordinator.counters()


@pytest.mark.parametrize(("count", "context"), [(17, 1000), (16, 96), (1, 80), (0, 16)])
def test_new_positions_that_no_step_can_have_are_refused_before_any_step(count: int, context: int) -> None:
    NewPositions(Shape(16, 48, 64, context=1000), min(count, 16))
    with pytest.raises(StartupError, match=f"^{count} misses of 16 selected positions.* longer than {context}$"):
        NewPositions(Shape(16, 48, 64, context=context), count)


def test_requests_with_all_kv_in_hbm_decode_the_same_and_miss_nothing() -> None:
    model = small(DecodeBench(context=CONTEXT, quantization="none"), "glm_moe_dsa")
    tokens, counters = decode(model, resident=False, steps=20)
    assert counters.misses > 0
    assert decode(model, resident=True, steps=20) == (tokens, SwapInCounters(0, 0, 0, 0))


def test_the_queries_of_a_step_select_as_consecutive_tokens() -> None:
    drafting, plain = PublishedSelections(SHAPE), PublishedSelections(SHAPE)
    for selections in (drafting, plain):
        selections.begin(2, BATCH, CPU)
        selections.settle()
    together, alone = torch.zeros(2, BATCH, 3, K).long(), torch.zeros(2, BATCH, 1, K).long()
    history = 2
    for step in range(history):
        drafting.write(CONTEXT + 3 * step, together)
        plain.write(CONTEXT + 3 * step, alone)
        assert (together == alone).all()
    for step in range(history, history + 3):
        drafting.write(CONTEXT + 3 * step, together)
        for query in range(3):
            plain.write(CONTEXT + 3 * step + query, alone)
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
    for _ in range(60):  # more than are recorded, before buffers settle
        recorded.write(CONTEXT, into)
    recorded.settle()
    recorded.write(CONTEXT, into)
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


@pytest.mark.usefixtures("without_device")
def test_with_device_memory_enough_requests_become_whole() -> None:
    config = DecodeBench(context=CONTEXT, quantization="none", device_buffer_size=2 * K, pools_gib=1)
    model = small(config)
    decoding = DecodingBatch(config, model, BATCH, CPU)
    assert decoding.whole == 0
    timed = decoding.time(PublishedSelections(SHAPE), steps=10)
    assert len(timed.filling_ms) > BATCH
    filling = describe_filling((9, 8, 7, 6, 3, 4, 5))
    assert "took 9.00, 8.00, 7.00, 6.00 ms; 3 others" in filling
    assert filling.endswith("4.00 ms, 99% of them at most 4.98 ms")
    assert (decoding.whole, timed.misses) == (BATCH, 0)
    decoding.close()

    little = replace(config, pools_gib=700 / 2**20)
    with pytest.raises(StartupError, match="3 requests do not fit: "):
        DecodingBatch(little, model, BATCH, CPU)
    with pytest.raises(StartupError, match="all KV of 3 requests takes "):
        DecodingBatch(replace(little, resident=True), model, BATCH, CPU)


@pytest.mark.usefixtures("without_device")
@pytest.mark.parametrize(("drafts", "resident"), [(0, False), (2, False), (2, True)])
def test_a_step_takes_its_tokens_and_drafts(drafts: int, resident: bool) -> None:
    config = DecodeBench(context=CONTEXT, quantization="none", device_buffer_size=2 * K, resident=resident)
    config = replace(config, speculative_num_steps=drafts)
    model = model_of(network_config(small_sizes(num_nextn_predict_layers=1)), config, CPU, drafts=drafts > 0)
    decoding, selected = DecodingBatch(config, model, BATCH, CPU), PublishedSelections(SHAPE)
    timed = decoding.time(selected, steps=10)
    settling = 64 if resident else selected.settle()
    assert decoding.requests.newest == CONTEXT + (settling + 10) * (1 + drafts)
    assert timed.misses / K == pytest.approx(0 if resident else 0.134, abs=0.05)
    decoding.close()


@pytest.mark.usefixtures("without_device")
def test_hisparse_and_all_in_hbm_take_turns_while_both_fit() -> None:
    config = DecodeBench(
        context=CONTEXT, quantization="none", device_buffer_size=2 * K, selections=("published",), pools_gib=1, steps=10
    )
    model = small(config)
    ours, reference = measure(config, model, BATCH, 2, CPU)
    assert (ours.way, reference.way) == WAYS
    assert len(ours.step_ms) == len(reference.step_ms) == 2
    assert (ours.whole, reference.whole, ours.misses, reference.misses) == (BATCH, BATCH, 0, 0)
    needed = DecodingBatch(replace(config, resident=True), model, BATCH, CPU).pool.memory.nbytes
    (alone,) = measure(replace(config, pools_gib=(needed - 1) / GIB), model, BATCH, 2, CPU)
    assert (alone.way, len(alone.step_ms)) == (HISPARSE, 2)
    assert alone.whole < BATCH
    assert alone.misses > 0
