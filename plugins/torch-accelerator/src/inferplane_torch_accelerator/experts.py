"""The experts of a mixture by the portable kernels, launched as was measured for their shape."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache, wraps
from typing import Any

import torch

from inferplane_kernels_triton.int4_matrix import Int4Matrix
from inferplane_kernels_triton.moe_experts import ExpertsConfig, ExpertsWeight, fused_experts, sizes
from inferplane_kernels_triton.moe_one_token import OneTokenConfig
from inferplane_torch_accelerator.launch import Config, Launch

KEPT_SHAPES = 1024
"""Numbers of tokens whose configurations are remembered: every layer of a step asks for the same."""


@cache
def tuned_experts(launch: Launch) -> Callable[..., torch.Tensor]:
    """The op ``fused_experts``, which also takes `ExpertCodes` and `Int4Matrix` for weights.

    Those have entries of their own in tables, with ``_8bit`` and ``_4bit`` behind; codes of a byte take those of plain
    weights where there are none.
    """

    @lru_cache(maxsize=KEPT_SHAPES)
    def configs(
        num_tokens: int,
        num_pairs: int,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        bits: int | None,
    ) -> dict[str, Any]:
        """``shape``: experts, hidden, inner. ``bits`` of codes, None of plain weights."""
        like = torch.empty(0, dtype=dtype, device=device)
        num_experts, hidden, inner = shape

        def tuned(kernel: str, shape: tuple[int, ...], default: Config) -> Config:
            config = default if bits == 4 else launch.config(kernel, shape, default, like)
            return config if bits is None else launch.config(f"{kernel}_{bits}bit", shape, config, like)

        if num_tokens == 1 and bits != 4:
            gated, down = (
                tuned(kernel, (inner, hidden), default)
                for kernel, default in (
                    ("one_token_experts", OneTokenConfig.for_gate_and_up()),
                    ("one_token_experts_down", OneTokenConfig.for_down()),
                )
            )
            return {"one_token": (gated, down)}
        if bits == 4:
            default = ExpertsConfig.for_four_bits(num_pairs, num_experts)
        else:
            default = ExpertsConfig.default(num_pairs, num_experts, dtype)
        config = tuned("fused_experts", (num_tokens, *shape), default)
        down_config = tuned("fused_experts_down", (num_tokens, *shape), config)
        return {"config": config, "down_config": down_config}

    @wraps(fused_experts)
    def call(
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        w13: ExpertsWeight,
        w2: ExpertsWeight,
        **options: Any,
    ) -> torch.Tensor:
        shape, bits = sizes(w2, x.shape[1]), _bits(w13)
        tuned = configs(len(x), topk_ids.numel(), shape, x.dtype, x.device, bits)
        return fused_experts(x, topk_weights, topk_ids, w13, w2, **options, **tuned, pdl=launch.pdl(x.device))

    return call


def _bits(weight: ExpertsWeight) -> int | None:
    if isinstance(weight, torch.Tensor):
        return None
    return 4 if isinstance(weight, Int4Matrix) else 8
