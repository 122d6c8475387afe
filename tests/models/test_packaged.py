"""Real models in GGUF, from their files to their answers.

Their packages are large, so that a test is skipped where they are not installed; the reason says how to get them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from inferplane.api.kv import SlidingWindowSpec
from offline import assert_idle, greedy, open_llm, run
from parity_prompts import LONG, PROMPTS
from teacher import Teacher

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FACTORIALS = {0: 1, 1: 1, 5: 120, 20: 2432902008176640000}


def test_gemma_3_answers_as_transformers_does(packaged_gguf: Callable[[str], Path]) -> None:
    """In float32, with prompts on both sides of its window of 512 tokens, in chunks and with their prefixes cached."""
    file = packaged_gguf("gemma-3-270m")
    teacher = Teacher(file)
    texts = [LONG, *PROMPTS[:3]]
    limits = {"max_model_len": 2048, "max_num_batched_tokens": 256, "max_num_seqs": 4}
    with open_llm(file, quantization="dequantize", **limits) as llm:
        for _ in range(2):
            outputs = llm.generate(texts, greedy(16, logprobs=0), use_tqdm=False)
            assert max(len(output.prompt_token_ids) for output in outputs) > 512
            teacher.assert_greedy(outputs, 16)
        assert llm.stats().num_prefix_hit_tokens > 512
        assert_idle(llm)


def test_gemma_3_as_it_is_packed(packaged_gguf: Callable[[str], Path]) -> None:
    with open_llm(packaged_gguf("gemma-3-270m"), dtype="auto", max_model_len=1024) as llm:
        output = run(llm, "one, two, three, four, five, six,", greedy(5))
        specs = llm._client.core._executor.kv_cache_specs().values()
    assert output.outputs[0].text.startswith(" seven, eight")
    windows = [spec.window for spec in specs if isinstance(spec, SlidingWindowSpec)]
    assert windows == [512] * 15


def test_qwen_coder_writes_a_correct_factorial(packaged_gguf: Callable[[str], Path]) -> None:
    question = "Write a Python function factorial(n). Answer with one code block and nothing else."
    with open_llm(packaged_gguf("qwen2.5-coder-0.5b-instruct"), dtype="auto", max_model_len=1024) as llm:
        [output] = llm.chat(
            [{"role": "user", "content": question}], greedy(256, ignore_eos=False), use_tqdm=False
        )
    [completion] = output.outputs
    assert completion.finish_reason == "stop"
    code = completion.text.partition("```python")[2].partition("```")[0]
    assert "def factorial" in code, completion.text
    program = f"{code}\nprint([factorial(n) for n in {list(FACTORIALS)}])"
    found = subprocess.run(
        [sys.executable, "-I", "-c", program], capture_output=True, text=True, timeout=20, check=True
    )
    assert found.stdout.splitlines()[-1] == str(list(FACTORIALS.values()))
