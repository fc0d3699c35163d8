"""The trained model on a CUDA device finds pass keys in long texts: what is right does not come from the system."""

import asyncio
import json
from pathlib import Path

import pytest

from benchmarks.passkey import CHECKPOINT
from benchmarks.passkey.exam import examine, questions
from benchmarks.serving.client import Endpoint
from tests.e2e.cluster import Cluster

DEVICE = "cuda"
COUNT = 12


@pytest.mark.parametrize(("dtype", "wrong"), [("float32", 0), ("bfloat16", 1)])
def test_pass_keys_are_found_through_a_small_hot_buffer(dtype: str, wrong: int, tmp_path: Path) -> None:
    with Cluster(CHECKPOINT, tmp_path) as cluster:
        cluster.gateway(served_model_name="passkey")
        cluster.prefill(device=DEVICE, dtype=dtype)
        hisparse = json.dumps({"device_buffer_size": 128, "host_pool_gib": 1, "resident_rows": False})
        decode = cluster.decode(device=DEVICE, dtype=dtype, hisparse_config=hisparse, max_running_requests=COUNT)
        cluster.wait_ready()
        endpoint = Endpoint("", cluster.url, "passkey")
        asked = questions([4096], COUNT, seed=1)
        marked = asyncio.run(examine(endpoint, asked, COUNT, timeout=120, progress=lambda: None))
        assert [one for one in marked if not one.is_right][wrong:] == []
        assert decode.metric("swap_in_misses_total") > 0
        assert decode.metric("swap_in_violations_total") == 0
