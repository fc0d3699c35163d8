"""Both ways of admission that are compared bring the same request to its next token."""

import torch

from benchmarks.admission import AdmissionBench, Staging
from benchmarks.decode_step.workload import Requests, Shape, build_network, model_spec
from engine.decoding import EagerDecoding
from model.backends.choice import choose_backend
from model.sparse_model import SparseModel

SMALL = Shape(
    layers=2,
    hidden=64,
    heads=2,
    q_rank=32,
    latent_dim=32,
    rope_dim=16,
    nope_dim=16,
    value_dim=16,
    index_heads=16,
    index_dim=32,
    top_k=32,
    intermediate=64,
    vocab=64,
    context=300,
    max_steps=8,
)
CPU = torch.device("cpu")


def test_staging_brings_the_pages_to_the_host_and_then_admits_as_directly() -> None:
    requests = Requests(SMALL, 1, 2 * SMALL.top_k, CPU)
    spec = model_spec(SMALL)
    model = SparseModel(build_network(SMALL, CPU), spec, choose_backend("auto", CPU, spec))
    bench = AdmissionBench(requests, SMALL, EagerDecoding(model, requests.coordinator), rounds=3)

    direct, staged = bench.direct(), bench.staged()

    assert (direct.way, staged.way) == ("direct", "staged")
    for result in (direct, staged):
        assert 0 < result.first_step_ms < result.total_ms
    assert requests.coordinator.num_tokens(requests.ids[0]) == SMALL.context + 1
    requests.close()


def test_what_was_staged_is_what_the_pages_held() -> None:
    requests = Requests(SMALL, 1, 2 * SMALL.top_k, CPU)
    coordinator, request_id = requests.coordinator, requests.ids[0]
    staging = Staging(coordinator, SMALL)
    slots = coordinator.retract_request(request_id)

    staging.copy(request_id, slots, SMALL.context)

    on_host = torch.from_numpy(slots.slots()[: SMALL.context])
    for pool, pages in (
        (coordinator.host.kv, staging.staged.kv_rows),
        (coordinator.host.index_keys, staging.staged.index_rows),
    ):
        for layer, rows in zip(pool, pages, strict=True):
            assert torch.equal(layer[on_host], rows[staging.staged.rows])
    assert coordinator.admit_request_direct(request_id, slots, SMALL.context)
    requests.close()
