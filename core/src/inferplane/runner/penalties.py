"""What the penalties of one request count: which tokens occurred, and how often in the output."""

from __future__ import annotations

import numpy as np

from inferplane.request import SamplingParams


class TokenCounts:
    """The distinct tokens of a request with their number in the output, grown token by token.

    Sparse, because a context has few distinct tokens next to a vocabulary: applying a penalty costs what occurred.
    """

    def __init__(self, prompt: np.ndarray, output: np.ndarray) -> None:
        """``prompt`` is empty when no penalty looks at it. ``output`` is what a preempted request had reached."""
        output_ids, output_counts = np.unique(output, return_counts=True)
        prompt_only = np.setdiff1d(prompt, output_ids)
        self._num_distinct = len(output_ids) + len(prompt_only)
        self._ids = np.empty(self._num_distinct + 64, np.int64)
        self._counts = np.zeros(self._num_distinct + 64, np.int64)
        self._ids[: self._num_distinct] = np.concatenate([output_ids, prompt_only])
        self._counts[: len(output_ids)] = output_counts
        self._index_of = {token_id: index for index, token_id in enumerate(self.token_ids.tolist())}

    @property
    def token_ids(self) -> np.ndarray:
        """[n] int64, distinct."""
        return self._ids[: self._num_distinct]

    @property
    def output_counts(self) -> np.ndarray:
        """[n] int64; 0 for a token that only the prompt has."""
        return self._counts[: self._num_distinct]

    def append(self, token_id: int) -> None:
        index = self._index_of.get(token_id)
        if index is None:
            index = self._num_distinct
            if index == len(self._ids):
                self._ids = np.resize(self._ids, 2 * index)
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[index] = token_id
            self._index_of[token_id] = index
            self._num_distinct += 1
        self._counts[index] += 1


class Penalties:
    """The penalties of one request over its token counts."""

    def __init__(self, params: SamplingParams, prompt: np.ndarray, output: np.ndarray) -> None:
        self.repetition = params.repetition_penalty
        self.frequency = params.frequency_penalty
        self.presence = params.presence_penalty
        self.counts = TokenCounts(prompt if params.repetition_penalty != 1.0 else prompt[:0], output)

    @staticmethod
    def are_wanted(params: SamplingParams) -> bool:
        return (
            params.repetition_penalty != 1.0
            or params.frequency_penalty != 0.0
            or params.presence_penalty != 0.0
        )
