"""The experts of a mixture by the portable kernels, launched as was measured for their shape."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

import torch

from inferplane_kernels_triton.moe_codes import ExpertCodes
from inferplane_kernels_triton.moe_experts import ExpertsConfig, fused_experts
from inferplane_kernels_triton.moe_one_token import OneTokenConfig
from inferplane_torch_accelerator.launch import Config, Launch

KEPT_SHAPES = 1024
"""Numbers of tokens whose configurations are remembered: every layer of a step asks for the same."""


def tuned_experts(launch: Launch) -> Callable[..., torch.Tensor]:
    """The op ``fused_experts``, which also takes `ExpertCodes` for weights.

    Those have entries of their own in tables, with ``_8bit`` behind; where there are none they take the others'.
    """

    @lru_cache(maxsize=KEPT_SHAPES)
    def configs(
        num_tokens: int,
        num_pairs: int,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        is_coded: bool,
    ) -> dict[str, Any]:
        """``shape``: experts, hidden, inner."""
        like = torch.empty(0, dtype=dtype, device=device)
        num_experts, hidden, inner = shape

        def tuned(kernel: str, shape: tuple[int, ...], default: Config) -> Config:
            config = launch.config(kernel, shape, default, like)
            return launch.config(f"{kernel}_8bit", shape, config, like) if is_coded else config

        if num_tokens == 1:
            gated, down = (
                tuned(kernel, (inner, hidden), default)
                for kernel, default in (
                    ("one_token_experts", OneTokenConfig.for_gate_and_up()),
                    ("one_token_experts_down", OneTokenConfig.for_down()),
                )
            )
            return {"one_token": (gated, down)}
        default = ExpertsConfig.default(num_pairs, num_experts, dtype)
        config = tuned("fused_experts", (num_tokens, *shape), default)
        down_config = tuned("fused_experts_down", (num_tokens, *shape), config)
        return {"config": config, "down_config": down_config}

    @wraps(fused_experts)
    def call(
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        w13: torch.Tensor | ExpertCodes,
        w2: torch.Tensor | ExpertCodes,
        **options: Any,
    ) -> torch.Tensor:
        is_coded = isinstance(w2, ExpertCodes)
        num_experts, hidden, inner = (w2.codes if is_coded else w2).shape
        shape = (num_experts, hidden, inner)
        tuned = configs(len(x), topk_ids.numel(), shape, x.dtype, x.device, is_coded)
        return fused_experts(x, topk_weights, topk_ids, w13, w2, **options, **tuned, pdl=launch.pdl(x.device))

    return call
