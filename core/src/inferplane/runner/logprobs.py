"""Log-probabilities of the model's own distribution: before temperature, penalties and filters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from inferplane.request import MAX_LOGPROBS, PositionLogprobs, TokenLogprob

if TYPE_CHECKING:
    from inferplane.api.device import DeviceRuntime


def position_logprobs(
    logits: torch.Tensor, token_ids: np.ndarray, num_top: np.ndarray, runtime: DeviceRuntime
) -> list[PositionLogprobs]:
    """One entry for each row of ``logits: [n, vocab_size]``: of the token ``token_ids[i]`` that stands there, and of
    the ``num_top[i]`` best ones. Equal tokens share the rank of the first of them."""
    packed = pack_logprobs(logits, runtime.to_device(torch.from_numpy(token_ids)))
    return unpack_logprobs(runtime.to_host(packed), num_top)


def pack_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """What `unpack_logprobs` makes entries of, as one tensor on the device: ``[n, 3 + 2 * width]`` int32, a row being
    token, rank, its log-probability, then tokens and log-probabilities of the best ones. ``token_ids: [n]`` int64."""
    logprobs = logits.float().log_softmax(1)
    chosen = logprobs.gather(1, token_ids.unsqueeze(1))
    ranks = (logprobs > chosen).sum(1, keepdim=True) + 1
    # always the same width, so that a row's ties come out alike whatever its neighbours ask for
    best, best_ids = logprobs.topk(min(MAX_LOGPROBS, logits.shape[1]), dim=1)
    columns = [token_ids.unsqueeze(1).int(), ranks.int(), chosen.view(torch.int32), best_ids.int()]
    return torch.cat((*columns, best.view(torch.int32)), 1)


def unpack_logprobs(packed: torch.Tensor, num_top: np.ndarray) -> list[PositionLogprobs]:
    """``packed``: of `pack_logprobs`, in host memory."""
    width = (packed.shape[1] - 3) // 2
    token_ids, ranks = packed[:, 0].tolist(), packed[:, 1].tolist()
    logprobs = packed[:, 2].contiguous().view(torch.float32).tolist()
    best_ids = packed[:, 3 : 3 + width].tolist()
    best = packed[:, 3 + width :].contiguous().view(torch.float32).tolist()
    return [
        PositionLogprobs(TokenLogprob(token_id, logprob, rank), _top(ids[:count], values))
        for token_id, logprob, rank, count, ids, values in zip(
            token_ids, logprobs, ranks, num_top.tolist(), best_ids, best
        )
    ]


def _top(token_ids: list[int], logprobs: list[float]) -> list[TokenLogprob]:
    return [
        TokenLogprob(token_id, logprob, rank)
        for rank, (token_id, logprob) in enumerate(zip(token_ids, logprobs), 1)
    ]
