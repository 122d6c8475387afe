"""The sampler against a second implementation: float64, one request at a time, every rule in its plainest form."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inferplane.api.draw_op import BLOCK
from inferplane.plan import NewRequest
from inferplane.runner.sampler import Choices, Sampler
from race_oracle import is_first, key_of

VOCAB = 97
PROMPT = [3, 9, 9, 40, 41]


# -- the second implementation


def allowed_distribution(request: NewRequest, output: list[int], logits: list[float]) -> list[float]:
    """Probability of each token, from the definitions of the settings alone. Nothing is sorted but to be cut."""
    p = request.params
    x = np.array(logits, np.float64)
    for token, bias in (p.logit_bias or {}).items():
        x[token] = -math.inf if bias == -100 else x[token] + bias
    if p.allowed_token_ids is not None:
        x[[token for token in range(VOCAB) if token not in p.allowed_token_ids]] = -math.inf
    for word in request.bad_words_token_ids:
        if output[len(output) - len(word) + 1 :] == word[:-1] and len(output) >= len(word) - 1:
            x[word[-1]] = -math.inf
    if len(output) < p.min_tokens:
        x[[*request.eos_token_ids, *(p.stop_token_ids or [])]] = -math.inf
    prompt = request.token_ids[: request.num_prompt_tokens]
    for token in range(VOCAB):
        if token in prompt or token in output:
            x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
        if token in output:
            x[token] -= p.presence_penalty + p.frequency_penalty * output.count(token)
    if p.temperature == 0:
        return [float(token == int(np.argmax(x))) for token in range(VOCAB)]
    x = x / p.temperature
    if 0 < p.top_k < VOCAB:
        x[x < sorted(x, reverse=True)[p.top_k - 1]] = -math.inf
    probs = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
    if p.top_p < 1:
        mass = 0.0
        for token in sorted(range(VOCAB), key=lambda token: -probs[token]):
            if mass >= p.top_p:
                x[token] = -math.inf
            mass += probs[token]
        probs = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
    probs[probs < p.min_p * probs.max()] = 0
    return (probs / probs.sum()).tolist()


def random_request(rng: random.Random, name: str) -> NewRequest:
    from inferplane.request import SamplingParams

    def sometimes(value, otherwise=None, chance=0.3):
        return value if rng.random() < chance else otherwise

    params = SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.05, 0.7, 1.0, 3.0]),
        top_k=sometimes(rng.choice([1, 2, 5, 40, 96, 97, 5000]), 0),
        top_p=sometimes(rng.choice([0.1, 0.5, 0.9, 0.99]), 1.0),
        min_p=sometimes(rng.choice([0.01, 0.3, 1.0]), 0.0),
        presence_penalty=sometimes(rng.uniform(-2, 2), 0.0),
        frequency_penalty=sometimes(rng.uniform(-2, 2), 0.0),
        repetition_penalty=sometimes(rng.uniform(0.5, 2.5), 1.0),
        logit_bias=sometimes({rng.randrange(VOCAB): rng.choice([-100, -3, 0.5, 7, 100]) for _ in range(4)}),
        allowed_token_ids=sometimes([rng.randrange(VOCAB) for _ in range(30)], chance=0.1),
        stop_token_ids=sometimes([rng.randrange(VOCAB) for _ in range(3)]),
        min_tokens=sometimes(rng.randint(1, 8), 0),
        logprobs=sometimes(rng.randint(0, 20)),
        max_tokens=None,
    )
    return NewRequest(
        request_id=name,
        token_ids=[rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))],
        num_prompt_tokens=0,
        num_computed_tokens=0,
        block_ids=[[]],
        params=params,
        seed=rng.randrange(-(2**63), 2**63),
        max_tokens=100,
        eos_token_ids=[rng.randrange(VOCAB) for _ in range(2)],
        bad_words_token_ids=[
            [rng.randrange(VOCAB) for _ in range(rng.randint(1, 3))] for _ in range(rng.choice([0, 0, 0, 5]))
        ],
    )


def with_prompt(request: NewRequest) -> NewRequest:
    import msgspec

    return msgspec.structs.replace(request, num_prompt_tokens=len(request.token_ids))


class Rows:
    """Requests in the sampler, with their outputs."""

    def __init__(self, runtime, requests: list[NewRequest], processors=None) -> None:
        self.sampler = Sampler(len(requests) + 2, VOCAB, runtime, lambda: processors or {})
        self.requests = requests
        self.outputs: dict[int, list[int]] = {}
        self.errors = {}
        for row, request in enumerate(requests):
            tokens = np.array(request.token_ids, np.int32)
            self.outputs[row] = request.token_ids[request.num_prompt_tokens :]
            error = self.sampler.add(row, request, tokens)
            if error is not None:
                self.errors[row] = error

    def sample(self, rows: list[int], logits: torch.Tensor) -> Choices:
        positions = np.array([len(self.outputs[row]) for row in rows])
        outputs = lambda row: np.array(self.outputs[row], np.int32)  # noqa: E731
        return (
            self.sampler.sample(np.array(rows), positions, outputs, logits)
            .start_reading(make_runtime())
            .read()
        )

    def append(self, row: int, token: int) -> None:
        self.outputs[row].append(token)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_every_choice_is_the_one_that_the_definitions_allow(seed: int):
    rng = random.Random(seed)
    requests = [with_prompt(random_request(rng, str(index))) for index in range(rng.randint(1, 10))]
    rows = Rows(make_runtime(), requests)
    for _ in range(6):
        logits = torch.tensor(
            np.random.default_rng(rng.randrange(2**32)).normal(0, 3, (len(requests), VOCAB))
        ).float()
        order = rng.sample(range(len(requests)), rng.randint(1, len(requests)))
        sampled = rows.sample(order, logits[order])
        for index, row in enumerate(order):
            request, output = requests[row], rows.outputs[row]
            with np.errstate(invalid="ignore"):
                probs = allowed_distribution(request, output, logits[row].tolist())
            if not np.isfinite(probs).all():
                assert "no token is left" in sampled.errors[index]
                continue
            assert index not in sampled.errors
            token = int(sampled.token_ids[index])
            if request.params.temperature > 0:
                assert is_first(key_of(request.seed % 2**64, len(output)), probs, token, BLOCK)
            assert probs[token] > 0
            check_logprobs(request, logits[row], token, sampled.logprobs.get(index))
            rows.append(row, token)


def check_logprobs(request: NewRequest, logits: torch.Tensor, token: int, entry) -> None:
    if request.params.logprobs is None:
        assert entry is None
        return
    x = logits.double().numpy()
    expected = x - np.log(np.exp(x - x.max()).sum()) - x.max()
    assert entry.chosen.token_id == token
    assert entry.chosen.logprob == pytest.approx(expected[token], abs=1e-5)
    assert entry.chosen.rank == 1 + (x > x[token]).sum()
    best = np.argsort(-x, kind="stable")[: request.params.logprobs]
    assert [each.token_id for each in entry.top] == best.tolist()
    assert [each.rank for each in entry.top] == list(range(1, len(best) + 1))
    assert [each.logprob for each in entry.top] == pytest.approx(expected[best].tolist(), abs=1e-5)


def make_runtime():
    from inferplane.api import DeviceDescriptor
    from inferplane.reference.platform import HostRuntime

    return HostRuntime(DeviceDescriptor("reference", 0, "host", 1 << 30))


# -- independence (public cases samp-07, samp-12)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_request_gets_the_same_tokens_alone_and_in_any_batch_in_any_order(seed: int, dtype: torch.dtype):
    rng = random.Random(seed)
    requests = [with_prompt(random_request(rng, str(index))) for index in range(12)]
    # a realistic vocabulary would not change the paths, but ties would be rarer
    logits = (torch.randn(5, 12, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2).to(dtype)

    def run(chosen: list[int]) -> dict[int, list]:
        rows = Rows(make_runtime(), [requests[row] for row in chosen])
        got: dict[int, list] = {row: [] for row in chosen}
        for step in range(5):
            sampled = rows.sample(list(range(len(chosen))), logits[step, chosen])
            for index, row in enumerate(chosen):
                if index in sampled.errors:
                    got[row].append("error")
                    continue
                got[row].append((int(sampled.token_ids[index]), sampled.logprobs.get(index)))
                rows.append(index, int(sampled.token_ids[index]))
        return got

    alone = {}
    for row in range(12):
        alone.update(run([row]))
    assert run(list(range(12))) == alone
    shuffled = rng.sample(range(12), 12)
    assert run(shuffled) == alone


def test_large_vocabularies_are_independent_of_the_batch_too(runtime, new_request):
    """Where the device's kernels split their work by size."""
    vocab, count = 49_152, 40
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(5)) * 3
    kinds = [
        dict(temperature=0.0),
        dict(temperature=0.7),
        dict(temperature=1.0, min_p=0.05),
        dict(temperature=0.9, top_k=50),
        dict(temperature=0.8, top_p=0.95),
        dict(temperature=0.6, top_p=0.8, top_k=2000, logprobs=5),
        dict(temperature=0.0, repetition_penalty=1.3, logprobs=2),
    ]
    output = np.arange(50, dtype=np.int32)

    def run(rows: list[int]):
        sampler = Sampler(count, vocab, runtime)
        for row in rows:
            request = new_request(str(row), [1, 2, 3], seed=row, **kinds[row % len(kinds)])
            sampler.add(row, request, np.concatenate([np.array([1, 2, 3], np.int32), output]))
        positions = np.full(len(rows), len(output))
        sampled = (
            sampler.sample(np.array(rows), positions, lambda row: output, logits[rows])
            .start_reading(runtime)
            .read()
        )
        assert not sampled.errors
        return {row: (int(sampled.token_ids[i]), sampled.logprobs.get(i)) for i, row in enumerate(rows)}

    together = run(list(range(count)))
    for row in range(0, count, 3):
        assert run([row])[row] == together[row]


