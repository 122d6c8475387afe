"""One row's product with all that is fused into it: drawn operands, and the check of what was written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from inferplane_kernels_triton.matvec import NormBefore
from kernel_checks import assert_close, poisoned

EPS = 1e-5


@dataclass(frozen=True)
class RowProduct:
    x: torch.Tensor
    """[1, in_features]"""
    norm: NormBefore | None
    bias: torch.Tensor | None
    gated: bool
    out: torch.Tensor

    @classmethod
    def draw(
        cls,
        out_features: int,
        in_features: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        has_residual: bool = False,
        has_norm: bool = False,
        has_bias: bool = False,
        gated: bool = False,
    ) -> RowProduct:
        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device).to(dtype)

        x, norm = randn(1, in_features), None
        if has_norm:
            residual = randn(1, in_features) if has_residual else None
            total = poisoned(1, in_features, dtype=dtype, device=device) if has_residual else None
            norm = NormBefore(randn(in_features), EPS, residual, total)
        out = poisoned(1, out_features // 2 if gated else out_features, dtype=dtype, device=device)
        return cls(x, norm, randn(out_features) if has_bias else None, gated, out)

    @property
    def options(self) -> dict[str, Any]:
        """What a kernel is called with besides x and the weight."""
        return {"norm": self.norm, "bias": self.bias, "gated": self.gated, "out": self.out}

    def check(self, numbers: torch.Tensor) -> None:
        """``numbers: [out_features, in_features]`` float64: the weight."""
        wide, norm = self.x.double(), self.norm
        if norm is not None:
            if norm.residual is not None and norm.residual_out is not None:
                assert_close(norm.residual_out, wide + norm.residual.double())
                wide = norm.residual_out.double()
            wide = wide * torch.rsqrt(wide.pow(2).mean() + EPS) * norm.weight.double()
        want = wide @ numbers.T
        if self.bias is not None:
            want = want + self.bias.double()
        if self.gated:
            gate, up = want.chunk(2, dim=-1)
            want = torch.nn.functional.silu(gate) * up
        assert_close(self.out, want)
