from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import vocabularies
from inferplane.engine.output import RequestOutput, merge_deltas
from inferplane.engine.output_processor import OutputProcessor
from inferplane.request import (
    EngineOutput,
    EngineRequest,
    FinishReason,
    PositionLogprobs,
    SamplingParams,
    TokenLogprob,
)

TOKENIZER = vocabularies.byte_level()
END = TOKENIZER.eos_token_id
assert END is not None


def add(processor: OutputProcessor, request_id: str, prompt: list[int], params: SamplingParams) -> None:
    requests = [
        EngineRequest(request_id=f"{request_id}/{i}", prompt_token_ids=prompt, params=params, max_tokens=100)
        for i in range(params.n)
    ]
    processor.add(request_id, requests)


def run(
    text_ids: list[int],
    params: SamplingParams,
    *,
    tokens_per_step: int = 1,
    reason: FinishReason = FinishReason.LENGTH,
    stop_token_id: int | None = None,
) -> tuple[RequestOutput, list[str], list[str]]:
    """Feeds the tokens as an engine core would. Returns the whole, the aborted ids, and the texts of all deltas."""
    processor = OutputProcessor(TOKENIZER)
    add(processor, "r", [1, 2], params)
    whole = RequestOutput.begin("r", None, [1, 2], params.n)
    aborted: list[str] = []
    shown: list[str] = []
    steps = [text_ids[i : i + tokens_per_step] for i in range(0, len(text_ids), tokens_per_step)] or [[]]
    for index, step in enumerate(steps):
        is_last = index == len(steps) - 1
        output = EngineOutput(
            request_id="r/0",
            new_token_ids=step,
            finish_reason=reason if is_last else None,
            stop_token_id=stop_token_id if is_last else None,
        )
        processed = processor.process([output])
        aborted += processed.abort_ids
        for delta in processed.deltas:
            shown.append(delta.completions[0].text)
            whole.grow(delta)
    return whole, aborted, shown


def test_text_tokens_and_counts() -> None:
    ids = TOKENIZER.encode("The 🙂 dog")
    whole, aborted, shown = run(ids, SamplingParams())
    [completion] = whole.outputs
    assert completion.text == "The 🙂 dog" == "".join(shown)
    assert completion.token_ids == ids
    assert (completion.finish_reason, completion.stop_reason) == (FinishReason.LENGTH, None)
    assert whole.finished
    assert aborted == []


def test_the_token_that_ends_an_answer_is_no_text() -> None:
    ids = TOKENIZER.encode("The dog")
    for params, stop_reason in (
        (SamplingParams(skip_special_tokens=False), None),
        (SamplingParams(skip_special_tokens=False, stop_token_ids=[END]), END),
    ):
        whole, aborted, _ = run([*ids, END], params, reason=FinishReason.STOP, stop_token_id=END)
        assert whole.outputs[0].text == "The dog"
        assert whole.outputs[0].token_ids == [*ids, END]
        assert whole.outputs[0].stop_reason == stop_reason
        assert aborted == []
    # an ordinary token can be a stop token too
    whole, _, _ = run(
        ids, SamplingParams(stop_token_ids=[ids[-1]]), reason=FinishReason.STOP, stop_token_id=ids[-1]
    )
    assert whole.outputs[0].text == TOKENIZER.decode(ids[:-1])
    assert whole.outputs[0].stop_reason == ids[-1]


@given(
    text=st.text("ab 🙂", max_size=12),
    stops=st.lists(st.text("ab 🙂", min_size=1, max_size=4), min_size=1, max_size=3),
    include=st.booleans(),
    min_tokens=st.integers(0, 4),
    tokens_per_step=st.integers(1, 3),
)
def test_stop_strings(
    text: str, stops: list[str], include: bool, min_tokens: int, tokens_per_step: int
) -> None:
    ids = TOKENIZER.encode(text)
    params = SamplingParams(
        stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=100
    )
    whole, aborted, shown = run(ids, params, tokens_per_step=tokens_per_step)
    [completion] = whole.outputs
    assert "".join(shown) == completion.text

    def whole_characters(num_tokens: int) -> str:
        return b"".join(map(TOKENIZER.id_to_token_bytes, ids[:num_tokens])).decode(errors="ignore")

    floor = len(whole_characters(min_tokens))
    for num_tokens in range(min_tokens + 1, len(ids) + 1):
        so_far = whole_characters(num_tokens)
        found = [
            (start, index)
            for index, stop in enumerate(stops)
            for start in range(len(so_far))
            if so_far.startswith(stop, start) and start + len(stop) > floor
        ]
        if found:
            start, index = min(found)
            stop = stops[index]
            assert completion.text == so_far[: start + len(stop) if include else start]
            assert (completion.finish_reason, completion.stop_reason) == (FinishReason.STOP, stop)
            assert completion.token_ids == ids[:num_tokens]
            is_last_step = num_tokens > (len(ids) - 1) // tokens_per_step * tokens_per_step
            assert aborted == ([] if is_last_step else ["r/0"])
            return
    assert completion.text == text
    assert completion.finish_reason == FinishReason.LENGTH
    assert aborted == []