def test_preemption_changes_nothing(runtime, new_request):
    logits = torch.randn(8, 1, VOCAB, generator=torch.Generator().manual_seed(2))
    params = dict(
        temperature=1.0,
        seed=7,
        frequency_penalty=0.5,
        repetition_penalty=1.2,
        min_tokens=3,
        eos_token_ids=[4],
    )
    rows = Rows(runtime, [new_request("a", PROMPT, **params)])
    for step in range(8):
        rows.append(0, int(rows.sample([0], logits[step]).token_ids[0]))
    for cut in range(8):
        known = PROMPT + rows.outputs[0][:cut]
        again = Rows(runtime, [new_request("a", known, num_prompt_tokens=len(PROMPT), **params)])
        for step in range(cut, 8):
            again.append(0, int(again.sample([0], logits[step]).token_ids[0]))
        assert again.outputs[0] == rows.outputs[0]


def test_a_row_forgets_its_last_request(runtime, new_request):
    sampler = Sampler(1, VOCAB, runtime)
    output = np.zeros(0, np.int32)
    sampler.add(
        0, new_request("a", PROMPT, temperature=0.0, logit_bias={5: 100}, logprobs=3), np.array(PROMPT)
    )
    sampler.remove(0)
    sampler.add(0, new_request("b", PROMPT, temperature=0.0), np.array(PROMPT))
    logits = torch.zeros(1, VOCAB)
    logits[0, 11] = 1
    sampled = (
        sampler.sample(np.array([0]), np.array([0]), lambda row: output, logits).start_reading(runtime).read()
    )
    assert sampled.token_ids.tolist() == [11]
    assert not sampled.logprobs


