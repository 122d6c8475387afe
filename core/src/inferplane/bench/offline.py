"""Throughput and latency of `LLM` in this process, and of transformers on the same requests for comparison."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from inferplane.bench.report import Measurement
from inferplane.config.args import EngineArgs

if TYPE_CHECKING:
    from inferplane.engine.llm import LLM


def random_prompts(num: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """``num`` prompts of ``length`` token ids that share no prefix worth caching."""
    draw = random.Random(seed)
    return [[draw.randrange(vocab_size) for _ in range(length)] for _ in range(num)]


def run_ours(llm: LLM, case: str, prompts: list[list[int]], output_len: int) -> Measurement:
    """Generates ``output_len`` tokens for all prompts at once, greedily and past any end of sequence."""
    from inferplane import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    started = time.perf_counter()
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    seconds = time.perf_counter() - started
    if short := [o.request_id for o in outputs if len(o.outputs[0].token_ids) != output_len]:
        raise RuntimeError(f"{len(short)} of {len(prompts)} requests did not give {output_len} tokens")
    config = llm.config
    return Measurement(
        "inferplane",
        config.model.model,
        case,
        config.device.platform,
        config.model.dtype,
        len(prompts),
        len(prompts[0]),
        output_len,
        seconds,
    )


class TransformersPeer:
    """The same model run by transformers' ``generate`` in one padded batch."""

    def __init__(self, llm: LLM, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, GgufConfig

        path = llm.config.model.path
        torch_dtype = getattr(torch, dtype)
        if path.endswith(".gguf"):
            folder, _, file = path.rpartition("/")
            self.model = AutoModelForCausalLM.from_pretrained(
                folder, gguf_file=file, dtype=torch_dtype, quantization_config=GgufConfig(dequantize=True)
            )
        else:
            self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch_dtype)
        self.model.eval()
        self.dtype = dtype
        self.name = llm.config.model.model

    def run(self, case: str, prompts: list[list[int]], output_len: int) -> Measurement:
        import torch

        ids = torch.tensor(prompts)
        with torch.inference_mode():
            started = time.perf_counter()
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=output_len,
                max_new_tokens=output_len,
                pad_token_id=0,
            )
            seconds = time.perf_counter() - started
        if out.shape[1] != ids.shape[1] + output_len:
            raise RuntimeError(
                f"transformers gave {out.shape[1] - ids.shape[1]} tokens instead of {output_len}"
            )
        return Measurement(
            "transformers",
            self.name,
            case,
            "cpu",
            self.dtype,
            len(prompts),
            ids.shape[1],
            output_len,
            seconds,
        )


def build_llm(engine_args: EngineArgs, longest: int) -> LLM:
    """An engine whose context has room for the longest case, and no more than the KV cache needs."""
    from inferplane.engine.llm import LLM

    if engine_args.max_model_len is None:
        engine_args = replace(engine_args, max_model_len=longest)
    return LLM(engine_args=engine_args)


def median_of(measurements: list[Measurement]) -> Measurement:
    """The measurement of median duration, with the spread of all."""
    ordered = sorted(measurements, key=lambda m: m.seconds)
    middle = ordered[len(ordered) // 2]
    if len(ordered) > 1:
        middle.extra |= {
            "repeats": len(ordered),
            "min_s": round(ordered[0].seconds, 4),
            "max_s": round(ordered[-1].seconds, 4),
            "mean_s": round(statistics.fmean(m.seconds for m in ordered), 4),
        }
    return middle
