"""`SchedulerState`: where every request is, and the moves from one place to another."""

from __future__ import annotations

from collections import Counter

from inferplane.kvcache import KVCacheManager
from inferplane.request import EngineOutput, FinishReason
from inferplane.scheduler.queue import SequenceQueue
from inferplane.scheduler.sequence import Sequence, SequenceStatus


class SchedulerState:
    """A live sequence is in exactly one of: ``running``; ``waiting``; ``suspects`` alone, or with ``running``."""

    def __init__(self, kv: KVCacheManager) -> None:
        self.kv = kv
        self.by_id: dict[str, Sequence] = {}
        """Every sequence that is not finished."""
        self.waiting = SequenceQueue()
        self.running = SequenceQueue()
        self.suspects = SequenceQueue()
        """Sequences to run alone, because a step with them raised. The batch stands still until none is left."""
        self.leaving: set[Sequence] = set()
        """Sequences outside the batch whose blocks come back with the result of a step in flight."""
        self.removed_request_ids: list[str] = []
        """Left the batch since the last plan."""
        self.num_preemptions = 0
        self.num_prefix_query_tokens = 0
        self.num_prefix_hit_tokens = 0
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.num_finished: Counter[str] = Counter()

    @property
    def num_waiting(self) -> int:
        return len(self.by_id) - len(self.running)

    def enqueue(self, sequence: Sequence) -> None:
        self.by_id[sequence.request_id] = sequence
        self.waiting.push(sequence)

    def admit(self, sequence: Sequence, num_cached_tokens: int) -> None:
        """Into the batch, with its first tokens found in the prefix cache. Its blocks are allocated already."""
        assert not sequence.is_in_flight, (
            f"{sequence!r} is admitted, but an earlier step still writes its blocks"
        )
        if sequence.suspect_until_tokens is None:
            self.waiting.remove(sequence)
        if sequence.num_preemptions == 0 and sequence.suspect_until_tokens is None:
            sequence.num_cached_tokens = num_cached_tokens
            self.num_prefix_hit_tokens += num_cached_tokens
            if self.kv.enable_prefix_caching and not sequence.needs_every_position:
                self.num_prefix_query_tokens += sequence.num_prompt_tokens
        if sequence.needs_every_position:
            sequence.prompt_logprobs = []
        sequence.num_computed_tokens = sequence.num_dispatched_tokens = num_cached_tokens
        sequence.num_expected_tokens = len(sequence.token_ids)
        sequence.status = SequenceStatus.RUNNING
        sequence.is_in_batch = True
        self.running.push(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Out of the batch, to be computed again from the start; back to its place among the waiting."""
        self.num_preemptions += 1
        sequence.num_preemptions += 1
        self._leave_batch(sequence)
        if sequence.suspect_until_tokens is None:
            self.waiting.push(sequence)

    def quarantine(self, sequence: Sequence, until_tokens: int) -> None:
        """Out of the batch, and alone until this many of its tokens are computed."""
        if sequence.suspect_until_tokens is None:
            self.suspects.push(sequence)
        sequence.suspect_until_tokens = until_tokens
        self._leave_batch(sequence)

    def acquit(self, sequence: Sequence) -> None:
        """A suspect that passed, and is in the batch."""
        self.suspects.remove(sequence)
        sequence.suspect_until_tokens = None

    def finish(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> EngineOutput:
        """Returns an output that says so and carries no tokens."""
        if sequence.suspect_until_tokens is not None:
            self.suspects.remove(sequence)
        elif sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
        if sequence.status is SequenceStatus.RUNNING:
            self._leave_batch(sequence)
        sequence.status = SequenceStatus.FINISHED
        del self.by_id[sequence.request_id]
        self.num_finished[reason.value] += 1
        return EngineOutput(
            request_id=sequence.request_id,
            new_token_ids=[],
            finish_reason=reason,
            error=error,
            num_cached_tokens=sequence.num_cached_tokens,
        )

    def _leave_batch(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        sequence.status = SequenceStatus.WAITING
        if sequence.is_in_batch:
            self.removed_request_ids.append(sequence.request_id)
            sequence.is_in_batch = False
        self.release_blocks(sequence)

    def release_blocks(self, sequence: Sequence) -> None:
        """Of a sequence outside the batch; does nothing as long as a step in flight contains it, because workers still
        write its blocks. Whoever takes that step out of flight calls again."""
        if sequence.is_in_flight:
            self.leaving.add(sequence)
            return
        self.leaving.discard(sequence)
        self.kv.free(sequence.blocks)
        sequence.num_computed_tokens = sequence.num_dispatched_tokens = 0
