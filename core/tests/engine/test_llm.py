"""`LLM` over a random two-layer model on the reference platform, against transformers in float32."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from inferplane import LLM, RequestOutput, SamplingParams
from inferplane.config import ConfigError
from inferplane.engine.errors import EmptyPromptError, PromptTooLongError, TaskError
from inferplane.request import FinishReason, ParameterError

PROMPTS = [
    "The Licensor grants",
    "a",
    "You may reproduce and distribute copies of the Work in any medium 🙂 中文",
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(
        str(folder),
        device="reference",
        dtype="float32",
        kv_cache_bytes=8 << 20,
        max_num_seqs=8,
        max_num_batched_tokens=64,
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def reference(folder: Path) -> Callable[[list[int], int], list[int]]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def generate(prompt: list[int], num_tokens: int) -> list[int]:
        ids = list(prompt)
        with torch.inference_mode():
            for _ in range(num_tokens):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(prompt) :]

    return generate


def assert_idle(llm: LLM) -> None:
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, stats.num_blocks)


def test_greedy_tokens_equal_the_reference(
    llm: LLM, reference: Callable[[list[int], int], list[int]]
) -> None:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.prompt == prompt
        assert output.prompt_token_ids == tokenizer.encode(prompt)
        [completion] = output.outputs
        assert completion.token_ids == reference(output.prompt_token_ids, 12)
        assert completion.text == tokenizer.decode(completion.token_ids)
        assert completion.finish_reason == FinishReason.LENGTH
        assert output.finished
    assert_idle(llm)


def test_one_prompt_in_each_form(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(PROMPTS[0])
    forms: list[Any] = [PROMPTS[0], {"prompt": PROMPTS[0]}, {"prompt_token_ids": ids}, ids]
    outputs = [llm.generate(form, GREEDY, use_tqdm=False) for form in forms]
    assert all(len(output) == 1 for output in outputs)
    assert len({tuple(output[0].outputs[0].token_ids) for output in outputs}) == 1
    assert [o.outputs[0].token_ids for o in llm.generate(forms, GREEDY, use_tqdm=False)] == [
        outputs[0][0].outputs[0].token_ids
    ] * 4
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_parameters_for_each_prompt(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (3, 5)]
    outputs = llm.generate(PROMPTS[:2], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 5]
    with pytest.raises(ValueError, match="3 prompts but 2 sampling_params"):
        llm.generate(PROMPTS, params, use_tqdm=False)
    by_name = llm.generate(
        PROMPTS[0], {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}, use_tqdm=False
    )
    assert (
        by_name[0].outputs[0].token_ids
        == outputs[0].outputs[0].token_ids + by_name[0].outputs[0].token_ids[3:]
    )


def test_the_bar_shows_requests_and_tokens_per_second(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(PROMPTS, GREEDY)
    shown = capsys.readouterr()
    assert "3/3" in shown.err
    assert "tok/s" in shown.err
    assert shown.out == ""


def test_bad_input_names_the_field_before_anything_runs(llm: LLM) -> None:
    for prompts, params, error in (
        ([PROMPTS[0], ""], GREEDY, EmptyPromptError),
        ([[1] * 1024], GREEDY, PromptTooLongError),
        ([[1, 5000]], GREEDY, ParameterError),
        ([PROMPTS[0]], SamplingParams(stop_token_ids=[1024]), ParameterError),
    ):
        with pytest.raises(error):
            llm.generate(prompts, params, use_tqdm=False)
    with pytest.raises(TypeError, match="token ids"):
        llm.generate([5.5], GREEDY, use_tqdm=False)  # type: ignore[list-item]
    assert_idle(llm)
    assert llm.generate([1] * 1023, SamplingParams(max_tokens=1), use_tqdm=False)[0].finished


def test_streams_grow_to_the_whole(llm: LLM) -> None:
    [whole] = llm.generate(PROMPTS[2], GREEDY, use_tqdm=False)
    seen = list(llm.stream(PROMPTS[2], GREEDY))
    assert len(seen) == 12
    for shorter, longer in pairwise(seen):
        assert longer.outputs[0].text.startswith(shorter.outputs[0].text)
        assert len(longer.outputs[0].token_ids) == len(shorter.outputs[0].token_ids) + 1
    assert [output.finished for output in seen] == [False] * 11 + [True]
    assert (seen[-1].outputs, seen[-1].prompt) == (whole.outputs, whole.prompt)


def test_a_paused_stream_grows_while_others_run_and_ends_when_closed(llm: LLM) -> None:
    [whole] = llm.generate(
        PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True), use_tqdm=False
    )
    stream = llm.stream(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    next(stream)
    llm.generate(PROMPTS[1], GREEDY, use_tqdm=False)
    second = next(stream)
    assert len(second.outputs[0].token_ids) > 10
    assert whole.outputs[0].token_ids[: len(second.outputs[0].token_ids)] == second.outputs[0].token_ids
    stream.close()  # type: ignore[attr-defined]
    assert_idle(llm)


def test_a_stream_that_others_brought_to_its_end_still_shows_it(llm: LLM) -> None:
    whole = tokens(llm.generate(PROMPTS[0], GREEDY, use_tqdm=False))
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    llm.generate(PROMPTS[1], SamplingParams(max_tokens=30, ignore_eos=True), use_tqdm=False)
    [last] = stream
    assert last.finished
    assert last.outputs[0].token_ids == whole


def test_stop_strings_and_several_completions(llm: LLM) -> None:
    [plain] = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    text = plain.outputs[0].text
    stop = text[3:6]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop=stop, n=2)
    [output] = llm.generate(PROMPTS[0], params, use_tqdm=False)
    for completion in output.outputs:
        assert completion.text == text[: text.index(stop)]
        assert (completion.finish_reason, completion.stop_reason) == (FinishReason.STOP, stop)
    assert_idle(llm)


def test_seeds_give_distinct_completions_that_repeat(llm: LLM) -> None:
    params = SamplingParams(n=4, seed=7, max_tokens=10, ignore_eos=True)
    first, again = (llm.generate(PROMPTS[0], params, use_tqdm=False)[0] for _ in range(2))
    tokens = [completion.token_ids for completion in first.outputs]
    assert tokens == [completion.token_ids for completion in again.outputs]
    assert len({tuple(ids) for ids in tokens}) == 4
    alone = SamplingParams(seed=9, max_tokens=10, ignore_eos=True)
    assert llm.generate(PROMPTS[0], alone, use_tqdm=False)[0].outputs[0].token_ids == tokens[2]


def test_logprobs_and_prompt_logprobs(llm: LLM) -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=2, prompt_logprobs=1, n=2
    )
    [output] = llm.generate(PROMPTS[0], params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [p.chosen.token_id for p in output.prompt_logprobs[1:] if p] == output.prompt_token_ids[1:]
    for completion in output.outputs:
        assert completion.logprobs is not None
        assert [p.chosen.token_id for p in completion.logprobs] == completion.token_ids
        total = sum(p.chosen.logprob for p in completion.logprobs)
        assert completion.cumulative_logprob == pytest.approx(total)


def test_scoring_a_prompt_generates_nothing(llm: LLM) -> None:
    [output] = llm.generate(PROMPTS[0], SamplingParams(max_tokens=0, prompt_logprobs=0), use_tqdm=False)
    assert output.outputs[0].token_ids == []
    assert output.outputs[0].text == ""
    assert output.outputs[0].finish_reason == FinishReason.LENGTH
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_a_banned_word_does_not_come_out(llm: LLM) -> None:
    banned: list[str] = []
    text = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs[0].text
    for _ in range(3):
        words = [word for word in text.split() if word.isascii() and len(word) > 2]
        if not words:
            break
        banned.append(words[0])
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, bad_words=banned)
        text = llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0].text
        assert not set(banned) & set(text.split())


def test_chat_renders_the_template_once(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "Hi"}]
    [output] = llm.chat(conversation, GREEDY, use_tqdm=False)
    assert output.prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert output.prompt_token_ids == llm.get_tokenizer().encode(output.prompt, add_special_tokens=False)
    both = llm.chat([conversation, [{"role": "user", "content": "Ho"}]], GREEDY, use_tqdm=False)
    assert both[0].outputs[0].token_ids == output.outputs[0].token_ids
    streamed = list(llm.stream_chat(conversation, {"max_tokens": 12, "ignore_eos": True}))
    assert streamed[-1].outputs[0].token_ids == output.outputs[0].token_ids


def test_an_interrupt_drops_what_is_in_flight_and_the_engine_goes_on(
    llm: LLM, request: pytest.FixtureRequest
) -> None:
    # whoever runs the tests in the background may have them ignore it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    long = SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, long, use_tqdm=False)
    timer.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_idle(llm)
    assert len(llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 12


def test_embedding_says_what_is_missing(llm: LLM) -> None:
    with pytest.raises(TaskError, match="cannot embed texts: it is loaded to generate text"):
        llm.embed(["text"])


def test_unknown_settings_are_named() -> None:
    with pytest.raises(ConfigError, match="max_modle_len") as caught:
        LLM("nowhere", max_modle_len=5)
    assert caught.value.option == "max_modle_len"


@pytest.mark.parametrize("switch", ["auto", "none"])
def test_generation_config_gives_the_defaults(
    folder: Path, tmp_path: Path, switch: str, caplog: pytest.LogCaptureFixture
) -> None:
    own = tmp_path / "model"
    shutil.copytree(folder, own)
    recommended = {"temperature": 0.1, "top_k": 1, "max_new_tokens": 7, "eos_token_id": [2, 5]}
    (own / "generation_config.json").write_text(json.dumps(recommended))
    caplog.set_level("INFO", "inferplane")
    with LLM(
        str(own),
        device="reference",
        dtype="float32",
        kv_cache_bytes=1 << 20,
        max_model_len=64,
        generation_config=switch,
    ) as llm:
        announced = [r.getMessage() for r in caplog.records if "generation_config.json" in r.getMessage()]
        if switch == "none":
            assert llm.generation_defaults == {}
            assert announced == []
            return
        assert llm.generation_defaults == {"temperature": 0.1, "top_k": 1, "max_tokens": 7}
        assert len(announced) == 1
        # the model's values, then the request's own
        greedy = SamplingParams(temperature=0.0, max_tokens=7)
        assert tokens(llm.generate(PROMPTS[0], use_tqdm=False)) == tokens(
            llm.generate(PROMPTS[0], greedy, use_tqdm=False)
        )
        assert (
            len(tokens(llm.generate(PROMPTS[0], {"max_tokens": 2, "ignore_eos": True}, use_tqdm=False))) == 2
        )
        # the second end token ends an answer too
        forced = SamplingParams(temperature=0.0, max_tokens=7, logit_bias={5: 100.0})
        [ended] = llm.generate(PROMPTS[0], forced, use_tqdm=False)
        assert (ended.outputs[0].token_ids, ended.outputs[0].finish_reason) == ([5], FinishReason.STOP)
        assert (ended.outputs[0].text, ended.outputs[0].stop_reason) == ("", None)


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return outputs[0].outputs[0].token_ids


@pytest.mark.timeout(400)
def test_the_demo_model_says_what_transformers_says(smollm2_gguf: Path, smollm2_folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    prompts = ["The capital of France is", "def fibonacci(n):", "Once upon a time, in a land far away,"]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    with LLM(
        str(smollm2_gguf), device="reference", dtype="float32", max_model_len=256, kv_cache_bytes=64 << 20
    ) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32).eval()
    for output in outputs:
        prompt = torch.tensor([output.prompt_token_ids])
        with torch.inference_mode():
            expected = model.generate(prompt, do_sample=False, max_new_tokens=16, min_new_tokens=16)
        assert output.outputs[0].token_ids == expected[0, prompt.shape[1] :].tolist()
    assert "Paris" in outputs[0].outputs[0].text
