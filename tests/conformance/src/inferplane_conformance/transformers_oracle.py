"""What transformers says about a prompt: greedy tokens from float32, log-probabilities from float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Expected:
    """Of one prompt."""

    token_ids: list[int]
    logprobs: list[float]
    """Of each of them."""
    prompt_logprobs: list[float]
    """Of each prompt token but the first."""


def complete(folder: Path, prompt: Sequence[int], num_tokens: int) -> Expected:
    """``num_tokens`` greedy tokens after the prompt, through any end of sequence."""
    return _complete(folder, tuple(prompt), num_tokens)


@cache
def _complete(folder: Path, prompt: tuple[int, ...], num_tokens: int) -> Expected:
    import torch

    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            logits = _model(folder, "float32")(torch.tensor([tokens])).logits[0, -1]
            tokens.append(int(logits.argmax()))
        ids = torch.tensor(tokens)
        logprobs = _model(folder, "float64")(ids[None, :-1]).logits[0].log_softmax(-1)
    chosen = logprobs.gather(1, ids[1:, None])[:, 0].tolist()
    return Expected(tokens[len(prompt) :], chosen[len(prompt) - 1 :], chosen[: len(prompt) - 1])


@cache
def _model(folder: Path, dtype: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
