"""The top-k kernel's own source, run on the CPU, selects what sorting selects."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import top_k
from kernels.specialization import Specialization
from kernels.top_k import TopK, TopKSpecialization, launch_params
from tests.csrc.emulator import COMPILER, EmulatedKernel
from tests.kernels.sorted_top import sorted_top

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

KEPT = 128
NAN = float("nan")
EXTREMES = [float("inf"), float("-inf"), 3.4e38, -3.4e38, 1e-45, -1e-45, 0.0, -0.0, NAN]


def emulated_top(
    scores: torch.Tensor, k: int, lengths: torch.Tensor | None, cluster: int, block_size: int = 32, kept: int = KEPT
) -> torch.Tensor:
    specialization = TopKSpecialization(kept, block_size, max_cluster=16, blocks_per_processor=1)
    positions = torch.full((len(scores), k), -9)
    params = launch_params(scores, lengths, positions, kept)
    EmulatedKernel(specialization).launch(params, (len(scores) * cluster, 1, 1), cluster)
    return positions


@st.composite
def many_ties(draw: st.DrawFn) -> tuple[torch.Tensor, int, torch.Tensor | None]:
    """Scores [rows, width], k and perhaps lengths, some out of range."""
    rows, width = draw(st.integers(1, 3)), draw(st.integers(1, 700))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(["few values", "close", "normal", "bits", "equal"]))
    values = {
        "few values": lambda: generator.choice([*EXTREMES, 1.0, 2.0, -1.0], (rows, width)),
        "close": lambda: 100 + generator.integers(0, 40, (rows, width)) * 2.0**-17,
        "normal": lambda: generator.normal(size=(rows, width)),
        "bits": lambda: generator.integers(0, 2**32, (rows, width), dtype=np.uint32).view(np.float32),
        "equal": lambda: np.full((rows, width), draw(st.sampled_from(EXTREMES))),
    }[kind]()
    scores = torch.from_numpy(np.where(np.isnan(values), NAN, values).astype(np.float32))
    lengths = draw(st.none() | st.lists(st.integers(-1, width + 2), min_size=rows, max_size=rows))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    return scores, draw(st.integers(1, width)), None if lengths is None else torch.tensor(lengths, dtype=dtype)


@settings(max_examples=100)
@given(given_scores=many_ties(), cluster=st.sampled_from([1, 2, 4]))
def test_it_selects_as_a_stable_sort(given_scores: tuple[torch.Tensor, int, torch.Tensor | None], cluster: int) -> None:
    scores, k, lengths = given_scores
    selected = emulated_top(scores, k, lengths, cluster)
    assert torch.equal(selected, sorted_top(scores, k, lengths))


@pytest.mark.parametrize(("cluster", "block_size", "kept"), [(1, 64, 32), (2, 128, 1024), (8, 64, 256), (16, 32, 64)])
@pytest.mark.parametrize(("width", "k"), [(3001, 512), (6000, 4001), (2500, 1)])
def test_wide_rows(width: int, k: int, cluster: int, block_size: int, kept: int) -> None:
    """Of which a block writes several rounds, and keeps all or some."""
    scores = torch.randn(2, width, generator=torch.Generator().manual_seed(width))
    scores[1] = scores[1].relu().mul(4).round()
    lengths = torch.tensor([width, width - 77])
    selected = emulated_top(scores, k, lengths, cluster, block_size, kept)
    assert torch.equal(selected, sorted_top(scores, k, lengths))


def test_what_lies_behind_a_row_is_not_selected_and_rows_may_be_apart() -> None:
    memory = torch.full((3, 400), float("inf"))
    scores = memory[:, 100:300]
    scores[:] = torch.randn(3, 200, generator=torch.Generator().manual_seed(0))
    scores[0, 150:] = NAN
    lengths = torch.tensor([150, 200, 7])
    assert torch.equal(emulated_top(scores, 60, lengths, cluster=2), sorted_top(scores, 60, lengths))


def test_nan_of_the_other_sign_comes_to_an_end_with_positions_in_range() -> None:
    """A CPU keeps a NaN's sign in sums, a GPU does not; the kernel must not depend on it."""
    scores = torch.tensor([[-NAN, 1.0, NAN, -1.0] * 40])
    selected = emulated_top(scores, 50, None, cluster=2)[0]
    assert (selected.diff() > 0).all()
    assert ((selected >= 0) & (selected < 160)).all()


class EmulatedDevice(EmulatedKernel):
    """A kernel on a device of two processors, which form a cluster."""

    def __init__(self, specialization: Specialization, _: torch.device) -> None:
        super().__init__(specialization)

    def cluster_sizes(self) -> dict[int, int]:
        return {2: 1}


@pytest.mark.parametrize(
    ("rows", "width", "length_type"), [(1, 9000, None), (2, 700, torch.int32), (4, 5000, torch.int64)]
)
def test_the_launcher_runs_both_kernels(
    rows: int, width: int, length_type: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(multi_processor_count=2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(top_k, "shared_memory_limit", lambda _: 101376)
    monkeypatch.setattr(top_k, "DeviceKernel", EmulatedDevice)
    scores = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows))
    lengths = None if length_type is None else torch.arange(width - rows, width, dtype=length_type)
    positions = torch.full((rows, 300), -9)
    TopK(torch.device("cpu")).launch(scores, lengths, positions)
    assert torch.equal(positions, sorted_top(scores, 300, lengths))
