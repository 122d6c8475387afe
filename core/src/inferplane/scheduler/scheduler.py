"""`Scheduler`: takes requests, plans steps, and turns what came of them into outputs."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping

from inferplane.api.kv import KVCacheConfig, KVCacheSpec
from inferplane.config.engine import CacheConfig, SchedulerConfig
from inferplane.kvcache import KVCacheListener, KVCacheManager
from inferplane.kvcache.managers import GroupManager
from inferplane.plan import NewRequest, StepPlan, StepResult
from inferplane.request import EngineOutput, EngineRequest, FinishReason
from inferplane.scheduler.errors import QueueFullError, RequestTooLargeError
from inferplane.scheduler.planner import DraftStep, StepPlanner
from inferplane.scheduler.queue import BUILTIN_POLICIES, SchedulerPolicy
from inferplane.scheduler.sequence import Sequence, SequenceStatus
from inferplane.scheduler.state import SchedulerState
from inferplane.scheduler.stats import SchedulerStats


class Scheduler:
    """The engine's loop is: ``plan = schedule()``, execute it, then ``update(plan, result)`` or, if executing raised,
    ``fail_step(plan, error)``. Requests may be added and aborted at any moment between these calls.

    Several plans may be in flight if the workers execute them in order: each plan that `schedule` returned must be
    answered by `update` or `fail_step`, in order, exactly once. With ``async_scheduling`` a request whose next token is
    still in flight is planned for as if that were known, as far as nobody on the host has to look at it (see
    `EngineRequest.reads_its_output`) and more tokens are to follow; without, it is left out of the plans after it. A
    stop that turns out to lie in the token in flight ends the request there, and what was computed beyond is dropped.

    How tokens, blocks and places are divided, and what bounds that gives, is in `StepPlanner`.
    """

    def __init__(
        self,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        max_model_len: int,
        kv_config: KVCacheConfig,
        *,
        seed: int = 0,
        policies: Mapping[str, SchedulerPolicy] | None = None,
        managers: Mapping[type[KVCacheSpec], type[GroupManager]] | None = None,
        kv_listener: KVCacheListener | None = None,
        runs_whole: bool = False,
    ) -> None:
        """``policies`` and ``managers`` are those that plugins bring, by name and by spec class. ``seed`` is the
        engine's, from which requests without one draw theirs. ``kv_listener`` hears what enters and leaves the prefix
        cache. With ``runs_whole`` a prompt is computed in one step, because its tokens see those behind them.

        Raises `ValueError` for an unknown policy or a limit below 1, `LookupError` for a KV spec without a manager.
        """
        known_policies = {**BUILTIN_POLICIES, **(policies or {})}
        if scheduler_config.policy not in known_policies:
            raise ValueError(
                f"scheduler_policy {scheduler_config.policy!r} is unknown; "
                f"there are {', '.join(sorted(known_policies))}"
            )
        limits = ("max_num_seqs", "max_num_batched_tokens", "max_num_mixed_prompt_tokens", "max_num_waiting")
        for name in limits:
            value = getattr(scheduler_config, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self._policy = known_policies[scheduler_config.policy]
        self._max_num_waiting = scheduler_config.max_num_waiting
        self._max_model_len = max_model_len
        self._kv = KVCacheManager(
            kv_config,
            enable_prefix_caching=cache_config.enable_prefix_caching,
            max_step_tokens=scheduler_config.max_num_batched_tokens,
            more_managers=managers,
            listener=kv_listener,
        )
        self._state = SchedulerState(self._kv)
        self._max_whole_tokens = scheduler_config.max_num_batched_tokens if runs_whole else max_model_len
        self._planner = StepPlanner(
            self._state,
            scheduler_config.max_num_seqs,
            scheduler_config.max_num_batched_tokens,
            runs_whole=runs_whole,
            max_num_mixed_prompt_tokens=scheduler_config.max_num_mixed_prompt_tokens,
        )
        self._runs_ahead = scheduler_config.async_scheduling
        self._seeds = random.Random(seed)
        self._num_arrivals = 0
        self._num_steps = 0
        self._in_flight: dict[int, dict[Sequence, int]] = {}
        """Steps without an answer, oldest first: for each the tokens of each sequence."""

    # Requests in

    def add(self, request: EngineRequest) -> None:
        """Queues a request.

        Raises `ValueError` for an empty prompt or the id of a live request, `RequestTooLargeError` for one that could
        never be served to its end, and `QueueFullError` when the limit of waiting requests is reached.
        """
        if not request.prompt_token_ids:
            raise ValueError(
                f"request {request.request_id!r} has no prompt tokens; a prompt has at least one"
            )
        if request.request_id in self._state.by_id:
            raise ValueError(
                f"request id {request.request_id!r} is in use by a request that has not finished"
            )
        self._check_size(request)
        self._check_queue()
        seed = request.params.seed
        if seed is None:
            seed = self._seeds.getrandbits(63)
        self._num_arrivals += 1
        order = (self._policy.order_key(request), self._num_arrivals)
        sequence = Sequence(request, order, seed, runs_ahead=self._runs_ahead)
        sequence.blocks = self._kv.open(sequence.token_ids, (request.cache_salt,))
        self._state.enqueue(sequence)

    def _check_size(self, request: EngineRequest) -> None:
        num_prompt, max_tokens = len(request.prompt_token_ids), request.max_tokens
        if num_prompt + max_tokens > self._max_model_len:
            raise RequestTooLargeError(
                "prompt" if num_prompt >= self._max_model_len else "max_tokens",
                f"a prompt of {num_prompt} tokens and max_tokens of {max_tokens} make {num_prompt + max_tokens}, but "
                f"the context holds {self._max_model_len} tokens: shorten the prompt or lower max_tokens",
            )
        if num_prompt > self._max_whole_tokens:
            raise RequestTooLargeError(
                "prompt",
                f"a prompt of {num_prompt} tokens does not fit in one step, which reads it as a whole: it "
                f"may have {self._max_whole_tokens} tokens. Shorten it, or start with more max_num_batched_tokens",
            )
        # The last output token is never run, so it needs no slot.
        num_slots = num_prompt + max(max_tokens - 1, 0)
        shortage = self._kv.shortage(num_slots)
        if shortage is not None:
            num_needed, num_blocks = shortage
            raise RequestTooLargeError(
                "prompt" if self._kv.shortage(num_prompt) is not None else "max_tokens",
                f"a prompt of {num_prompt} tokens and max_tokens of {max_tokens} need {num_needed} KV blocks, but "
                f"there are {num_blocks} in all: shorten the prompt, lower max_tokens, or start with a larger "
                "kv_cache_bytes",
            )

    def _check_queue(self) -> None:
        limit = self._max_num_waiting
        if limit is None:
            return
        # Those for whom a place in the batch is free only wait for the next step.
        num_places = self._planner.max_num_running - len(self._state.running)
        if self._state.num_waiting - num_places >= limit:
            raise QueueFullError(
                f"{self._state.num_waiting} requests wait already and max_num_waiting is {limit}: try again later"
            )

    def abort(self, request_ids: Iterable[str]) -> list[EngineOutput]:
        """Ends requests wherever they are, and says so of each; ids that are unknown or finished are ignored."""
        sequences = [self._state.by_id.get(request_id) for request_id in dict.fromkeys(request_ids)]
        return [
            self._state.finish(sequence, FinishReason.ABORT) for sequence in sequences if sequence is not None
        ]

    # Steps out

    def schedule(self) -> StepPlan | None:
        """The next step, or None when there is nothing that could run now.

        While no plan is in flight, None means that there is no request at all.
        """
        state = self._state
        if state.suspects:
            if self._in_flight:
                return None  # a suspect shares no step, so those before it come back first
            draft = self._planner.plan_alone(state.suspects.first)
        else:
            draft = self._planner.plan_batch()
        if not draft.num_tokens:
            return None
        if self._runs_ahead:
            for sequence in draft.num_tokens:
                num_expected = sequence.num_expected_tokens
                if sequence.num_dispatched_tokens == num_expected < sequence.run_ahead_until_tokens:
                    sequence.num_expected_tokens = num_expected + 1
        self._num_steps += 1
        plan = _plan_of(draft, self._num_steps, state.removed_request_ids)
        state.removed_request_ids = []
        self._in_flight[plan.step_id] = draft.num_tokens
        return plan

    # Results in

    def update(self, plan: StepPlan, result: StepResult) -> list[EngineOutput]:
        """Takes in what a step computed; returns what is new, of each request that got a token or finished.

        Raises `ValueError` for a plan that is not in flight, or a result of another.
        """
        if result.step_id != plan.step_id:
            raise ValueError(f"the result is of step {result.step_id}, but the plan is step {plan.step_id}")
        state, kv, running, errors = self._state, self._kv, SequenceStatus.RUNNING, result.errors
        outputs: list[EngineOutput] = []
        for sequence, num_tokens in self._take_in_flight(plan).items():
            sequence.num_computed_tokens = num_computed = sequence.num_computed_tokens + num_tokens
            if sequence.status is not running:
                state.release_blocks(sequence)
                continue
            if errors and sequence.request_id in errors:
                outputs.append(state.finish(sequence, FinishReason.ERROR, errors[sequence.request_id]))
                continue
            if num_computed >= sequence.blocks.settle_at_tokens:
                kv.settle(sequence.blocks, num_computed)
            if sequence.prompt_logprobs is not None:
                sequence.prompt_logprobs.extend(result.prompt_logprobs.get(sequence.request_id, ()))
            if num_computed == len(sequence.token_ids):
                outputs.append(self._output_of(sequence, result))
        if state.suspects:
            self._acquit(state.suspects.first)
        return outputs

    def fail_step(self, plan: StepPlan, error: BaseException | str) -> list[EngineOutput]:
        """Says that executing a plan raised, so that nothing it was to compute exists.

        A step does not tell whose fault it was. So its requests leave the batch and run again from the start, one at
        a time in steps of their own, until each is past the place where the step failed; the one whose lone step
        raises finishes with an error, and the others go on as if nothing had happened. Returns the output of that
        one, if there is one.

        The next plan removes from the workers' batch whatever the failed plan named, whether they had got to adding
        it or not.
        """
        state = self._state
        step = self._take_in_flight(plan)
        state.removed_request_ids[:0] = [
            request_id
            for request_id in plan.removed_request_ids
            if request_id not in state.by_id or not state.by_id[request_id].is_in_batch
        ]
        outputs: list[EngineOutput] = []
        for sequence, num_tokens in step.items():
            sequence.num_computed_tokens += num_tokens
            if sequence.status is not SequenceStatus.RUNNING:
                state.release_blocks(sequence)
            elif sequence.suspect_until_tokens is not None:
                # A suspect has its steps to itself.
                outputs.append(state.finish(sequence, FinishReason.ERROR, f"the model step raised: {error}"))
            else:
                state.quarantine(sequence, until_tokens=sequence.num_computed_tokens)
        return outputs

    def _take_in_flight(self, plan: StepPlan) -> dict[Sequence, int]:
        if not self._in_flight:
            raise ValueError(f"step {plan.step_id} is not in flight; no step is")
        oldest = next(iter(self._in_flight))
        if plan.step_id != oldest:
            raise ValueError(f"step {plan.step_id} is answered, but the oldest step in flight is {oldest}")
        return self._in_flight.pop(oldest)

    def _output_of(self, sequence: Sequence, result: StepResult) -> EngineOutput:
        """What is new of a sequence all of whose known tokens are computed: its next token, or its end."""
        request_id = sequence.request_id
        prompt_logprobs = None
        if not sequence.is_prompt_done:
            sequence.is_prompt_done = True
            self._state.num_prompt_tokens += sequence.num_prompt_tokens
            if sequence.prompt_logprobs is not None:
                prompt_logprobs = [None, *sequence.prompt_logprobs]
                sequence.prompt_logprobs = None
                if len(prompt_logprobs) != sequence.num_prompt_tokens:
                    return self._fail_request(
                        sequence,
                        f"the workers returned {len(prompt_logprobs) - 1} prompt log-probabilities for "
                        f"{sequence.num_prompt_tokens} prompt tokens",
                    )
            if sequence.request.pooling is not None:
                return self._pooled_output_of(sequence, result)
            if sequence.max_tokens == 0:
                output = self._state.finish(sequence, FinishReason.LENGTH)
                output.prompt_logprobs = prompt_logprobs
                return output
        token_ids = result.sampled_token_ids.get(request_id)
        if not token_ids:
            return self._fail_request(
                sequence, "the workers returned no token, though all tokens were computed"
            )
        num_known = sequence.num_computed_tokens
        reason = sequence.extend(token_ids)
        logprobs = result.logprobs.get(request_id) if result.logprobs else None
        if reason is None:
            num_new = len(token_ids)
            if sequence.num_expected_tokens < num_known + num_new:
                sequence.num_expected_tokens = num_known + num_new
            self._state.num_generated_tokens += num_new
            output = EngineOutput(
                request_id=request_id, new_token_ids=token_ids, num_cached_tokens=sequence.num_cached_tokens
            )
            if logprobs is not None:
                output.logprobs = logprobs
            if prompt_logprobs is not None:
                output.prompt_logprobs = prompt_logprobs
            return output
        num_taken = len(sequence.token_ids) - num_known
        self._state.num_generated_tokens += num_taken
        output = self._state.finish(sequence, reason)
        output.new_token_ids = token_ids[:num_taken]
        output.logprobs = logprobs[:num_taken] if logprobs is not None else None
        output.prompt_logprobs = prompt_logprobs
        output.stop_token_id = sequence.token_ids[-1] if reason is FinishReason.STOP else None
        return output

    def _pooled_output_of(self, sequence: Sequence, result: StepResult) -> EngineOutput:
        pooled = result.pooled.get(sequence.request_id)
        if pooled is None:
            return self._fail_request(
                sequence, "the workers returned no vector, though all tokens were computed"
            )
        output = self._state.finish(sequence, FinishReason.STOP)
        output.pooled = pooled
        return output

    def _fail_request(self, sequence: Sequence, error: str) -> EngineOutput:
        return self._state.finish(sequence, FinishReason.ERROR, error)

    def _acquit(self, sequence: Sequence) -> None:
        until_tokens = sequence.suspect_until_tokens
        assert until_tokens is not None, f"{sequence!r} is in quarantine without a place to pass"
        if sequence.is_in_batch and sequence.num_computed_tokens >= until_tokens:
            self._state.acquit(sequence)

    # Figures and switches

    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._state.by_id)

    @property
    def max_request_tokens(self) -> int:
        """The most tokens of prompt and output together that a request can have here: what the context allows and the
        pool can hold."""
        low, high = 0, self._max_model_len
        while low < high:  # the pool's limit depends on the mix of groups, so it is searched for
            middle = (low + high + 1) // 2
            if self._kv.shortage(middle - 1) is None:
                low = middle
            else:
                high = middle - 1
        return low

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix, for use after something that all KV depends on has changed."""
        self._kv.reset_prefix_cache()

    def stats(self) -> SchedulerStats:
        state, kv = self._state, self._kv
        return SchedulerStats(
            num_running=len(state.running),
            num_waiting=state.num_waiting,
            num_blocks=kv.num_blocks,
            num_free_blocks=kv.num_free_blocks,
            kv_usage=kv.usage,
            num_preemptions=state.num_preemptions,
            num_prefix_query_tokens=state.num_prefix_query_tokens,
            num_prefix_hit_tokens=state.num_prefix_hit_tokens,
            num_prompt_tokens=state.num_prompt_tokens,
            num_generated_tokens=state.num_generated_tokens,
            num_finished=dict(state.num_finished),
        )


def _plan_of(draft: DraftStep, step_id: int, removed_request_ids: list[str]) -> StepPlan:
    """What workers need to know of a draft. Shares no list with the scheduler: a worker may keep what it is given."""
    return StepPlan(
        step_id=step_id,
        removed_request_ids=removed_request_ids,
        new_requests=[_new_request(sequence) for sequence in draft.admitted],
        new_block_ids={sequence.request_id: ids for sequence, ids in draft.new_block_ids.items()},
        num_scheduled_tokens={sequence.request_id: num for sequence, num in draft.num_tokens.items()},
    )


def _new_request(sequence: Sequence) -> NewRequest:
    request = sequence.request
    return NewRequest(
        request_id=sequence.request_id,
        token_ids=list(sequence.token_ids),
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_computed_tokens=sequence.num_computed_tokens,
        block_ids=[list(ids) for ids in sequence.blocks.block_ids],
        params=request.params,
        seed=sequence.seed,
        max_tokens=sequence.max_tokens,
        eos_token_ids=request.eos_token_ids,
        bad_words_token_ids=request.bad_words_token_ids,
        pooling=request.pooling,
        second_text_start=request.second_text_start,
    )
