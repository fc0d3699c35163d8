"""Feed-forward networks with a gate: SwiGLU (Shazeer, arXiv:2002.05202)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from model.linear import Linear
from model.weights import Weights


@dataclass(frozen=True)
class FeedForward:
    """A dense network. gate_up: the gate's rows before those of the other factor, [2 * width, hidden_size]."""

    gate_up: Linear
    down: Linear

    @classmethod
    def load(cls, weights: Weights, name: str, hidden_size: int, width: int) -> "FeedForward":
        """The network of that name, such as `model.layers.0.mlp`."""
        return cls(
            gate_up=weights.linear({f"{name}.gate_proj": width, f"{name}.up_proj": width}, hidden_size),
            down=weights.linear({f"{name}.down_proj": hidden_size}, width),
        )

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [N, hidden_size]. Returns the same shape."""
        gate_up, down = self.gate_up, self.down
        if gate_up.scales is None or down.scales is None:
            return down(swiglu(gate_up(hidden)))
        # Here, since a machine without a GPU need not have Triton.
        from model.backends.triton_fp8_linear import mlp

        return mlp(hidden, gate_up.weight, gate_up.scales, down.weight, down.scales, gate_up.power_of_two)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [..., 2 * width]: [..., width]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
