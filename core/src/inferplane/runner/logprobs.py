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
    logprobs = logits.float().log_softmax(1)
    chosen = logprobs.gather(1, runtime.to_device(torch.from_numpy(token_ids)).unsqueeze(1))
    ranks = (logprobs > chosen).sum(1) + 1
    # always the same width, so that a row's ties come out alike whatever its neighbours ask for
    best, best_ids = logprobs.topk(min(MAX_LOGPROBS, logits.shape[1]), dim=1)
    columns = (chosen.squeeze(1), ranks, best, best_ids)
    chosen_list, rank_list, best_list, id_list = (runtime.to_host(each).tolist() for each in columns)
    return [
        PositionLogprobs(TokenLogprob(token_id, logprob, rank), _top(ids[:count], values))
        for token_id, logprob, rank, count, ids, values in zip(
            token_ids.tolist(), chosen_list, rank_list, num_top.tolist(), id_list, best_list
        )
    ]


def _top(token_ids: list[int], logprobs: list[float]) -> list[TokenLogprob]:
    return [
        TokenLogprob(token_id, logprob, rank)
        for rank, (token_id, logprob) in enumerate(zip(token_ids, logprobs), 1)
    ]
