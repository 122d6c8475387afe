"""`Sequence`: the scheduler's own record of one request."""

from __future__ import annotations

from enum import Enum
from typing import Any

from inferplane.kvcache import RequestBlocks
from inferplane.request import EngineRequest, FinishReason, PositionLogprobs


class SequenceStatus(Enum):
    WAITING = "waiting"
    """In the waiting queue, or in quarantine and not in the batch. Holds no blocks, or only those that a step in
    flight still writes."""
    RUNNING = "running"
    """In the batch: holds blocks, and the workers keep a row for it."""
    FINISHED = "finished"
    """Nobody will hear of it again. Holds at most blocks that a step in flight still writes."""


class Sequence:
    """Tokens that a request should have, and how many of them have been computed.

    Every step moves ``num_computed_tokens`` towards ``len(token_ids)``; when it gets there, one more token is known.
    Prompts, chunks of prompts, outputs and recomputation after preemption are all that.
    """

    __slots__ = (
        "blocks",
        "is_in_batch",
        "is_prompt_done",
        "max_tokens",
        "min_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_dispatched_tokens",
        "num_expected_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "order",
        "prompt_logprobs",
        "request",
        "request_id",
        "run_ahead_until_tokens",
        "seed",
        "status",
        "stop_token_ids",
        "suspect_until_tokens",
        "token_ids",
    )

    def __init__(
        self, request: EngineRequest, order: tuple[Any, int], seed: int, *, runs_ahead: bool = False
    ) -> None:
        """``runs_ahead``: whether tokens may be planned for that follow one whose value is not known yet."""
        params = request.params
        # Fixed when the request is added.
        self.request = request
        self.request_id = request.request_id
        self.order = order
        """Place among all sequences, lower first: the policy's key, then the number of the arrival."""
        self.seed = seed
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.max_tokens = request.max_tokens
        self.min_tokens = params.min_tokens
        eos_token_ids = () if params.ignore_eos else request.eos_token_ids
        self.stop_token_ids = frozenset((*eos_token_ids, *(params.stop_token_ids or ())))
        self.run_ahead_until_tokens = 0
        """A step that samples when this many tokens or more are expected is the last until its result is known."""
        if runs_ahead and not request.reads_its_output:
            # The last output token is never run.
            self.run_ahead_until_tokens = self.num_prompt_tokens + self.max_tokens - 1

        # Filled by the scheduler's update.
        self.token_ids = list(request.prompt_token_ids)
        """Prompt and output so far."""
        self.num_computed_tokens = 0
        """Tokens whose KV is in the blocks, as far as results have come back."""
        self.is_prompt_done = False
        """Whether the prompt was computed to its end once, so that its log-probabilities are out."""
        self.prompt_logprobs: list[PositionLogprobs] | None = None
        """Of the chunks that were computed, until the prompt is done; None when not asked for."""

        # Filled by the planner.
        self.status = SequenceStatus.WAITING
        self.num_dispatched_tokens = 0
        """Like ``num_computed_tokens``, with the steps in flight: where the next step goes on. The two are equal
        exactly when no step in flight contains this sequence."""
        self.num_expected_tokens = len(self.token_ids)
        """Tokens that can be scheduled: those known, and one for each step in flight that samples one, if it may be run
        before its value is known. A stop that is found late makes the last of them, and its slot, useless."""
        self.num_cached_tokens = 0
        """Prompt tokens that came from the prefix cache when the request was first admitted."""
        self.num_preemptions = 0
        self.is_in_batch = False
        """Whether the workers have been told of it, and not yet that it left."""

        # Filled by the quarantine: None unless a step with this sequence raised.
        self.suspect_until_tokens: int | None = None
        """A suspect runs alone until this many of its tokens are computed: past the place of the failure."""

        # Filled by the KV-cache manager; set right after construction.
        self.blocks: RequestBlocks

    @property
    def is_in_flight(self) -> bool:
        return self.num_dispatched_tokens != self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def needs_every_position(self) -> bool:
        """Whether prompt log-probabilities are still due, for which no position may come from the cache."""
        return self.request.params.prompt_logprobs is not None and not self.is_prompt_done

    def extend(self, token_ids: list[int]) -> FinishReason | None:
        """Adds sampled tokens up to the one that the request ends with, and says why it ends, if it does.

        A stop token is kept. One that comes among the first ``min_tokens`` outputs ends nothing.
        """
        known, stop_token_ids = self.token_ids, self.stop_token_ids
        num_output_tokens = len(known) - self.num_prompt_tokens
        for token_id in token_ids:
            known.append(token_id)
            num_output_tokens += 1
            if token_id in stop_token_ids and num_output_tokens > self.min_tokens:
                return FinishReason.STOP
            if num_output_tokens >= self.max_tokens:
                return FinishReason.LENGTH
        return None

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id!r}, {self.status.value}, "
            f"{self.num_computed_tokens} of {len(self.token_ids)} tokens computed)"
        )
