"""The two forward passes of a decode step, and the device memory that they share.

The first verifies the drafts that the step before has made, and the second makes those of the next step. Between them
`accept` decides how far each request has come. docs/drafts.md has the positions and their states.
"""

import torch

from hisparse.coordinator import HiSparseCoordinator
from hisparse.step import DecodeStep
from hisparse.swap_in import Span
from kernels.ops import ops_on
from model.sparse_model import SparseModel

_NO_TOKEN = 0
"""The token id of padding: any id that has an embedding."""


class StepPasses:
    """Queues the passes of steps of up to `max_running` requests. Nothing here waits for a device.

    By row of the device tables: tokens int64 [rows + 1, 1 + max_drafts], the newest token and the drafts after it;
    positions int64 [rows + 1], of the newest token; num_drafts int64 [rows + 1], the drafts that there are;
    temperatures float32 [rows + 1]. The last row is that of padding.

    By entry of a step: inputs int64 [2, max_running], rows and the positions before which they may compute tokens, both
    -1 for padding; valid and counts int64 [max_running], the tokens that the first pass could compute and those that
    are final; drawn int64 [max_running, 1 + max_drafts], the tokens that were drawn; keys int64 [max_running, 1 + 2 *
    max_drafts], the random numbers of the tokens from the first of the step on. logits float32 [max_running *
    (1 + max_drafts), vocab]: entry b * width + j is of token j of request b.

    A pass may be recorded: whatever differs between steps of a size is in these tensors.
    """

    def __init__(
        self, model: SparseModel, coordinator: HiSparseCoordinator, max_running: int, max_drafts: int = 0
    ) -> None:
        """max_drafts: 0 if the model has no draft layer."""

        def numbers(*shape: int, fill: int = 0) -> torch.Tensor:
            return torch.full(shape, fill, dtype=torch.int64, device=model.device)

        self.model = model
        self.max_width = 1 + max_drafts
        self.inputs = numbers(2, max_running, fill=-1)
        self.tokens = numbers(max_running + 1, self.max_width, fill=_NO_TOKEN)
        self.positions, self.num_drafts = numbers(max_running + 1), numbers(max_running + 1)
        self.valid, self.counts = numbers(max_running), numbers(max_running)
        self.drawn = numbers(max_running, self.max_width)
        self.temperatures = torch.zeros(max_running + 1, device=model.device)
        self.keys = numbers(max_running, 1 + 2 * max_drafts)
        self.logits = torch.empty(max_running * self.max_width, model.spec.vocab_size, device=model.device)
        self._coordinator = coordinator
        self.drafts = max_drafts > 0
        """Whether there is a second pass."""
        self._hidden: torch.Tensor | None = None
        """After the last norm, [max_running * max_width, hidden_size]: what the draft layer goes on from."""

    def verify(self, batch: int, max_tokens: int, width: int) -> DecodeStep:
        """Compute up to `width` tokens of each request: the newest one and its drafts. Leaves logits and valid.

        batch: entries of the step, padding included. max_tokens: of the longest sequence.
        """
        rows, ends, row = self._entries(batch)
        newest = torch.where(rows >= 0, self.positions[row], -1)
        wanted = torch.minimum(ends - newest, self.num_drafts[row] + 1)
        counts = torch.where(rows >= 0, wanted.clamp(0, width), 0)
        stored, queries = Span(newest, counts, width), Span(newest, counts.clone(), width)
        # All but the draft layer, which is the last.
        layers = range(self.model.spec.num_layers - 1) if self.drafts else None
        step = self._coordinator.cache(
            rows, newest, queries, stored, max_tokens, layers=layers, backs_up=not self.drafts
        )
        hidden = self.model.decode(self.tokens[row, :width].flatten(), stored.positions(), step)
        self.logits[: batch * width] = self.model.logits(hidden)
        step.finish()
        self.valid[:batch] = queries.counts
        self.counts[:batch] = 0
        if self.drafts:
            if self._hidden is None:
                self._hidden = hidden.new_empty(len(self.logits), hidden.shape[1])
            self._hidden[: batch * width] = hidden
        return step

    def accept(self, batch: int, width: int, token_ids: torch.Tensor) -> torch.Tensor:
        """Take drawn tokens up to the first that is not the draft at its place.

        batch: requests of the step, without padding; one that has ended since may be padding by now. token_ids: int64
        [batch * width], below 0 for no token. Returns those that are final, -1 in the other places.
        """
        rows, _, row = self._entries(batch)
        valid = torch.where(rows >= 0, self.valid[:batch], 0)
        drawn = token_ids.view(batch, width)
        place = torch.arange(1, width, device=drawn.device)
        right = (drawn[:, :-1] == self.tokens[row, 1:width]) & (place < valid[:, None])
        counts = torch.where(valid > 0, 1 + right.cumprod(1).sum(1), 0)
        newest = drawn.gather(1, (counts - 1).clamp(min=0)[:, None]).squeeze(1)
        self.tokens[row, 0] = torch.where(counts > 0, newest.clamp(min=_NO_TOKEN), self.tokens[row, 0])
        self.positions.index_add_(0, row, counts)
        self.drawn[:batch, :width] = drawn
        self.counts[:batch] = counts
        is_final = torch.arange(width, device=drawn.device) < counts[:, None]
        return torch.where(is_final, drawn, -1).flatten()

    def draft(self, batch: int, max_tokens: int, width: int) -> DecodeStep:
        """Store the draft layer's KV of the tokens that are final now, copy their KV to the host, and make width - 1
        drafts. Arguments as in `verify`. Only for a model with a draft layer. Returns the step of the last draft.

        A request that has ended since `verify` must be padding: what it had may have another owner.
        """
        assert self._hidden is not None, "verify comes first"
        model, counts = self.model, self.counts[:batch]
        draft_layer = model.spec.draft_layer
        assert draft_layer is not None, "the model drafts"
        rows, ends, row = self._entries(batch)
        first = torch.where(rows >= 0, self.positions[row] - counts, -1)
        one = (counts > 0).long()
        last = torch.where(counts > 0, first + counts - 1, -1)
        step = self._coordinator.cache(
            rows,
            first,
            Span(last, one, 1),
            Span(first, counts, width),
            max_tokens,
            layers=range(draft_layer, draft_layer + 1) if width > 1 else range(0),
        )
        entries, ops = torch.arange(batch, device=counts.device), ops_on(counts.device)
        picked = entries * width + (counts - 1).clamp(min=0)
        hidden = model.draft(
            self.drawn[:batch, :width].flatten().clamp(min=_NO_TOKEN),
            self._hidden[: batch * width],
            step.batch.stored.positions(),
            step,
            picked if width > 1 else None,
        )
        step.finish()
        for number in range(1, width):
            assert hidden is not None, "rows were picked"
            # By the random number that the next step draws the token with.
            keys = self.keys[entries, counts + number - 1]
            drafts = ops.perturb(model.logits(hidden), self.temperatures[row], keys).argmax(dim=-1)
            self.tokens[row, number] = drafts
            if number == width - 1:
                break
            last = last + 1
            exists = ((last < ends) & (one > 0)).long()
            at = Span(torch.where(exists > 0, last, -1), exists, 1)
            step = self._coordinator.cache(
                rows, first, at, at, max_tokens, layers=range(draft_layer, draft_layer + 1), backs_up=False
            )
            hidden = model.draft(drafts, hidden, at.positions(), step, entries, reuse=True)
            step.finish()
        # Assigning a number would copy it from the host, which cannot be recorded.
        self.num_drafts.index_fill_(0, row, width - 1)
        return step

    def _entries(self, batch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows and ends of a step, and rows as indices: the last one for padding."""
        rows, ends = self.inputs[:, :batch]
        return rows, ends, torch.where(rows >= 0, rows, len(self.positions) - 1)
