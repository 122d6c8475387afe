"""A worker without a model that verifies every plan, and an engine loop around it and a scheduler.

The worker keeps a simulated KV memory. A slot holds the identity of the whole prefix that ends at its token, and a
request that attends to a position must find exactly its own prefix there; a state holds the identity of the prefix that
it stands for, and a request must find its own in the block that it goes on from. So a block that is handed out twice,
freed too early, shared wrongly or cached before it was computed shows up as a wrong value, in the step that reads it.

The next token is a hash of seed and tokens, so the right answer to a request does not depend on any schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b

from inferplane.api.kv import KVCacheConfig, KVCacheSpec, StateSpec
from inferplane.plan import NewRequest, StepPlan, StepResult
from inferplane.request import EngineOutput, EngineRequest, FinishReason, PositionLogprobs, TokenLogprob
from inferplane.scheduler import Scheduler

VOCAB_SIZE = 16

Block = tuple[int, int]
"""Pool and id."""
Slot = tuple[int, int, int]
"""Pool, block id and place in the block."""
Content = tuple[int, int]
"""Group, and identity of a prefix."""


def next_token(seed: int, token_ids: list[int]) -> int:
    return blake2b(repr((seed, token_ids)).encode(), digest_size=1).digest()[0] % VOCAB_SIZE


def logprobs_of(position: int, token_id: int) -> PositionLogprobs:
    return PositionLogprobs(chosen=TokenLogprob(token_id=token_id, logprob=-float(position), rank=1), top=[])


def right_answer(request: EngineRequest, seed: int) -> tuple[list[int], FinishReason]:
    """Output tokens and end of a request, from the words of `SamplingParams` alone."""
    params, output = request.params, list[int]()
    while len(output) < request.max_tokens:
        token_id = next_token(seed, [*request.prompt_token_ids, *output])
        is_stop = token_id in (params.stop_token_ids or []) or (
            token_id in request.eos_token_ids and not params.ignore_eos
        )
        may_stop = len(output) >= params.min_tokens
        output.append(token_id)
        if is_stop and may_stop:
            return output, FinishReason.STOP
    return output, FinishReason.LENGTH


@dataclass
class Row:
    """What a worker keeps of one request."""

    request: NewRequest
    token_ids: list[int]
    num_computed: int
    block_ids: list[list[int]]
    prefixes: list[int] = field(default_factory=list)
    """The identity of the prefix that ends at each token."""


class SimulatedWorker:
    """Executes plans in order; raises `AssertionError` for a plan that a real worker would compute wrongly."""

    def __init__(self, kv_config: KVCacheConfig, max_num_seqs: int, max_num_tokens: int) -> None:
        self.kv_config = kv_config
        self._pool_blocks = kv_config.pool_blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_tokens = max_num_tokens
        self.rows: dict[str, Row] = {}
        self.memory: dict[Slot, Content] = {}
        self.salts: dict[str, str | None] = {}
        """Told by the test, because a plan does not say it."""
        self.fails_for: Callable[[str, int, int], bool] = lambda request_id, start, end: False
        """Whether the step raises when it runs these tokens of this request."""
        self.errors_for: Callable[[str], str | None] = lambda request_id: None
        """What to put into the result's ``errors``."""

    def execute(self, plan: StepPlan) -> tuple[StepResult, set[Block]]:
        """Also returns the blocks that the step wrote."""
        self._apply(plan)
        assert plan.num_scheduled_tokens, "an empty plan"
        assert plan.num_tokens <= self.max_num_tokens, "over the token budget"
        assert len(self.rows) <= self.max_num_seqs, "over max_num_seqs"
        written: dict[Slot, str] = {}
        states = {name: list(self._states_before(self.rows[name])) for name in plan.num_scheduled_tokens}
        for request_id, before in states.items():
            self._check(request_id, before)
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            row = self.rows[request_id]
            assert 1 <= num_tokens <= len(row.token_ids) - row.num_computed, (
                f"{request_id}: {num_tokens} tokens"
            )
            for slot, value in self._writes(row, row.num_computed + num_tokens):
                assert slot not in written, f"{request_id} and {written.get(slot)} write the same slot {slot}"
                written[slot] = request_id
                self.memory[slot] = value
        result = StepResult(step_id=plan.step_id, sampled_token_ids={})
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            row = self.rows[request_id]
            end = row.num_computed + num_tokens
            self._check(request_id, self._reads(row, end))
            untouched = [each for each in states[request_id] if written.get(each[0]) != request_id]
            self._check(request_id, untouched)
            if self.fails_for(request_id, row.num_computed, end):
                raise RuntimeError(f"the model broke on {request_id}")
            self._finish_row(row, num_tokens, result)
        return result, {(pool, block_id) for pool, block_id, _ in written}

    def _apply(self, plan: StepPlan) -> None:
        for request_id in plan.removed_request_ids:
            self.rows.pop(request_id, None)
        for request in plan.new_requests:
            assert request.request_id not in self.rows, f"{request.request_id} is in the batch already"
            assert request.request_id in plan.num_scheduled_tokens
            block_ids = [list(ids) for ids in request.block_ids]
            row = Row(request, list(request.token_ids), request.num_computed_tokens, block_ids)
            self.rows[request.request_id] = row
        for request_id, new_ids in plan.new_block_ids.items():
            assert request_id in plan.num_scheduled_tokens, f"{request_id} gets blocks and does not run"
            for own, new in zip(self.rows[request_id].block_ids, new_ids, strict=True):
                own.extend(new)

    def _check(self, request_id: str, reads: Iterable[tuple[Slot, Content]]) -> None:
        for slot, value in reads:
            assert self.memory.get(slot) == value, f"{request_id} reads what is not its own in {slot}"

    def _extend_prefixes(self, row: Row, end: int) -> None:
        prefixes = row.prefixes
        if not prefixes:
            prefixes.append(hash((self.salts.get(row.request.request_id), row.token_ids[0])))
        for token_id in row.token_ids[len(prefixes) : end]:
            prefixes.append(hash((prefixes[-1], token_id)))

    def _slots(self, row: Row, group: int, positions: Iterable[int]) -> Iterator[tuple[Slot, Content]]:
        """Of tokens, or of the states after them; and what belongs there."""
        about, block_ids, prefixes = self.kv_config.groups[group], row.block_ids[group], row.prefixes
        num_blocks, is_state = self._pool_blocks[about.pool], isinstance(about.spec, StateSpec)
        for position in positions:
            index, offset = divmod(position, about.spec.block_size)
            block_id = block_ids[index]
            assert 0 <= block_id < num_blocks, f"there is no block {block_id}"
            yield (about.pool, block_id, 0 if is_state else offset), (group, prefixes[position])

    def _states_before(self, row: Row) -> Iterator[tuple[Slot, Content]]:
        """The states that a step starts from."""
        last = row.num_computed - 1
        if last >= 0:
            self._extend_prefixes(row, last + 1)
            for group, spec in self._specs():
                if isinstance(spec, StateSpec):
                    yield from self._slots(row, group, [last])

    def _writes(self, row: Row, end: int) -> Iterator[tuple[Slot, Content]]:
        """Every new token; of a state only what is there at the end of each block, and of the step."""
        self._extend_prefixes(row, end)
        for group, spec in self._specs():
            new: Iterable[int] = range(row.num_computed, end)
            if isinstance(spec, StateSpec):
                new = [each for each in new if (each + 1) % spec.block_size == 0 or each + 1 == end]
            yield from self._slots(row, group, new)

    def _reads(self, row: Row, end: int) -> Iterator[tuple[Slot, Content]]:
        """Every token that one of the step's sees."""
        self._extend_prefixes(row, end)
        for group, spec in self._specs():
            if not isinstance(spec, StateSpec):
                yield from self._slots(row, group, range(spec.first_visible_token(row.num_computed), end))

    def _specs(self) -> Iterator[tuple[int, KVCacheSpec]]:
        return enumerate(group.spec for group in self.kv_config.groups)

    def _finish_row(self, row: Row, num_tokens: int, result: StepResult) -> None:
        request_id, params = row.request.request_id, row.request.params
        start, end = row.num_computed, row.num_computed + num_tokens
        row.num_computed = end
        if params.prompt_logprobs is not None:
            predicted = range(start + 1, min(end + 1, row.request.num_prompt_tokens))
            result.prompt_logprobs[request_id] = [logprobs_of(pos, row.token_ids[pos]) for pos in predicted]
        error = self.errors_for(request_id)
        if error is not None:
            result.errors[request_id] = error
        elif end == len(row.token_ids):
            token_id = next_token(row.request.seed, row.token_ids)
            row.token_ids.append(token_id)
            result.sampled_token_ids[request_id] = [token_id]
            if params.logprobs is not None:
                result.logprobs[request_id] = [logprobs_of(end, token_id)]


