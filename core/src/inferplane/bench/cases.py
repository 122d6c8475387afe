"""Cases by name (``throughput_256x512+256``, ``decode_bs1_128+256``, ``startup``), several in one start."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from inferplane.bench.offline import build_llm, median_of, random_prompts, run_ours
from inferplane.bench.report import Measurement
from inferplane.config.args import EngineArgs

if TYPE_CHECKING:
    from inferplane.config import DeviceConfig
    from inferplane.engine.llm import LLM

STARTUP = "startup"
DEFAULT_CASES = (
    STARTUP,
    "throughput_256x512+256",
    "decode_bs1_128+256",
    "decode_bs32_128+256",
    "prefill_16x4096+1",
)
WARM_UP_TOKENS = 8
"""Output tokens of the run before a case, which meets every shape that the case has."""

_FORMS = re.compile(
    r"(?:throughput_(?P<t>\d+)x|decode_bs(?P<d>\d+)_|prefill_(?P<p>\d+)x)(?P<inp>\d+)\+(?P<out>\d+)"
)


@dataclass(frozen=True)
class Case:
    name: str
    n: int
    """Requests, all given at once."""
    inp: int
    """Prompt tokens of each."""
    out: int
    """Output tokens of each."""


def parse_case(name: str) -> Case:
    """Raises `ValueError` that says which forms there are."""
    if name == STARTUP:
        return Case(name, 0, 0, 0)
    match = _FORMS.fullmatch(name)
    numbers = [int(value) for value in match.groupdict().values() if value] if match else []
    if not match or not all(numbers) or (match["p"] and match["out"] != "1"):
        raise ValueError(
            f"{name!r} is no case; write throughput_NxIN+OUT, decode_bsN_IN+OUT, prefill_NxIN+1 or startup"
        )
    return Case(name, *numbers)


def run_cases(
    engine_args: EngineArgs, cases: Sequence[Case], *, repeat: int, seed: int, profile: Path | None = None
) -> Iterator[Measurement]:
    """Starts the engine once, and yields the median of each case as soon as there is one.

    Prompts are random token ids, which no prefix cache and no tokenizer helps with, so both are off. ``profile`` is a
    folder for one report a case, of a run that is not among those measured.
    """
    engine_args = replace(engine_args, enable_prefix_caching=False, skip_tokenizer_init=True)
    started = time.perf_counter()
    longest = max((case.inp + case.out for case in cases), default=0) or 2048
    with build_llm(engine_args, longest) as llm:
        start_s = time.perf_counter() - started
        config = llm.config
        vocab_size = config.model.vocab_size
        device_name = _device_name(config.device)
        for case in cases:
            if case.name == STARTUP:
                device, dtype = config.device.platform, config.model.dtype
                extra = {f"{phase.replace(' ', '_')}_s": round(s, 2) for phase, s in llm.timings.items()}
                yield Measurement(
                    "inferplane",
                    config.model.model,
                    STARTUP,
                    device,
                    dtype,
                    0,
                    0,
                    0,
                    start_s,
                    extra | device_name,
                )
                continue
            prompts = [
                random_prompts(case.n, case.inp, vocab_size, seed + turn) for turn in range(repeat + 1)
            ]
            run_ours(llm, case.name, prompts[-1], min(case.out, WARM_UP_TOKENS))
            median = median_of([run_ours(llm, case.name, each, case.out) for each in prompts[:-1]])
            median.extra |= device_name
            yield median
            if profile is not None:
                write_profile(llm, case, prompts[-1], profile)


def _device_name(device: DeviceConfig) -> dict[str, str]:
    from inferplane.plugins import load_plugins

    found = load_plugins(quiet=True).select_device(f"{device.platform}:{device.index}")
    return {"device_name": found.name}


def write_profile(llm: LLM, case: Case, prompts: list[list[int]], folder: Path) -> None:
    """One run of the case under the device's profiler. Raises `ValueError` where the platform has none."""
    report = llm.profile(lambda: run_ours(llm, case.name, prompts, case.out))
    if report is None:
        raise ValueError(f"the platform {llm.config.device.platform} has no profiler")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{case.name}.txt").write_text(f"{case.name}\n{report}\n")
