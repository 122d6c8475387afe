"""State-space mixers from a configuration's ``mamba_*`` keys, which hybrid families share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inferplane.api.model import BuildContext
from inferplane.layers import StateSpaceMixer
from inferplane.models.errors import ModelLoadError
from inferplane.models.hf_fields import flag, text, whole_number


def state_space_mixer(
    ctx: BuildContext,
    prefix: str,
    hidden_size: int,
    eps: float,
    *,
    inner_size: int | None = None,
    **options: Any,
) -> StateSpaceMixer:
    """Of one layer; ``inner_size`` is that of all heads, where ``mamba_expand`` does not say it, and ``options`` are
    `StateSpaceMixer`'s."""
    hf = ctx.hf_config
    check_silu(hf)
    num_heads = whole_number(hf, "mamba_n_heads", 128)
    # "auto" is written out by newer configurations
    head_dim = None if hf.get("mamba_d_head") == "auto" else hf.get("mamba_d_head")
    inner = inner_size or whole_number(hf, "mamba_expand", 2) * hidden_size
    return StateSpaceMixer(
        ctx,
        prefix,
        hidden_size,
        num_heads=num_heads,
        head_dim=whole_number({"mamba_d_head": head_dim}, "mamba_d_head", inner // num_heads),
        num_groups=whole_number(hf, "mamba_n_groups", 1),
        state_size=whole_number(hf, "mamba_d_state", 256),
        conv_width=whole_number(hf, "mamba_d_conv", 4),
        eps=eps,
        bias=flag(hf, "mamba_proj_bias"),
        conv_bias=flag(hf, "mamba_conv_bias", True),
        step_limits=step_limits(hf),
        **options,
    )


def step_limits(hf: Mapping[str, Any]) -> tuple[float, float]:
    """What a step of the state is clamped to, ``time_step_limit``."""
    limits = hf.get("time_step_limit")
    if limits is None:
        return 0.0, float("inf")
    if (
        isinstance(limits, (list, tuple))
        and len(limits) == 2
        and all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in limits)
    ):
        return float(limits[0]), float(limits[1])
    raise ModelLoadError(f"time_step_limit should be two numbers in the model's config, but is {limits!r}")


def check_silu(hf: Mapping[str, Any], key: str = "hidden_act") -> None:
    """Raises `ModelLoadError` for an activation that the mixers do not have."""
    if (activation := text(hf, key, "silu")) not in ("silu", "swish"):
        raise ModelLoadError(f"{key} {activation!r} is not supported by this family; silu is")


def step_rank(hf: Mapping[str, Any], key: str, hidden_size: int) -> int:
    """Of the product that makes a channel's steps; "auto" is a sixteenth of the hidden size."""
    rank = None if hf.get(key) == "auto" else hf.get(key)
    return whole_number({key: rank}, key, -(-hidden_size // 16))
