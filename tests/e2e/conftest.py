"""Tiny checkpoints of both families, what transformers says of them, and clusters that serve them."""

import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from cli.serve import free_port, is_ready
from model.tiny import write_tiny_checkpoint
from tests.e2e.cluster import HOT_BUFFER, START_TIMEOUT_S, Cluster, Node, wait_until
from tests.e2e.spawn import Command, execute, fork
from tests.greedy import generate, likeliest, logprobs

FAMILIES = ("deepseek_v32", "glm_moe_dsa")
TOKEN_BYTES = 4 * 5 * (64 + 32)
"""Of the tiny deepseek_v32 checkpoint: items and index keys of four layers and the draft layer in float32."""


class Reference:
    """What transformers says of a checkpoint, with KV in caches of a class."""

    def __init__(self, path: Path, cache: Callable[..., DynamicCache] = DynamicCache) -> None:
        self._network: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._cache = partial(cache, config=self._network.config)
        self._answers: dict[tuple[int, ...], list[int]] = {}
        self._likeliest: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}

    def generate(self, prompt_ids: Sequence[int], max_tokens: int) -> list[int]:
        """Its greedy continuation; each is computed once. Where an answer is there already, `likeliest` is cheaper."""
        key = tuple(prompt_ids)
        answer = self._answers.get(key, [])
        if len(answer) < max_tokens:
            answer = self._answers[key] = generate(self._network, prompt_ids, max_tokens, self._cache())
        return answer[:max_tokens]

    def likeliest(self, prompt_ids: Sequence[int], answer: Sequence[int]) -> list[int]:
        """What it finds likeliest at each place of an answer: the answer, if and only if that is its own."""
        key = (tuple(prompt_ids), tuple(answer))
        if key not in self._likeliest:
            self._likeliest[key] = likeliest(self._network, prompt_ids, answer, self._cache()) if answer else []
        return self._likeliest[key]

    def logprobs(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Log probabilities behind each of these tokens, [tokens, vocabulary]."""
        return logprobs(self._network, token_ids)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny checkpoint of each family."""
    root = tmp_path_factory.mktemp("e2e")
    for family in FAMILIES:
        write_tiny_checkpoint(root / family, family, seed=7, index_topk=64)
    return {family: root / family for family in FAMILIES}


class References(dict[str, Reference]):
    """The reference of each checkpoint, made when it is first asked for."""

    def __init__(self, checkpoints: dict[str, Path]) -> None:
        super().__init__()
        self._checkpoints = checkpoints

    def __missing__(self, name: str) -> Reference:
        reference = self[name] = Reference(self._checkpoints[name])
        return reference


@pytest.fixture(scope="session")
def references(checkpoints: dict[str, Path]) -> dict[str, Reference]:
    return References(checkpoints)


@pytest.fixture
def device() -> str:
    """What the nodes of a test compute on, where it leaves that open: tests/gpu runs such tests with another one."""
    return "cpu"


@pytest.fixture
def disable_cuda_graph() -> bool:
    """Whether decode nodes launch kernels one by one, where a test leaves that open."""
    return False


StartCluster = Callable[..., Cluster]
StartPair = Callable[..., tuple[Cluster, Node, Node]]
Serve = Callable[..., tuple["subprocess.Popen[bytes]", str]]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """What `serve` and its processes print."""
    return tmp_path / "log"


@pytest.fixture
def serve(checkpoints: dict[str, Path], log: Path) -> Iterator[Serve]:
    """A function that runs `hisparse-pd serve` and waits until it is ready."""
    running: list[subprocess.Popen[bytes]] = []

    def start(*words: str, certfile: Path | None = None) -> tuple["subprocess.Popen[bytes]", str]:
        port = free_port()
        command = ["serve", "--model-path", str(checkpoints["deepseek_v32"]), "--served-model-name", "tiny"]
        command += ["--port", str(port), "--transfer-protocol", "tcp", *words]
        process = execute(Command("cli.main", command, {}, log))
        assert isinstance(process, subprocess.Popen)
        running.append(process)
        url = f"{'http' if certfile is None else 'https'}://127.0.0.1:{port}"
        wait_until(lambda: is_ready(url, certfile), START_TIMEOUT_S, what="serve to be ready")
        return process, url

    yield start
    for process in running:
        process.kill()
        process.wait()


@pytest.fixture
def start_pair(start_cluster: StartCluster) -> StartPair:
    """A function that starts a cluster with one node of each kind, ready: it, the prefill node, and the decode node.

    It takes flags of the prefill node as one argument, and flags of the decode node as others.
    """

    def start(
        prefill: dict[str, object] | None = None, family: str = "deepseek_v32", **decode: object
    ) -> tuple[Cluster, Node, Node]:
        cluster = start_cluster(family)
        nodes = cluster.prefill(**(prefill or {})), cluster.decode(**{"hisparse_config": HOT_BUFFER, **decode})
        cluster.wait_ready()
        return cluster, *nodes

    return start


@pytest.fixture
def start_cluster(checkpoints: dict[str, Path], tmp_path: Path, device: str) -> Iterator[StartCluster]:
    """A function that makes a cluster of a family, with its gateway; everything is stopped after the test."""
    clusters: list[Cluster] = []

    def start(family: str = "deepseek_v32", **gateway_flags: object) -> Cluster:
        directory = tmp_path / f"cluster-{len(clusters)}"
        directory.mkdir()
        cluster = Cluster(checkpoints[family], directory, spawn=fork if device == "cpu" else execute, device=device)
        clusters.append(cluster)
        cluster.gateway(served_model_name="tiny", **gateway_flags)
        return cluster

    yield start
    for cluster in clusters:
        cluster.__exit__()
