"""Drawing one token of each row of logits by the settings that the host keeps for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from inferplane.api.draw_op import DrawHints, draw_token

if TYPE_CHECKING:
    from inferplane.api.device import DeviceRuntime


@dataclass(frozen=True)
class Settings:
    """How to draw from each of n rows, in host memory; all ``[n]`` but the keys."""

    temperature: np.ndarray
    """float32, above 0"""
    top_k: np.ndarray
    """int32, at least 1; looked at only when a width is given"""
    top_p: np.ndarray
    """float32; 1 keeps all."""
    min_p: np.ndarray
    """float32; 0 keeps all."""
    keys: np.ndarray
    """[2, n] int32 of `row_keys`"""

    def to_device(self, runtime: DeviceRuntime) -> tuple[torch.Tensor, torch.Tensor]:
        """Temperature, top_p and min_p as ``[3, n]`` float32, top_k and the keys as ``[3, n]`` int32: one copy."""
        floats = np.stack((self.temperature, self.top_p, self.min_p)).astype(np.float32).view(np.int32)
        packed = np.concatenate((floats, self.top_k[None].astype(np.int32), self.keys))
        on_device = runtime.to_device(torch.from_numpy(packed))
        return on_device[:3].view(torch.float32), on_device[3:]


@dataclass(frozen=True)
class Drawn:
    choices: torch.Tensor
    """[2, n] int64 on the device, as `draw_token` gives them."""

    @property
    def token_ids(self) -> torch.Tensor:
        """[n] int64"""
        return self.choices[0]

    @property
    def is_valid(self) -> torch.Tensor:
        """[n] bool. False where the logits left nothing to choose."""
        return self.choices[1] == 0


def draw(
    logits: torch.Tensor,
    settings: Settings,
    top_k_width: int,
    runtime: DeviceRuntime,
    op: Callable[..., torch.Tensor] = draw_token,
) -> Drawn:
    """One token of each row by all settings, by an implementation of `draw_token`. Nothing is waited for.

    ``logits: [n, vocab_size]`` in any float dtype, not changed. ``top_k_width``: at least every top_k and at most the
    vocabulary, or 0 when no row has one.
    """
    hints = DrawHints(
        top_k_width=top_k_width,
        has_temperature=bool((settings.temperature != 1.0).any()),
        has_top_p=bool((settings.top_p < 1.0).any()),
        has_min_p=bool(settings.min_p.any()),
        may_wait=runtime.is_host_memory,
    )
    floats, ints = settings.to_device(runtime)
    return Drawn(op(logits, floats, ints, hints))