# -- single settings


def test_sampled_frequencies_follow_the_distribution(runtime, new_request):
    """20,000 draws of one request at its successive positions: chi-square over a small vocabulary."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, 1.5])
    probs = (logits / 0.8).double().softmax(-1).numpy()
    count, batch = 20_000, 500
    sampler = Sampler(batch, len(logits), runtime)
    for row in range(batch):
        sampler.add(row, new_request(str(row), [1], temperature=0.8, seed=99), np.array([1]))
    observed, none = np.zeros(len(logits)), np.zeros(0, np.int32)
    for start in range(0, count, batch):
        sampled = (
            sampler.sample(
                np.arange(batch), start + np.arange(batch), lambda row: none, logits.expand(batch, -1)
            )
            .start_reading(runtime)
            .read()
        )
        observed += np.bincount(sampled.token_ids, minlength=len(logits))
    chi_square = ((observed - count * probs) ** 2 / (count * probs)).sum()
    assert chi_square < 29.9  # 7 degrees of freedom: exceeded once in 10,000 times


@pytest.mark.parametrize("prompt_len", [1, 2, 30])
@pytest.mark.parametrize("min_tokens", [0, 1, 4])
def test_min_tokens_counts_output_and_nothing_else(runtime, new_request, prompt_len: int, min_tokens: int):
    """Public case samp-01."""
    eos, stop = 7, 8
    request = new_request(
        "a", [1] * prompt_len, temperature=0.0, min_tokens=min_tokens, logit_bias={eos: 100, stop: 60},
        eos_token_ids=[eos], stop_token_ids=[stop],
    )  # fmt: skip
    rows = Rows(runtime, [request])
    while not rows.outputs[0] or rows.outputs[0][-1] != eos:
        rows.append(0, int(rows.sample([0], torch.randn(1, VOCAB)).token_ids[0]))
    assert len(rows.outputs[0]) == min_tokens + 1
    assert stop not in rows.outputs[0]


@pytest.mark.parametrize("temperature", [0.0, 0.5, 100.0])
def test_the_ends_of_logit_bias_ban_and_force(runtime, new_request, temperature: float):
    """Public case samp-04."""
    banned = dict.fromkeys(range(90), -100)
    rows = Rows(
        runtime,
        [
            new_request(str(seed), PROMPT, temperature=temperature, seed=seed, logit_bias=banned)
            for seed in range(50)
        ],
    )
    logits = torch.zeros(50, VOCAB)
    logits[:, :90] = 30.0
    assert rows.sample(list(range(50)), logits).token_ids.min() >= 90
    forced = Rows(runtime, [new_request("a", PROMPT, temperature=min(temperature, 2.0), logit_bias={5: 100})])
    assert forced.sample([0], torch.randn(1, VOCAB) * 5).token_ids.tolist() == [5]


def test_a_bad_word_is_banned_where_it_would_be_completed_and_nowhere_else(runtime, new_request):
    """Public case samp-05. The words: 10 alone, 20 21 together, 30 31 32 together."""
    request = new_request(
        "a", [20, 30, 31], temperature=0.0, bad_words_token_ids=[[10], [20, 21], [30, 31, 32]]
    )
    for output, wanted, is_banned in [
        ([], 10, True),
        ([], 20, False),
        ([], 21, False),  # what the prompt ends with is not part of the answer
        ([], 32, False),
        ([20], 21, True),
        ([20, 5], 21, False),
        ([30], 31, False),
        ([30, 31], 32, True),
        ([31], 32, False),
        ([30, 30, 31], 32, True),
        ([5, 20, 20], 21, True),
    ]:
        rows = Rows(runtime, [request])
        for token in output:
            rows.append(0, token)
        logits = torch.zeros(1, VOCAB)
        logits[0, wanted] = 9.0
        assert (int(rows.sample([0], logits).token_ids[0]) != wanted) == is_banned, (output, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1e-4, 1e-5, 1e-6, 1e-12, 5e-324])
def test_very_low_temperatures_are_greedy(runtime, new_request, dtype: torch.dtype, temperature: float):
    """Public case samp-09, in a batch with temperatures 0 and 2."""
    logits = (torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(9)) * 8).to(dtype)
    logits[1] = logits[0]
    logits[3] = logits[2]
    bias = {int(logits[2].float().argmax()): -100}
    rows = Rows(
        runtime,
        [
            new_request("low", PROMPT, temperature=temperature),
            new_request("greedy", PROMPT, temperature=0.0),
            new_request("low, biased", PROMPT, temperature=temperature, logit_bias=bias),
            new_request("hot", PROMPT, temperature=2.0),
        ],
    )
    sampled = rows.sample([0, 1, 2, 3], logits)
    assert not sampled.errors
    assert sampled.token_ids[0] == sampled.token_ids[1] == int(logits[0].float().argmax())
    assert sampled.token_ids[2] == int(logits[2].float().topk(2).indices[1])


def test_ids_beyond_the_vocabulary_touch_no_other_request(runtime, new_request):
    sampler = Sampler(4, 10, runtime)
    for row in range(2):
        request = new_request(
            "r", [1], temperature=0.0, min_tokens=3, eos_token_ids=[2, 17], bad_words_token_ids=[[15], [4]]
        )
        assert sampler.add(row, request, np.array([1])) is None
    logits = torch.zeros(2, 10)
    logits[:, 4], logits[:, 2] = 9.0, 8.0  # both banned
    logits[1, 7], logits[1, 5] = 7.0, 6.0  # where 17 and 15 of row 0 would come to lie
    logits[0, 6] = 5.0
    sampled = (
        sampler.sample(np.arange(2), np.zeros(2, np.int64), lambda row: np.zeros(0, np.int32), logits)
        .start_reading(runtime)
        .read()
    )
    assert sampled.errors == {}
    assert sampled.token_ids.tolist() == [6, 7]


def test_a_request_that_may_choose_nothing_fails_alone(runtime, new_request):
    rows = Rows(
        runtime,
        [
            new_request("none", PROMPT, temperature=0.7, allowed_token_ids=[4], logit_bias={4: -100}),
            new_request("none, greedy", PROMPT, temperature=0.0, allowed_token_ids=[4], logit_bias={4: -100}),
            new_request("nan", PROMPT, temperature=0.7),
            new_request("fine", PROMPT, temperature=0.0),
        ],
    )
    logits = torch.randn(4, VOCAB)
    logits[2, 1] = float("nan")
    sampled = rows.sample([0, 1, 2, 3], logits)
    assert sampled.errors.keys() == {0, 1, 2}
    assert "no token is left to choose" in sampled.errors[0]
    assert "no token is left to choose" in sampled.errors[1]
    assert "not finite" in sampled.errors[2]
    assert sampled.token_ids[3] == logits[3].argmax()


# -- processors that plugins bring (public case kv-11)


def only_even(argument: dict, prompt_token_ids: list[int], vocab_size: int):
    """A logits processor: even tokens only, and never one of the prompt's."""
    if argument != {"on": True}:
        raise ValueError(f"only_even takes {{'on': true}}, got {argument}")
    assert vocab_size == VOCAB

    def process(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[1::2] = float("-inf")
        logits[prompt_token_ids] = float("-inf")
        logits[output] = float("-inf")
        return logits

    return process


def raising(argument: str, prompt_token_ids: list[int], vocab_size: int):
    def process(output: list[int], logits: torch.Tensor):
        if argument == "shape":
            return logits[:3]
        if argument == "none":
            return None
        raise KeyError("the processor's own fault")

    return process


def test_processors_see_their_own_row_and_fail_alone(runtime, new_request, monkeypatch: pytest.MonkeyPatch):
    import sys
    import types

    module = types.ModuleType("fake_processors")
    module.only_even, module.raising = only_even, raising
    monkeypatch.setitem(sys.modules, "fake_processors", module)
    targets = {name: f"fake_processors:{name}" for name in ("only_even", "raising")}
    prompt = [96, 40]
    rows = Rows(
        runtime,
        [
            new_request("even", prompt, temperature=0.0, logits_processors={"only_even": {"on": True}}),
            new_request("raises", prompt, temperature=0.0, logits_processors={"raising": "x"}),
            new_request("shape", prompt, temperature=0.0, logits_processors={"raising": "shape"}),
            new_request("none", prompt, temperature=0.5, logits_processors={"raising": "none"}),
            new_request("bad argument", prompt, temperature=0.0, logits_processors={"only_even": {}}),
            new_request("unknown", prompt, temperature=0.0, logits_processors={"nowhere": 1}),
            new_request("plain", prompt, temperature=0.0),
        ],
        targets,
    )
    assert rows.errors.keys() == {4, 5}
    assert rows.errors[4] == "ValueError: only_even takes {'on': true}, got {}"
    assert "'nowhere' is unknown; installed plugins bring: only_even, raising" in rows.errors[5]
    logits = torch.arange(VOCAB).float().expand(7, -1)
    first = rows.sample(list(range(7)), logits)
    assert first.errors.keys() == {1, 2, 3}
    assert first.errors[1] == 'KeyError: "the processor\'s own fault"'
    assert "returned [3] instead of logits of shape [97]" in first.errors[2]
    assert "returned NoneType" in first.errors[3]
    assert (first.token_ids[0], first.token_ids[6]) == (94, 96)
    rows.append(0, 94)
    assert rows.sample([0], logits[:1]).token_ids.tolist() == [92]
