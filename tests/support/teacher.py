"""Asking transformers whether an answer is the greedy one, in one forward pass for each answer.

Each token is compared with the best one after those before it: if all agree, all of them together are what transformers
would have answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from inferplane import RequestOutput

TOLERANCE = 1e-4
"""Of a log-probability; and a token that is so little behind the best is a tie, which rounding decides."""


class Teacher:
    """What transformers thinks of given sequences."""

    def __init__(self, model: Path) -> None:
        """``model``: a folder, or a GGUF file, whose numbers are taken for what they stand for."""
        from transformers import AutoModelForCausalLM, GgufConfig

        more = {}
        if model.suffix == ".gguf":
            more = {"gguf_file": model.name, "quantization_config": GgufConfig(dequantize=True)}
        loaded = AutoModelForCausalLM.from_pretrained(
            model.parent if more else model, dtype=torch.float32, attn_implementation="eager", **more
        )
        self._model = loaded.eval()

    def assert_greedy(self, outputs: Sequence[RequestOutput], num_tokens: int) -> None:
        """Each token is the best one after those before it, so that all together are the greedy answer."""
        for output in outputs:
            [completion] = output.outputs
            assert completion.error is None
            assert len(completion.token_ids) == num_tokens
            logprobs = self._logprobs([*output.prompt_token_ids, *completion.token_ids])
            logprobs = logprobs[len(output.prompt_token_ids) - 1 :]
            chosen = torch.tensor(completion.token_ids)
            wanted = logprobs.gather(1, chosen.unsqueeze(1))[:, 0]
            behind = logprobs.max(-1).values - wanted
            assert behind.max() <= TOLERANCE, f"token {int(behind.argmax())} of {output.prompt_token_ids}"
            assert completion.logprobs is not None
            found = torch.tensor([entry.chosen.logprob for entry in completion.logprobs])
            assert (found - wanted).abs().max() <= TOLERANCE

    def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        """Of each token but the first."""
        following = torch.tensor(token_ids[1:])
        return self._logprobs(token_ids).gather(1, following.unsqueeze(1))[:, 0].tolist()

    @torch.inference_mode()
    def _logprobs(self, sequence: list[int]) -> torch.Tensor:
        return self._model(torch.tensor([sequence[:-1]])).logits[0].log_softmax(-1)
