"""One rank of `test_ranks`: layers of experts that are divided among ranks, beside the same layers whole."""

import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from cli.serve import die_with_parent
from kernels.operands import RmsNorm
from model.config import DTYPES
from model.feed_forward import MixtureOfExperts
from model.loader import load_model
from ranks.group import RankGroup
from ranks.place import RankPlace, create_places
from service.node_model import use_device

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Of the norm of the difference, relative: in bfloat16 two partial sums are rounded, and then their sum."""
COUNTS = (1, 5, 16)


def main(place: RankPlace, path: Path, dtype: torch.dtype, kind: str) -> None:
    """kind: of device. On processors, ranks talk by gloo."""
    device = use_device("cpu" if kind == "cpu" else f"cuda:{place.rank}")
    group = RankGroup(place, device, 60.0, lambda: None)
    exchange = group.connect()
    whole = load_model(path, dtype, device)
    part = load_model(path, dtype, device, shard=group.shard, exchange=exchange)
    checked = 0
    for theirs, ours in zip(whole.network.layers, part.network.layers, strict=True):
        if isinstance(ours.mlp, MixtureOfExperts) and isinstance(theirs.mlp, MixtureOfExperts):
            check(group, theirs.mlp, ours.mlp, ours.mlp_norm, dtype)
            checked += 1
    assert checked, "no layer has experts"
    while not group.done():
        time.sleep(0.01)
    group.close()


@torch.inference_mode()
def check(group: RankGroup, whole: MixtureOfExperts, part: MixtureOfExperts, norm: RmsNorm, dtype: torch.dtype) -> None:
    """Eager and, on a GPU, replayed; a rank may replay another graph of the same batch than the others."""
    hidden_size = whole.router.weight.shape[1]
    for count in COUNTS:
        static = torch.zeros(count, hidden_size, dtype=dtype, device=group.device)
        part.forward_normed(norm, static, None)
        graphs = []
        if group.device.type == "cuda":
            torch.cuda.synchronize()
            for _ in range(2):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    _, output = part.forward_normed(norm, static, None)
                graphs.append((graph, output))
        for seed in range(6):
            generator = torch.Generator().manual_seed(100 * seed + group.rank)
            hidden = torch.randn(count, hidden_size, generator=generator).to(group.device, dtype)
            expected = whole.forward_normed(norm, hidden, None)[1].double()
            static.copy_(hidden)
            results = [part.forward_normed(norm, static, None)[1]]
            if graphs:
                graph, output = graphs[(seed + group.rank) % 2]
                output.fill_(float("nan"))
                graph.replay()
                results.append(output)
            for result in results:
                error = float((result.double() - expected).norm() / expected.norm())
                assert error < TOLERANCE[dtype], f"{count} tokens, rank {group.rank}, seed {seed}: {error}"


def run_ranks(size: int, checkpoint: Path, dtype: str, kind: str = "cuda") -> None:
    """Run the program as the ranks of a group, each a process of its own. Raises AssertionError with what they said.

    kind: of device.
    """
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.ranks_program", str(checkpoint), dtype, kind],
            env={**os.environ, **place.variables()},
            pass_fds=place.descriptors,
            preexec_fn=die_with_parent,
            stderr=subprocess.PIPE,
            text=True,
        )
        for place in create_places(size)
    ]
    try:
        said = [rank.communicate(timeout=180)[1][-3000:] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(said)


if __name__ == "__main__":
    place = RankPlace.taken()
    assert place is not None
    main(place, Path(sys.argv[1]), DTYPES[sys.argv[2]], sys.argv[3])