def test_a_stop_string_in_the_last_step_needs_no_abort() -> None:
    whole, aborted, _ = run(TOKENIZER.encode("The dog"), SamplingParams(stop="dog"), tokens_per_step=100)
    assert (whole.outputs[0].text, whole.outputs[0].finish_reason) == ("The ", FinishReason.STOP)
    assert aborted == []


def test_completions_of_one_request_come_together_and_end_apart() -> None:
    processor = OutputProcessor(TOKENIZER)
    add(processor, "r", [1], SamplingParams(n=3))
    assert processor.num_completions == 3
    a, b = TOKENIZER.encode("a")[0], TOKENIZER.encode("b")[0]
    first = processor.process([EngineOutput(request_id=f"r/{i}", new_token_ids=[a]) for i in range(3)])
    [delta] = first.deltas
    assert [c.index for c in delta.completions] == [0, 1, 2]
    assert not delta.finished
    done = [
        EngineOutput(request_id=f"r/{i}", new_token_ids=[b], finish_reason=FinishReason.LENGTH)
        for i in (2, 0)
    ]
    [delta] = processor.process(done).deltas
    assert not delta.finished
    assert processor.num_completions == 1
    [delta] = processor.process(
        [EngineOutput(request_id="r/1", new_token_ids=[b], finish_reason=FinishReason.LENGTH)]
    ).deltas
    assert delta.finished
    assert "r" not in processor
    assert processor.num_completions == 0


def test_removed_requests_name_what_still_runs_and_late_outputs_are_dropped() -> None:
    processor = OutputProcessor(TOKENIZER)
    add(processor, "r", [1], SamplingParams(n=2))
    add(processor, "other", [1], SamplingParams())
    processor.process([EngineOutput(request_id="r/0", new_token_ids=[5], finish_reason=FinishReason.LENGTH)])
    assert processor.remove("r") == ["r/1"]
    assert processor.remove("r") == []
    late = processor.process([EngineOutput(request_id="r/1", new_token_ids=[5])])
    assert (late.deltas, late.abort_ids) == ([], [])
    assert processor.request_ids == ["other"]


def test_ids_in_use_are_refused() -> None:
    processor = OutputProcessor(TOKENIZER)
    add(processor, "r", [1], SamplingParams())
    with pytest.raises(ValueError, match="'r' is in use"):
        add(processor, "r", [1], SamplingParams())


def test_errors_and_prompt_figures_pass_through() -> None:
    processor = OutputProcessor(TOKENIZER)
    add(processor, "r", [1, 2, 3], SamplingParams(logprobs=1, prompt_logprobs=0))
    position = PositionLogprobs(TokenLogprob(5, -0.5, 1), [TokenLogprob(5, -0.5, 1)])
    [delta] = processor.process(
        [
            EngineOutput(
                request_id="r/0",
                new_token_ids=[5],
                logprobs=[position],
                prompt_logprobs=[None, position, position],
                num_cached_tokens=2,
            )
        ]
    ).deltas
    assert (delta.num_prompt_tokens, delta.num_cached_tokens) == (3, 2)
    assert delta.prompt_logprobs == [None, position, position]
    [last] = processor.process(
        [EngineOutput(request_id="r/0", new_token_ids=[], finish_reason=FinishReason.ERROR, error="broke")]
    ).deltas
    assert (last.completions[0].finish_reason, last.completions[0].error) == (FinishReason.ERROR, "broke")
    whole = RequestOutput.begin("r", None, [1, 2, 3], 1)
    whole.grow(delta)
    whole.grow(last)
    assert whole.outputs[0].logprobs == [position]
    assert whole.outputs[0].cumulative_logprob == -0.5
    assert whole.outputs[0].error == "broke"


@given(num_merged=st.integers(1, 5))
def test_merged_events_say_the_same(num_merged: int) -> None:
    processor = OutputProcessor(TOKENIZER)
    add(processor, "r", [1], SamplingParams(n=2, max_tokens=10))
    ids = TOKENIZER.encode("ab🙂cd")
    deltas = []
    for index, token_id in enumerate(ids):
        is_last = index == len(ids) - 1
        reason = FinishReason.LENGTH if is_last else None
        outputs = [
            EngineOutput(request_id=f"r/{i}", new_token_ids=[token_id], finish_reason=reason)
            for i in (0, 1)
            if i == 0 or index % 2 or is_last
        ]
        deltas += processor.process(outputs).deltas
    one_by_one, merged = (RequestOutput.begin("r", None, [1], 2) for _ in range(2))
    for delta in deltas:
        one_by_one.grow(delta)
    for start in range(0, len(deltas), num_merged):
        merged.grow(merge_deltas(deltas[start : start + num_merged]))
    assert merged == one_by_one
    assert merged.finished


def test_a_snapshot_does_not_grow() -> None:
    processor = OutputProcessor(TOKENIZER)
    add(processor, "r", [1], SamplingParams())
    whole = RequestOutput.begin("r", None, [1], 1)
    before = whole.snapshot()
    whole.grow(processor.process([EngineOutput(request_id="r/0", new_token_ids=[70])]).deltas[0])
    assert before.outputs[0].token_ids == []
    assert whole.outputs[0].token_ids == [70]
