from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from model.families import FamilyName
from model.loader import load_model
from model.sparse_model import SparseModel
from model.tiny import write_tiny_checkpoint
from tests.greedy import generate

FAMILIES: tuple[FamilyName, ...] = ("deepseek_v32", "glm_moe_dsa")

transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny checkpoint of each family."""
    root = tmp_path_factory.mktemp("checkpoints")
    for family in FAMILIES:
        write_tiny_checkpoint(root / family, family, seed=1, layers=5)
    return {family: root / family for family in FAMILIES}


@pytest.fixture(scope="session", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> Path:
    return checkpoints[request.param]


@pytest.fixture(scope="session")
def model(checkpoint: Path) -> SparseModel:
    return load_model(checkpoint, torch.float32, torch.device("cpu"))


@pytest.fixture(scope="session")
def drafting(checkpoint: Path) -> SparseModel:
    """With the draft layer."""
    return load_model(checkpoint, torch.float32, torch.device("cpu"), drafts=True)


@pytest.fixture(scope="session")
def reference(checkpoint: Path) -> "transformers.PreTrainedModel":
    """The same checkpoint, run by transformers alone."""
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


@pytest.fixture(scope="session")
def continuation(reference: "transformers.PreTrainedModel") -> Callable[[torch.Tensor, int], list[int]]:
    """The reference's greedy continuation of a prompt."""

    return lambda prompt, new_tokens: generate(reference, prompt.tolist(), new_tokens)