class SimulatedEngine:
    """The engine's loop. With ``num_plans_ahead`` plans are made before the results of earlier ones are known."""

    def __init__(self, scheduler: Scheduler, worker: SimulatedWorker, num_plans_ahead: int = 0) -> None:
        self.scheduler = scheduler
        self.worker = worker
        self.num_plans_ahead = num_plans_ahead
        self.in_flight: deque[tuple[StepPlan, StepResult, set[Block]]] = deque()
        self.requests: dict[str, EngineRequest] = {}
        self.seeds: dict[str, int] = {}
        self.outputs: dict[str, list[EngineOutput]] = {}
        self.plans: list[StepPlan] = []
        self.loses_result: Callable[[StepPlan], bool] = lambda plan: False
        """Whether a step that was executed turns out to have failed when its result is asked for."""

    def add(self, request: EngineRequest) -> None:
        self.scheduler.add(request)
        self.requests[request.request_id] = request
        self.outputs[request.request_id] = []
        self.worker.salts[request.request_id] = request.cache_salt

    def abort(self, *request_ids: str) -> None:
        self._take(self.scheduler.abort(request_ids))

    def step(self) -> StepPlan | None:
        """Plans a step, executes it, and takes in the oldest result that is due."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self.plans.append(plan)
            self._check_new_blocks(plan)
            self.seeds.update((new.request_id, new.seed) for new in plan.new_requests)
            try:
                result, written = self.worker.execute(plan)
            except RuntimeError as error:
                self.flush()
                self._take(self.scheduler.fail_step(plan, error))
                return plan
            self.in_flight.append((plan, result, written))
        else:
            assert self.in_flight or not self.scheduler.has_work(), (
                "requests wait, and nothing would ever run"
            )
        if self.in_flight and (plan is None or len(self.in_flight) > self.num_plans_ahead):
            self._answer_oldest()
        return plan

    def run(self, max_steps: int = 100_000) -> None:
        """Until nothing is left."""
        for _ in range(max_steps):
            if not self.scheduler.has_work():
                self.flush()
                return
            self.step()
        raise AssertionError(f"requests are unfinished after {max_steps} steps")

    def flush(self) -> None:
        """Takes in every result."""
        while self.in_flight:
            self._answer_oldest()

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.new_token_ids]

    def finish_reason(self, request_id: str) -> FinishReason | None:
        outputs = self.outputs[request_id]
        return outputs[-1].finish_reason if outputs else None

    def check_answer(self, request_id: str) -> None:
        """The tokens are the right ones, all of them, or as many as came before an abort or an error."""
        output, reason = self.tokens(request_id), self.finish_reason(request_id)
        if request_id not in self.seeds:
            assert reason is FinishReason.ABORT and not output
            return
        right_output, right_reason = right_answer(self.requests[request_id], self.seeds[request_id])
        if reason in (FinishReason.ABORT, FinishReason.ERROR):
            assert output == right_output[: len(output)]
        else:
            assert (output, reason) == (right_output, right_reason)

    def _answer_oldest(self) -> None:
        plan, result, _ = self.in_flight.popleft()
        if not self.loses_result(plan):
            self._take(self.scheduler.update(plan, result))
            return
        # Those behind it were computed from what it lost.
        for lost in [plan, *(later for later, _, _ in self.in_flight)]:
            self._take(self.scheduler.fail_step(lost, "the result is lost"))
        self.in_flight.clear()

    def _take(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            earlier = self.outputs[output.request_id]
            assert not earlier or earlier[-1].finish_reason is None, (
                f"an output after the end of {output.request_id}"
            )
            earlier.append(output)

    def _check_new_blocks(self, plan: StepPlan) -> None:
        """No block that a step in flight writes may be drawn from the pool."""
        groups = self.worker.kv_config.groups
        drawn: set[Block] = set()
        for lists in plan.new_block_ids.values():
            for group, ids in zip(groups, lists, strict=True):
                drawn.update((group.pool, block_id) for block_id in ids)
        for new in plan.new_requests:
            for group, ids in zip(groups, new.block_ids, strict=True):
                first = new.num_computed_tokens // group.spec.block_size
                drawn.update((group.pool, block_id) for block_id in ids[first:])
        for earlier, _, written in self.in_flight:
            assert not drawn & written, f"step {earlier.step_id} still writes {sorted(drawn & written)}"
