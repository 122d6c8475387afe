"""The bench cases of one model in one process: start-up, throughput, decoding, prefill; or a profile of two of them.

Every case is greedy, ignores the end of sequence, finds no prefix in the cache, and prints one JSON line with the
median of its runs, beside the figure of the peer that was measured on the same kind of card.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import shapes

if TYPE_CHECKING:
    from inferplane import LLM

PREFIX = "RESULT "
MAX_MODEL_LEN = 8192


@dataclass(frozen=True)
class Case:
    name: str
    n: int
    inp: int
    out: int
    repeats: int
    metric: str = "out_tok_s"
    """Which rate is compared."""


CASES = [
    Case("decode_bs1_128+256", 1, 128, 256, 3),
    Case("decode_bs32_128+256", 32, 128, 256, 2),
    Case("prefill_16x4096+1", 16, 4096, 1, 3, "total_tok_s"),
    Case("throughput_256x512+256", 256, 512, 256, 2),
    Case("throughput_1024x512+128", 1024, 512, 128, 1),
]
TINY_CASES = [Case("decode_bs2_8+4", 2, 8, 4, 2), Case("prefill_2x16+1", 2, 16, 1, 1, "total_tok_s")]

PEER: dict[str, dict[str, float]] = {
    "llama-8b": {
        "startup": 72.7,
        "decode_bs1_128+256": 202.3,
        "decode_bs32_128+256": 5375,
        "prefill_16x4096+1": 41017,
        "throughput_256x512+256": 9749,
        "throughput_1024x512+128": 6855,
    },
    "qwen3-30b-a3b": {
        "startup": 100.5,
        "decode_bs1_128+256": 230.3,
        "decode_bs32_128+256": 1629,
        "prefill_16x4096+1": 62758,
        "throughput_256x512+256": 7620,
    },
}
"""vLLM 0.24.0 on one H200, bfloat16, dummy weights."""


def emit(model: str, case: str, figures: dict[str, Any], value: float) -> None:
    peer = PEER.get(model, {}).get(case)
    ratio = {} if peer is None else {"peer": peer, "ratio": round(value / peer, 3)}
    print(PREFIX + json.dumps({"model": model, "case": case, **figures, **ratio}), flush=True)


def run_case(llm: LLM, model: str, case: Case) -> None:
    from inferplane.bench.offline import median_of, random_prompts, run_ours

    vocab_size = llm.config.model.vocab_size
    run_ours(llm, case.name, random_prompts(min(case.n, 8), case.inp, vocab_size, 10_000), min(case.out, 4))
    measured = [
        run_ours(llm, case.name, random_prompts(case.n, case.inp, vocab_size, seed), case.out)
        for seed in range(case.repeats)
    ]
    figures = median_of(measured).as_dict()
    kept = ("seconds", "out_tok_s", "total_tok_s", "min_s", "max_s", "commit")
    emit(model, case.name, {key: figures[key] for key in kept if key in figures}, figures[case.metric])


def profile(llm: LLM, cases: list[Case]) -> None:
    """Kernels of each case, cut short: the profiler's own time grows with their number."""
    from inferplane.bench.offline import random_prompts, run_ours

    vocab_size = llm.config.model.vocab_size
    for case in cases:
        out = min(case.out, 24)
        prompts = [random_prompts(case.n, case.inp, vocab_size, seed) for seed in (0, 1)]
        run_ours(llm, case.name, prompts[0], out)
        print(f"--- {case.name}, {out} tokens", flush=True)
        print(profile_run(lambda case=case, out=out, given=prompts[1]: run_ours(llm, case.name, given, out)))


def profile_run(run: Any) -> str:
    """The report of the platform's profiler; of torch's where the device is the host."""
    import torch

    if torch.cuda.is_available():
        from inferplane_cuda.kernel_profile import record, report

        return report(record(run))
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    with torch_profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    return str(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=15))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--engine", default="{}", help="further engine arguments, as JSON")
    parser.add_argument("--cases", default="all")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    cases = TINY_CASES if args.model == "tiny" else CASES
    if args.cases != "all":
        cases = [case for case in cases if case.name in args.cases.split(",")]
    started = time.perf_counter()
    from inferplane import LLM

    with tempfile.TemporaryDirectory() as parent:
        folder = shapes.write_folder(args.model, Path(parent))
        settings = {"max_model_len": MAX_MODEL_LEN, "enable_prefix_caching": False, **json.loads(args.engine)}
        with LLM(str(folder), device=args.device, load_format="dummy", **settings) as llm:
            seconds = time.perf_counter() - started
            emit(args.model, "startup", {"seconds": round(seconds, 2)}, seconds)
            if args.profile:
                profile(llm, [case for case in cases if case.n <= 32])
                return
            for case in cases:
                run_case(llm, args.model, case)


if __name__ == "__main__":
    main()
