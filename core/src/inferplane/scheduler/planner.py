"""`StepPlanner`: divides one step's token budget and the free blocks among the requests."""

from __future__ import annotations

from itertools import islice

from inferplane.kvcache import CachedPrefix, PromisedBlocks
from inferplane.scheduler.sequence import Sequence
from inferplane.scheduler.state import SchedulerState

MIN_CHUNK_SHARE = 8
"""No chunk is cut below this part of what decoding leaves of the budget for the sake of requests behind it."""

FEW_STREAMS_SHARE = 8
"""Requests that decode are few while they are no more than this part of ``max_num_seqs``."""

MOST_WHOLE_STEPS = 4
"""In so many steps in a row prompts may have all of the budget although a few requests decode."""

MAX_DEFERRED = 64
"""Most waiting requests that are passed over in one step, so that a long queue costs no more than a short one."""


class DraftStep:
    """A step while it is planned."""

    __slots__ = ("admitted", "budget", "is_memory_short", "min_chunk_tokens", "new_block_ids", "num_tokens")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        """Tokens not yet given away."""
        self.min_chunk_tokens = 1
        self.num_tokens: dict[Sequence, int] = {}
        """Of each sequence in this step, in the order in which they were chosen."""
        self.new_block_ids: dict[Sequence, list[list[int]]] = {}
        """Of sequences that were in the batch before."""
        self.admitted: list[Sequence] = []
        self.is_memory_short = False
        """Whether someone was preempted or got no block: then nobody new comes in."""


