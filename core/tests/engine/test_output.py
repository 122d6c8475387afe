"""Outputs that grow by deltas: however many come as one, what they say is the same."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from inferplane.engine.output import CompletionDelta, RequestDelta, RequestOutput, merge_deltas
from inferplane.request import FinishReason, PositionLogprobs, TokenLogprob

N = 3


@st.composite
def streams(draw: st.DrawFn) -> list[RequestDelta]:
    """The events of one request with `N` completions, of which each ends in the event that says so."""
    with_logprobs = draw(st.booleans())
    prompt_event = draw(st.none() | st.just(0))
    last = [draw(st.integers(0, 5)) for _ in range(N)]
    counts = [0] * N
    deltas = []
    for step in range(max(last) + 1):
        completions = []
        for index in draw(st.permutations(range(N))):
            if step > last[index] or (step < last[index] and draw(st.booleans())):
                continue
            token_ids = draw(st.lists(st.integers(0, 9), max_size=2))
            counts[index] += len(token_ids)
            chosen = [PositionLogprobs(TokenLogprob(token_id, -1.5, 1), []) for token_id in token_ids]
            is_last = step == last[index]
            completions.append(
                CompletionDelta(
                    index=index,
                    text="".join(map(str, token_ids)),
                    token_ids=token_ids,
                    logprobs=chosen if with_logprobs else None,
                    finish_reason=FinishReason.STOP if is_last else None,
                    stop_reason="END" if is_last and index == 0 else None,
                    num_output_tokens=counts[index],
                )
            )
        deltas.append(
            RequestDelta(
                request_id="r",
                completions=completions,
                num_prompt_tokens=2,
                num_cached_tokens=1,
                prompt_logprobs=[None] if step == prompt_event else None,
                finished=step == max(last),
            )
        )
    return deltas


def grown(deltas: list[RequestDelta]) -> RequestOutput:
    output = RequestOutput.begin("r", "p", [1, 2], N)
    for delta in deltas:
        output.grow(delta)
    return output


@given(streams(), st.data())
def test_merged_events_say_what_the_single_ones_say(deltas: list[RequestDelta], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, len(deltas)), max_size=3)) | {0, len(deltas)})
    merged = [merge_deltas(deltas[start:end]) for start, end in pairwise(cuts)]
    assert grown(merged) == grown(deltas)
    assert grown(merged).finished
    for index in range(N):
        parts = [part for delta in merged for part in delta.completions if part.index == index]
        assert parts[-1].num_output_tokens == sum(len(part.token_ids) for part in parts)


def test_a_snapshot_is_left_alone_by_later_events() -> None:
    entry = PositionLogprobs(TokenLogprob(7, -1.0, 1), [])
    output = RequestOutput.begin("r", None, [1], 1)
    output.grow(RequestDelta("r", [CompletionDelta(0, "a", [7], [entry])], num_prompt_tokens=1))
    snapshot = output.snapshot()
    output.grow(
        RequestDelta("r", [CompletionDelta(0, "b", [7], [entry])], num_prompt_tokens=1, finished=True)
    )
    assert (snapshot.outputs[0].text, snapshot.outputs[0].token_ids, snapshot.finished) == ("a", [7], False)
    assert snapshot.outputs[0].logprobs == [entry]
    assert (output.outputs[0].text, output.outputs[0].cumulative_logprob) == ("ab", -2.0)
