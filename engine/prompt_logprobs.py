"""Log probabilities of a prompt's tokens, from the device that computes the prompt."""

from dataclasses import dataclass

import numpy as np
import torch

from base.device import Download
from control.prompt_logprobs import PromptLogprobs
from model.sparse_model import TokenLogprobs


@dataclass(frozen=True)
class QueuedLogprobs:
    """Those of consecutive positions from `start` on, on their way to the host.

    packed: int32 [rows, 2 * (1 + alternatives)], the two columns of PromptLogprobs side by side, the bits of floats.
    """

    start: int
    packed: Download

    @classmethod
    def of(cls, start: int, logprobs: TokenLogprobs) -> "QueuedLogprobs":
        floats = torch.cat((logprobs.own.unsqueeze(1), logprobs.top), dim=1).view(torch.int32)
        ints = torch.cat((logprobs.ranks.unsqueeze(1), logprobs.top_ids), dim=1)
        return cls(start, Download(torch.cat((ints, floats), dim=1)))

    def wait(self) -> PromptLogprobs:
        """The log probabilities, once they are there."""
        ints, floats = np.split(self.packed.wait().numpy(), 2, axis=1)
        return PromptLogprobs.of(self.start, ints, np.ascontiguousarray(floats).view(np.float32))
