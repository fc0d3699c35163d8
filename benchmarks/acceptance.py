"""`python -m benchmarks.acceptance`: how many drafts of the trained model are right, by temperature and way of drawing.

Continues this project's documents and sources, which the draft layer was not trained on, and answers questions for pass
keys. A token does not depend on drafts: each is computed alone, with three drafts after it, and what steps would have
given is counted afterwards. Computes in float32.
"""

import random
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.logits.forced import Text
from benchmarks.machine import this_machine
from benchmarks.passkey import BEGIN_ID, CHECKPOINT
from benchmarks.passkey.question import BEGIN, make_question
from benchmarks.passkey.text import passage_ids
from benchmarks.program import run
from engine.sampling import RandomStream
from kernels import torch_ops
from kernels.operands import PagedKeys
from model.loader import load_model
from model.passes import PrefillChunk
from model.sparse_model import SparseModel

DRAFTS = 3
_DIGITS = 5
_CHUNK = 512
_ROOT = Path(__file__).parents[1]
_HELD_OUT = {"prose": "docs/**/[!b]*.md", "Python": "gateway/**/*.py"}
WAYS = ((0.0, "likeliest"), (0.7, "Gumbel"), (0.7, "inverse CDF"), (1.0, "Gumbel"), (1.0, "inverse CDF"))
"""Temperatures, and how tokens and drafts are drawn. Nodes draw with Gumbel noise."""
_TEMPERATURES = torch.tensor([temperature for temperature, _ in WAYS])
_INVERTS = torch.tensor([name == "inverse CDF" for _, name in WAYS])


class Continuation(NamedTuple):
    """What came after a prompt. drafts: of the tokens after each of `tokens`."""

    tokens: Sequence[int]
    drafts: Sequence[Sequence[int]]

    def right(self) -> list[int]:
        """How many drafts after each token are right: those before the first wrong one."""
        followed = (zip(drafts, self.tokens[place:], strict=False) for place, drafts in enumerate(self.drafts, 1))
        return [sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) for pairs in followed]


def acceptance(found: Sequence[Continuation], number: int) -> float:
    """The part of the drafts `number` (1: the first) that are right, where those before are."""
    made = [right >= number for each in found for right in each.right()[:-number] if right >= number - 1]
    return sum(made) / max(1, len(made))


def tokens_a_step(found: Sequence[Continuation], num_drafts: int) -> float:
    """Of steps that verify so many drafts. A step without drafts gave each first token."""
    steps = 0
    for right in (each.right() for each in found):
        at = 0
        while at < len(right) - 1:
            at, steps = at + 1 + min(right[at], num_drafts), steps + 1
    return sum(len(each.tokens) - 1 for each in found) / steps


