"""`Pooler`: from the hidden states of a step to one for each request that is complete."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from inferplane.runner.batch import HostStep

if TYPE_CHECKING:
    from inferplane.api.device import DeviceRuntime


class Pooler:
    """Keeps what later steps need of a prompt that takes several: the first token's hidden state, or the sum so far."""

    def __init__(self, kind: str, max_num_reqs: int, runtime: DeviceRuntime) -> None:
        """``kind`` as in `PoolerConfig`."""
        self._kind = kind
        self._max_num_reqs = max_num_reqs
        self._runtime = runtime
        self._kept: torch.Tensor | None = None
        """[max_num_reqs, hidden_size] float32 by batch row, from the first prompt on that takes several steps."""

    def pool(self, step: HostStep, hidden: torch.Tensor, is_complete: np.ndarray) -> torch.Tensor:
        """``hidden: [num_tokens, hidden_size]``, ``is_complete: [num_reqs]`` bool, whether all tokens of a request are
        computed with this step. Returns ``[number of those, hidden_size]`` float32, in the order of the step."""
        complete = np.flatnonzero(is_complete)
        if self._kind == "last":
            return self._rows(hidden, step.query_start[1:][complete] - 1).float()
        if self._kind == "cls":
            parts = self._rows(hidden, step.query_start[:-1]).float()
        else:
            lengths = step.query_lens.tolist()
            parts = torch.stack([part.sum(0, dtype=torch.float32) for part in hidden.split(lengths)])
        starts = step.seq_lens - step.query_lens
        if starts.any() or len(complete) < step.num_reqs:
            parts = self._join(step.rows, starts, parts)
        pooled = parts if len(complete) == step.num_reqs else self._rows(parts, complete)
        if self._kind == "cls":
            return pooled
        num_tokens = torch.from_numpy(step.seq_lens[complete].astype(np.float32))
        return pooled / self._runtime.to_device(num_tokens).unsqueeze(1)

    def _join(self, rows: np.ndarray, starts: np.ndarray, parts: torch.Tensor) -> torch.Tensor:
        """With what earlier steps kept of the requests that began there; all of it is kept for later ones."""
        if self._kept is None:
            self._kept = parts.new_zeros(self._max_num_reqs, parts.shape[1])
        at = self._runtime.to_device(torch.from_numpy(rows))
        goes_on = self._runtime.to_device(torch.from_numpy(starts > 0)).unsqueeze(1)
        kept = self._kept.index_select(0, at)
        parts = torch.where(goes_on, kept if self._kind == "cls" else kept + parts, parts)
        self._kept.index_copy_(0, at, parts)
        return parts

    def _rows(self, x: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        return x.index_select(0, self._runtime.to_device(torch.from_numpy(rows.astype(np.int64))))
