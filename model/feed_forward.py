"""Feed-forward networks with a gate: SwiGLU (Shazeer, arXiv:2002.05202)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from model.linear import Activations, Linear
from model.norm import RmsNorm
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

    def of_norm(
        self, norm: RmsNorm, hidden: torch.Tensor, addend: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden + addend, see `RmsNorm.of_sum`, and what the network computes of the norm of that."""
        summed, normed = norm.of_sum(hidden, addend, self.gate_up.fp8)
        return summed, self(normed)

    def __call__(self, x: torch.Tensor | Activations) -> torch.Tensor:
        """x: [N, hidden_size]. Returns the same shape."""
        gate_up, down = self.gate_up, self.down
        given = Activations(x) if isinstance(x, torch.Tensor) else x
        if gate_up.scales is None or down.scales is None:
            return down(swiglu(gate_up(given)))
        # Here, since a machine without a GPU need not have Triton.
        from model.backends.triton_fp8_linear import mlp_quantised

        power_of_two = gate_up.power_of_two
        quantised = given.quantised(power_of_two)
        return mlp_quantised(*quantised, gate_up.weight, gate_up.scales, down.weight, down.scales, power_of_two)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [..., 2 * width]: [..., width]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