def draw(logits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """A token in each of WAYS, int64 [ways], from logits [ways, vocab] and random numbers, int64 [ways]."""
    likeliest = torch_ops.perturb(logits, _TEMPERATURES, keys).argmax(dim=-1)
    shares = (logits.double() / _TEMPERATURES.clamp(min=1e-3)[:, None]).softmax(dim=-1).cumsum(dim=-1)
    uniform = ((keys >> 11) & ((1 << 53) - 1)).double() * 2.0**-53
    passed = torch.searchsorted(shares, uniform[:, None], right=True).squeeze(1)
    return torch.where(_INVERTS, passed.clamp(max=logits.shape[1] - 1), likeliest)


class _Copies(Text):
    """Copies of a text's KV, one for each continuation, of which a step has one token each."""

    def __init__(self, text: Text, count: int) -> None:
        self._kv, self._keys = text._kv.repeat(1, count, 1), text._keys.repeat(1, count, 1)
        self._begins = text._kv.shape[1] * torch.arange(count)

    def move(self, position: int) -> torch.Tensor:
        """Steps are of this position from now on. Returns it for each copy."""
        self.positions = self._begins + position
        return torch.full_like(self._begins, position)

    def index_pages(self, index_layer: int) -> PagedKeys:
        pages = super().index_pages(index_layer)
        table = pages.page_table[0].view(len(self._begins), -1)
        return PagedKeys(pages.keys, table, self.positions - self._begins + 1)

    def swap_in(self, layer: int, positions: torch.Tensor) -> torch.Tensor:
        return torch.where(positions < 0, -1, positions + self._begins[:, None])


def continuations(model: SparseModel, prompt: Sequence[int], count: int, seed: int) -> list[Continuation]:
    """The `count` tokens after a prompt, in each of WAYS, with their drafts."""
    ids, last, rows = torch.tensor(prompt), len(prompt) - 1, torch.arange(len(WAYS))
    text = Text(model.spec, len(prompt) + count + DRAFTS, ids.device)
    for start in range(0, last, _CHUNK):
        model.prefill([PrefillChunk.of(ids, start, min(start + _CHUNK, last), text)])
    copies, numbers = _Copies(text, len(WAYS)), RandomStream(seed)
    steps: list[torch.Tensor] = []
    for index in range(count):
        keys = torch.from_numpy(numbers.keys(index, 1 + DRAFTS)).repeat(len(WAYS), 1)
        newest = steps[-1][:, 0] if steps else ids[-1:].repeat(len(WAYS))
        hidden = model.decode(newest, copies.move(last + index), copies)
        made = [draw(model.logits(hidden), keys[:, 0])]
        for number in range(DRAFTS):
            positions = copies.move(last + index + number)
            hidden = model.draft(made[-1], hidden, positions, copies, rows, reuse=number > 0)  # type: ignore[assignment]
            made.append(draw(model.logits(hidden), keys[:, number + 1]))
        steps.append(torch.stack(made, dim=1))
    return [Continuation(way[:, 0].tolist(), way[:, 1:].tolist()) for way in torch.stack(steps, dim=1)]


def prompts(length: int, count: int) -> Iterator[tuple[str, list[int]]]:
    """Prompts of so many tokens and their kinds, `count` of each."""
    for kind, pattern in _HELD_OUT.items():
        files = "\n".join(path.read_text() for path in sorted(_ROOT.glob(pattern)))
        text = files.encode("ascii", errors="ignore").decode()
        for number in range(count):
            yield kind, passage_ids(random.Random(number), length, text)
    for number in range(count):
        prompt = make_question(str(number), length).prompt
        yield "answers", [BEGIN_ID, *prompt.removeprefix(BEGIN).encode()]


def main(
    length: Annotated[int, typer.Option(min=256, max=8192, help="Tokens of a prompt.")] = 2048,
    count: Annotated[int, typer.Option(min=1, help="Prompts of each kind.")] = 32,
    tokens: Annotated[int, typer.Option(min=DRAFTS + 2, help="That follow a prompt; an answer has five.")] = 128,
) -> None:
    """Print the acceptance of the trained draft layer."""
    model = load_model(CHECKPOINT, torch.float32, torch.device("cpu"), drafts=True)
    found: dict[tuple[str, float, str], list[Continuation]] = {}
    for number, (kind, ids) in enumerate(prompts(length, count)):
        continued = continuations(model, ids, _DIGITS if kind == "answers" else tokens, number)
        for way, each in zip(WAYS, continued, strict=True):
            found.setdefault((kind, *way), []).append(each)
    table = Table("text", "temperature", "drawing", "draft 1", "draft 2", "draft 3", "tokens a step", box=None)
    for (kind, temperature, name), given in found.items():
        parts = [f"{acceptance(given, number):.1%}" for number in range(1, DRAFTS + 1)]
        means = ", ".join(f"{tokens_a_step(given, number):.2f}" for number in range(1, DRAFTS + 1))
        table.add_row(kind, f"{temperature:g}", name, *parts, means)
    title = "drafts that are right if those before are; tokens of a step with 1, 2 and 3 drafts"
    Console(highlight=False).print(title, table, str(this_machine()))


if __name__ == "__main__":
    run(main)
