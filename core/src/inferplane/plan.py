"""The two objects that cross between the scheduler and the workers: what to run, and what came of it.

Host data only, encoded with msgpack when the workers live in processes of their own. A plan carries
differences: a worker keeps a row for each request it has been told of, and a plan names only what is new.
"""

from __future__ import annotations

import msgspec

from inferplane.request import PoolingParams, PositionLogprobs, SamplingParams


class NewRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that enters the workers' batch, for the first time or again after preemption."""

    request_id: str
    token_ids: list[int]
    """Prompt, and after preemption also the output so far."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Tokens whose KV is in the blocks already (prefix hit)."""
    block_ids: list[list[int]]
    """For each KV group the blocks in order: those of the prefix hit, then those for this step."""
    params: SamplingParams
    seed: int
    """Always set: the caller's, or one drawn for the request. With the output position it fixes every draw,
    so that a token does not depend on batch neighbours, preemption or the rank that draws it."""
    max_tokens: int
    eos_token_ids: list[int] = []
    bad_words_token_ids: list[list[int]] = []
    pooling: PoolingParams | None = None
    """Asks for a vector when all tokens are computed, in place of a token."""
    second_text_start: int | None = None
    """Of a pair of texts, the first token of the second."""


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One step: each request named in ``num_scheduled_tokens`` moves that many tokens forward.

    Workers apply it in this order: drop ``removed_request_ids``, add ``new_requests``, append ``new_block_ids``,
    then run the tokens ``[num_computed, num_computed + num_scheduled)`` of each request. A request whose scheduled
    tokens reach the end of its known tokens gets its next token sampled.
    """

    step_id: int
    removed_request_ids: list[str] = []
    """Finished, aborted or preempted since the last plan. After a step that raised, ids that the worker never got to
    adding may be among them: it ignores those."""
    new_requests: list[NewRequest] = []
    new_block_ids: dict[str, list[list[int]]] = {}
    """Requests already in the batch that got more blocks: for each KV group the added ids."""
    num_scheduled_tokens: dict[str, int] = {}
    """In the order in which the scheduler chose them."""

    @property
    def num_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


class StepResult(msgspec.Struct, kw_only=True):
    """What the workers computed for one plan."""

    step_id: int
    sampled_token_ids: dict[str, list[int]]
    """Only requests that reached the end of their known tokens. The worker has appended these already."""
    logprobs: dict[str, list[PositionLogprobs]] = {}
    """For requests that asked, one entry for each sampled token."""
    prompt_logprobs: dict[str, list[PositionLogprobs]] = {}
    """For requests that asked: entries for the prompt tokens *predicted* by this step's tokens, in order.
    The token at position 0 is predicted by nothing and has no entry."""
    pooled: dict[str, bytes] = {}
    """For requests with ``pooling`` that reached their end: the numbers in float32, the lowest byte first."""
    errors: dict[str, str] = {}
    """Requests whose own processing failed (a logits processor that raised, say); others are unaffected."""
