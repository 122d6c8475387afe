"""What it is to declare an op: a name, a reference body, the arguments of a test case, and how exact it has to be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

Tolerance = tuple[float, float]
"""(relative, absolute) distance from the reference computed in float64."""

DEFAULT_TOLERANCES: Mapping[torch.dtype, Tolerance] = {
    torch.float32: (1e-5, 1e-5),
    torch.bfloat16: (2e-2, 2e-2),
    torch.float16: (3e-3, 3e-3),
}


@dataclass(frozen=True)
class Op:
    """A declared op. ``example_inputs(generator, dtype)`` makes the arguments of one test case."""

    name: str
    reference: Callable[..., Any]
    example_inputs: Callable[[torch.Generator, torch.dtype], tuple[Any, ...]]
    tolerances: Mapping[torch.dtype, Tolerance] = field(default_factory=lambda: DEFAULT_TOLERANCES)
    overwrites: tuple[int, ...] = ()
    """Places of the arguments that an implementation may overwrite, because no caller looks at them again."""


OPS: dict[str, Op] = {}
"""Every declared op by name."""


Reference = TypeVar("Reference", bound=Callable[..., Any])


def declare_op(
    example_inputs: Callable[[torch.Generator, torch.dtype], tuple[Any, ...]],
    overwrites: tuple[int, ...] = (),
) -> Callable[[Reference], Reference]:
    def declare(reference: Reference) -> Reference:
        name = reference.__name__
        OPS[name] = Op(name, reference, example_inputs, overwrites=overwrites)
        return reference

    return declare


def random_tensor(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)