class StepPlanner:
    """Who runs how many tokens in the next step.

    1. Each running request that needs one token gets it, in order. The batch never holds more requests than the budget
       has tokens, so **every decoding request gets a token in every step** in which the pool has a block for it (only
       when the pool is exhausted do younger ones wait for older ones).
    2. Running requests that need more (long prompts) get chunks, in order, and then waiting ones are admitted. What
       they get together may be limited while others decode, because these wait for the step with their token; but not
       while these are few, and fewer than those with a prompt, for a few steps in a row: of requests that come at
       once, the first would else keep the others waiting for many short steps. As long as others wait behind it, a
       chunk takes at most half of what is left, though no less than an eighth of what all prompts have. So a prompt of
       at most that eighth gets its first token from the step after its arrival, **however long the prompts ahead of it
       are, if those are three or fewer**; and what nobody behind could use goes back to the first whose chunk was cut.

    A waiting request whose next block is just being computed for another is passed over until it can share it: of many
    requests with one long prompt, the first computes it and the others find it in the prefix cache.

    Memory: a request is admitted when the pool has room for all its tokens so far, on top of what those in the batch
    will need for theirs. A request that needs a block when none is free takes it from the last in order, which is
    preempted, but never from one before itself. So the first one always moves on, and everybody is first one day.
    Blocks that a step in flight writes come back with its result; whoever needs them stands still until then.

    With ``runs_whole`` no prompt is cut: one that does not fit in what is left of the budget waits for the next step,
    and so do those behind it.
    """

    def __init__(
        self,
        state: SchedulerState,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        *,
        runs_whole: bool = False,
        max_num_mixed_prompt_tokens: int | None = None,
    ) -> None:
        self._state = state
        self._kv = state.kv
        self._max_num_batched_tokens = max_num_batched_tokens
        self._runs_whole = runs_whole
        self._max_num_mixed_prompt_tokens = max_num_mixed_prompt_tokens or max_num_batched_tokens
        self._num_few_streams = max_num_seqs // FEW_STREAMS_SHARE
        self._num_whole_steps = 0
        self.max_num_running = min(max_num_seqs, max_num_batched_tokens)
        """Most requests in the batch: so many that each could get a token in one step."""

    def plan_batch(self) -> DraftStep:
        """A step for everybody. It may turn out empty."""
        draft = DraftStep(self._max_num_batched_tokens)
        prefills = self._schedule_decodes(draft)
        if self._limits_prompts(len(draft.num_tokens), len(prefills) + len(self._state.waiting)):
            draft.budget = min(draft.budget, self._max_num_mixed_prompt_tokens)
        draft.min_chunk_tokens = max(1, draft.budget // MIN_CHUNK_SHARE)
        cut: list[tuple[Sequence, int]] = []
        promised = self._kv.promised()
        for index, sequence in enumerate(prefills):
            if not sequence.is_in_batch:
                continue  # preempted by one before it
            num_needed = sequence.num_expected_tokens - sequence.num_dispatched_tokens
            is_last = index + 1 == len(prefills) and not self._has_candidate()
            num_tokens = _chunk(draft, num_needed, is_last)
            if num_tokens == 0:
                promised.add(sequence.blocks, len(sequence.token_ids))
                continue
            if self._grow(draft, sequence, num_tokens) and num_tokens < num_needed:
                promised.add(sequence.blocks, len(sequence.token_ids))
                cut.append((sequence, num_needed - num_tokens))
        if not draft.is_memory_short:
            self._admit_waiting(draft, cut, promised)
        self._return_rest(draft, cut)
        return draft

    def _limits_prompts(self, num_decoding: int, num_prompts: int) -> bool:
        """Whether what prompts get in a step with so many decoding requests is limited."""
        is_burst = num_decoding <= self._num_few_streams and num_decoding < num_prompts
        self._num_whole_steps = self._num_whole_steps + 1 if is_burst and num_decoding else 0
        return not is_burst or self._num_whole_steps > MOST_WHOLE_STEPS

    def plan_alone(self, sequence: Sequence) -> DraftStep:
        """A step for one request, whatever it takes from the others."""
        draft = DraftStep(self._max_num_batched_tokens)
        if not sequence.is_in_batch:
            prefix = self._find_prefix(sequence)
            num_tokens = min(len(sequence.token_ids) - prefix.num_tokens, draft.budget)
            while self._kv.allocate(sequence.blocks, prefix.num_tokens + num_tokens, prefix) is None:
                self._state.preempt(next(reversed(self._state.running)))
                prefix = self._find_prefix(sequence)
                num_tokens = min(len(sequence.token_ids) - prefix.num_tokens, draft.budget)
            self._admit(draft, sequence, prefix.num_tokens, num_tokens)
            return draft
        num_tokens = min(len(sequence.token_ids) - sequence.num_dispatched_tokens, draft.budget)
        while (
            new_ids := self._kv.allocate(sequence.blocks, sequence.num_dispatched_tokens + num_tokens)
        ) is None:
            self._state.preempt(
                next(other for other in reversed(self._state.running) if other is not sequence)
            )
        if any(new_ids):
            draft.new_block_ids[sequence] = new_ids
        _give(draft, sequence, num_tokens)
        return draft

    def _schedule_decodes(self, draft: DraftStep) -> list[Sequence]:
        """One token for each running request that needs one; returns those that need more. The hot loop."""
        num_tokens = draft.num_tokens
        prefills = []
        for sequence in self._state.running:
            num_dispatched = sequence.num_dispatched_tokens
            num_needed = sequence.num_expected_tokens - num_dispatched
            if num_needed == 1:
                if num_dispatched < sequence.blocks.capacity_tokens:
                    sequence.num_dispatched_tokens = num_dispatched + 1
                    num_tokens[sequence] = 1
                    draft.budget -= 1
                else:
                    self._grow(draft, sequence, 1)
            elif num_needed > 1:
                prefills.append(sequence)
        return prefills

    def _has_candidate(self) -> bool:
        return len(self._state.waiting) > 0 and len(self._state.running) < self.max_num_running

    def _grow(self, draft: DraftStep, sequence: Sequence, num_tokens: int) -> bool:
        """Schedules more tokens of a running request; preempts later ones for its blocks. False when that was not
        enough: the request keeps what it has and stands still."""
        new_ids = self._kv.allocate(sequence.blocks, sequence.num_dispatched_tokens + num_tokens)
        while new_ids is None:
            draft.is_memory_short = True
            if not self._preempt_after(draft, sequence):
                return False
            new_ids = self._kv.allocate(sequence.blocks, sequence.num_dispatched_tokens + num_tokens)
        if any(new_ids):
            draft.new_block_ids[sequence] = new_ids
        _give(draft, sequence, num_tokens)
        return True

    def _preempt_after(self, draft: DraftStep, sequence: Sequence) -> bool:
        """Preempts the last request in order, if that is later than this one. Whether blocks are free now: those of a
        request that a step in flight writes come back with its result, and until then nobody else is preempted."""
        state = self._state
        victim = next(reversed(state.running))
        if state.leaving or victim is sequence:
            return False
        # What this draft gave the victim is not in flight yet: it is taken back.
        num_given = draft.num_tokens.pop(victim, 0)
        draft.new_block_ids.pop(victim, None)
        draft.budget += num_given
        victim.num_dispatched_tokens -= num_given
        state.preempt(victim)
        return victim not in state.leaving

    def _admit_waiting(
        self, draft: DraftStep, cut: list[tuple[Sequence, int]], promised: PromisedBlocks
    ) -> None:
        """New requests, in order, until the budget, the places in the batch or the blocks are used up."""
        if not self._has_candidate():
            return
        pending = self._pending_hashes()
        candidates = list(islice(self._state.waiting, self.max_num_running + MAX_DEFERRED))
        num_deferred = 0
        for index, sequence in enumerate(candidates):
            num_places = self.max_num_running - len(self._state.running)
            if draft.budget == 0 or num_places == 0 or num_deferred > MAX_DEFERRED:
                return
            if sequence.is_in_flight:
                return  # preempted just now; memory is short
            num_known = len(sequence.token_ids)
            prefix = self._find_prefix(sequence)
            if self._is_next_block_pending(sequence, prefix, pending):
                num_deferred += 1
                continue
            if not promised.leave_room_for(sequence.blocks, num_known, prefix):
                return
            num_needed = num_known - prefix.num_tokens
            if self._runs_whole and num_needed > draft.budget:
                return
            is_last = index + 1 == len(candidates) or num_places == 1
            num_tokens = num_needed if self._runs_whole else _chunk(draft, num_needed, is_last)
            end_tokens = prefix.num_tokens + num_tokens
            added = self._kv.allocate(sequence.blocks, end_tokens, prefix)
            assert added is not None, "blocks that were counted as free could not be allocated"
            self._admit(draft, sequence, prefix.num_tokens, num_tokens)
            pending.update(self._kv.block_hashes(sequence.blocks, prefix.num_tokens, end_tokens))
            if num_tokens < num_needed:
                promised.add(sequence.blocks, num_known)
                cut.append((sequence, num_needed - num_tokens))

    def _pending_hashes(self) -> set[bytes]:
        """Identities of the prompt blocks that this step, or one in flight, is about to fill."""
        pending: set[bytes] = set()
        for sequence in self._state.running:
            # A token that is not known yet is an output, and the last one expected.
            start = sequence.num_computed_tokens
            end = min(sequence.num_dispatched_tokens, len(sequence.token_ids))
            if end - start > 1:
                pending.update(self._kv.block_hashes(sequence.blocks, start, end))
        return pending

    def _is_next_block_pending(self, sequence: Sequence, prefix: CachedPrefix, pending: set[bytes]) -> bool:
        if not pending or sequence.needs_every_position:
            return False
        # The block with the last token is of no use, because that token has to run in any case.
        num_sharable = len(sequence.token_ids) - 1
        start = prefix.num_tokens
        hashes = self._kv.block_hashes(sequence.blocks, start, min(start + self._kv.block_size, num_sharable))
        return bool(hashes) and hashes[0] in pending

    def _return_rest(self, draft: DraftStep, cut: list[tuple[Sequence, int]]) -> None:
        """Budget that those behind did not use goes to the first that had to leave it."""
        for sequence, num_missing in cut:
            num_tokens = min(num_missing, draft.budget)
            if num_tokens == 0 or draft.is_memory_short:
                return
            new_ids = self._kv.allocate(sequence.blocks, sequence.num_dispatched_tokens + num_tokens)
            if new_ids is None:
                return
            if sequence in draft.new_block_ids:
                for earlier, new in zip(draft.new_block_ids[sequence], new_ids, strict=True):
                    earlier.extend(new)
            elif any(new_ids) and sequence not in draft.admitted:
                draft.new_block_ids[sequence] = new_ids
            _give(draft, sequence, num_tokens)

    def _find_prefix(self, sequence: Sequence) -> CachedPrefix:
        if sequence.needs_every_position:
            return self._kv.empty_prefix()
        return self._kv.find_cached_prefix(sequence.blocks, len(sequence.token_ids))

    def _admit(self, draft: DraftStep, sequence: Sequence, num_cached_tokens: int, num_tokens: int) -> None:
        self._state.admit(sequence, num_cached_tokens)
        draft.admitted.append(sequence)
        _give(draft, sequence, num_tokens)


def _chunk(draft: DraftStep, num_needed: int, is_last: bool) -> int:
    if is_last:
        return min(num_needed, draft.budget)
    return min(num_needed, draft.budget, max(draft.budget // 2, draft.min_chunk_tokens))


def _give(draft: DraftStep, sequence: Sequence, num_tokens: int) -> None:
    sequence.num_dispatched_tokens += num_tokens
    draft.num_tokens[sequence] = draft.num_tokens.get(sequence, 0) + num_tokens
    draft.budget -= num_tokens
