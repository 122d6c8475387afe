"""Ops that choose a token of each row of logits."""

from __future__ import annotations

import torch

from inferplane.api.draw_op import DrawHints
from inferplane.api.ops import OpImpl, OpQuery
from inferplane_kernels_cpu import native
from inferplane_kernels_cpu.best_token import DTYPES, best_token
from inferplane_kernels_cpu.draw_token import draw_token

PROVIDER = "inferplane-kernels-cpu"


def _reason(query: OpQuery) -> str | None:
    if query.dtype not in DTYPES:
        return f"takes logits in {', '.join(map(str, DTYPES))}, not {query.dtype}"
    return native.unavailable_reason()


def _draw_token(
    logits: torch.Tensor, floats: torch.Tensor, ints: torch.Tensor, hints: DrawHints
) -> torch.Tensor:
    return draw_token(logits, floats, ints, hints.top_k_width > 0)


SAMPLING_OPS = [
    OpImpl("best_token", best_token, PROVIDER, _reason, priority=10),
    OpImpl("draw_token", _draw_token, PROVIDER, _reason, priority=10),
]
