"""A whole worker with a real checkpoint: greedy tokens equal those of transformers in float32."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from inferplane.api.comm import ProcessGroup
from inferplane.api.kv import KVCacheConfig, KVCacheGroup
from inferplane.config import EngineArgs
from inferplane.config.resolve import resolve
from inferplane.executor.base import make_worker
from inferplane.plan import StepPlan
from inferplane.plugins import load_plugins
from inferplane.runner.worker import ModelWorker

NUM_NEW = 12


def make(folder: Path, **args: object) -> ModelWorker:
    plugins = load_plugins(quiet=True)
    config = resolve(
        EngineArgs(model=str(folder), device="reference", block_size=8, max_num_seqs=4, **args),  # type: ignore[arg-type]
        plugins,
        progress=False,
    )
    worker = make_worker(config, plugins, ProcessGroup(0, 1, ""))
    assert isinstance(worker, ModelWorker)
    return worker


@pytest.fixture(scope="module")
def worker(tiny_model):
    worker = make(tiny_model("llama"))
    worker.set_up()
    worker.load_model()
    specs = worker.kv_cache_specs()
    (spec,) = set(specs.values())
    worker.init_kv_cache(KVCacheConfig(64, (KVCacheGroup(tuple(specs), spec),)))
    worker.warm_up()
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def prompts_and_answers(tiny_model):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model("llama"), dtype=torch.float32)
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 1000) for _ in range(length)] for length in (1, 5, 8, 9, 23, 40, 17, 3)]
    answers = []
    for prompt in prompts:
        with torch.inference_mode():
            out = model.generate(
                torch.tensor([prompt]),
                max_new_tokens=NUM_NEW,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        answers.append(out[0, len(prompt) :].tolist())
    return prompts, answers


@pytest.mark.parametrize("budget", [1, 5, 16, 200])
def test_tokens_equal_transformers_in_chunks_and_with_requests_coming_and_going(
    worker, prompts_and_answers, new_request, budget: int
):
    """A scheduler in a few lines: four places, a token budget, blocks from a shuffled pool, greedy admission."""
    prompts, answers = prompts_and_answers
    rng = random.Random(budget)
    free = rng.sample(range(64), 64)
    waiting, running, outputs = list(range(len(prompts))), {}, {}
    removed: list[str] = []
    for step_id in range(10_000):
        scheduled, new_requests, new_blocks, left = {}, [], {}, budget
        for name, state in running.items():
            count = min(left, state["known"] - state["computed"])
            if count:
                scheduled[name] = count
                left -= count
                needed = -(-(state["computed"] + count) // 8) - len(state["blocks"])
                if needed > 0:
                    added = [free.pop() for _ in range(needed)]
                    state["blocks"] += added
                    new_blocks[name] = [added]
        while waiting and left and len(running) < 4:
            index = waiting.pop(0)
            name, prompt = str(index), prompts[index]
            scheduled[name] = count = min(left, len(prompt))
            left -= count
            blocks = [free.pop() for _ in range(-(-count // 8))]
            running[name] = {"known": len(prompt), "computed": 0, "blocks": list(blocks)}
            outputs[name] = []
            new_requests.append(new_request(name, prompt, block_ids=[blocks], temperature=0.0))
        if not scheduled:
            break
        worker.execute(
            StepPlan(
                step_id=step_id, removed_request_ids=removed, new_requests=new_requests, new_block_ids=new_blocks,
                num_scheduled_tokens=scheduled,
            )
        )  # fmt: skip
        result = worker.sample().result()
        assert not result.errors
        removed = []
        for name, count in scheduled.items():
            running[name]["computed"] += count
        for name, tokens in result.sampled_token_ids.items():
            outputs[name] += tokens
            running[name]["known"] += 1
            if len(outputs[name]) == NUM_NEW:
                free += running.pop(name)["blocks"]
                removed.append(name)
    worker.execute(StepPlan(step_id=0, removed_request_ids=removed))
    assert [outputs[str(index)] for index in range(len(prompts))] == answers


def test_logprobs_and_prompt_logprobs_equal_transformers(
    worker, prompts_and_answers, new_request, tiny_model
):
    import torch
    from transformers import AutoModelForCausalLM

    prompt = prompts_and_answers[0][4]
    model = AutoModelForCausalLM.from_pretrained(tiny_model("llama"), dtype=torch.float64)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
    request = new_request("a", prompt, block_ids=[[5, 9, 2]], temperature=0.0, logprobs=5, prompt_logprobs=3)
    worker.execute(StepPlan(step_id=1, new_requests=[request], num_scheduled_tokens={"a": 10}))
    entries = worker.sample().result().prompt_logprobs["a"]
    worker.execute(StepPlan(step_id=2, num_scheduled_tokens={"a": 13}))
    result = worker.sample().result()
    entries += result.prompt_logprobs["a"]
    worker.execute(StepPlan(step_id=3, removed_request_ids=["a"]))
    assert [entry.chosen.token_id for entry in entries] == prompt[1:]
    for position, entry in enumerate([*entries, *result.logprobs["a"]]):
        assert entry.chosen.logprob == pytest.approx(
            expected[position, entry.chosen.token_id].item(), abs=1e-4
        )
        top = expected[position].topk(len(entry.top))
        assert [each.token_id for each in entry.top] == top.indices.tolist()
        assert [each.logprob for each in entry.top] == pytest.approx(top.values.tolist(), abs=1e-4)


def test_the_order_of_calls_is_checked(tiny_model):
    worker = make(tiny_model("llama"))
    with pytest.raises(RuntimeError, match="load_model first"):
        worker.kv_cache_specs()
    with pytest.raises(RuntimeError, match="init_kv_cache first"):
        worker.execute(StepPlan(step_id=1))


def test_kv_cache_bytes_of_the_configuration_count(tiny_model):
    worker = make(tiny_model("llama"), kv_cache_bytes=123_456)
    assert worker.available_kv_bytes() == 123_456


def test_memory_is_left_to_the_machine(worker):
    available = worker.available_kv_bytes()
    assert 0 < available <= 0.4 * worker.runtime.memory().available_bytes
