"""Activations between the two products of a feed-forward block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from inferplane.api.model import BuildContext
from inferplane.layers.layer import Layer
from inferplane.models.errors import ModelLoadError


class GatedActivation(Layer):
    """``act(gate) * up`` where the input has both side by side, as `MergedColumnParallelLinear` makes them."""

    def __init__(self, ctx: BuildContext, name: str = "silu") -> None:
        """``name`` as configurations write it. Raises `ModelLoadError` naming one that is not known."""
        ops = {
            "silu": ctx.ops.silu_and_mul,
            "gelu_tanh": ctx.ops.gelu_tanh_and_mul,
            "gelu_pytorch_tanh": ctx.ops.gelu_tanh_and_mul,
            "gelu": _gelu_and_mul,
        }
        if name not in ops:
            raise ModelLoadError(
                f"hidden_act {name!r} is not known for a gated block; known: {', '.join(ops)}"
            )
        self.is_silu = name == "silu"
        self._op = ops[name]

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``[num_tokens, 2 * size] -> [num_tokens, size]``"""
        return self._op(gate_up)


def _gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """The exact form, of encoders."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate) * up


ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_new": partial(torch.nn.functional.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
    "relu": torch.nn.functional.relu,
    "tanh": torch.tanh,
    "relu2": lambda x: torch.nn.functional.relu(x).square(),
}
"""Of one input, by the name that configurations have for them."""


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Raises `ModelLoadError` naming one that is not known."""
    if name not in ACTIVATIONS:
        raise ModelLoadError(f"activation {name!r} is not known; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
