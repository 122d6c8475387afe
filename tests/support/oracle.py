"""What transformers says about prompts: greedy tokens from float32, log-probabilities from float64.

Greedy tokens are those of `generate` in float32. Log-probabilities are of the same tokens in float64, because float32
is itself uncertain by 4e-5 in those of SmolLM2 (measured over 20 prompts × 32 tokens, of one forward and of steps
alike), and a bar of 1e-4 should not be half used up by the oracle.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

if TYPE_CHECKING:
    import torch


FORM = b"1"
"""Of the answers that are kept: another one when something else is computed."""


@dataclass(frozen=True)
class Expected:
    """Of one prompt."""

    prompt: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    """Greedy, through any end of sequence."""
    leads: list[float]
    """For each of them how far its logit is above the second best."""
    logprobs: list[float]
    """Of each of them."""
    prompt_logprobs: list[float]
    """Of each prompt token but the first."""

    def first(self, num_tokens: int) -> Expected:
        """The same with fewer tokens."""
        n = num_tokens
        return Expected(
            self.prompt,
            self.prompt_token_ids,
            self.token_ids[:n],
            self.leads[:n],
            self.logprobs[:n],
            self.prompt_logprobs,
        )


class Oracle:
    """Of one model folder. Answers are kept in files: one process computes each of them, for all and for later runs."""

    def __init__(self, folder: Path, cache_folder: Path) -> None:
        """Oracles of several models may share ``cache_folder``: files are named by all that an answer depends on."""
        self.folder = folder
        self._cache_folder = cache_folder
        self._models: dict[str, Any] = {}

    def complete(self, prompts: Sequence[str], num_tokens: int) -> list[Expected]:
        """Each prompt with ``num_tokens`` greedy tokens."""
        return [self._complete(prompt, num_tokens) for prompt in prompts]

    def _complete(self, prompt: str, num_tokens: int) -> Expected:
        key = hashlib.sha256(f"{_identity(self.folder)} {num_tokens} {prompt}".encode()).hexdigest()[:24]
        file = self._cache_folder / f"{key}.json"
        with FileLock(file.with_suffix(".lock")):
            if not file.exists():
                answer = json.dumps(asdict(self._compute(prompt, num_tokens)))
                unfinished = file.with_suffix(".unfinished")
                unfinished.write_text(answer, encoding="utf-8")
                unfinished.rename(file)
        return Expected(**json.loads(file.read_text(encoding="utf-8")))

    def _compute(self, prompt: str, num_tokens: int) -> Expected:
        import torch

        prompt_ids = self._tokenizer()(prompt).input_ids
        with torch.inference_mode():
            sequence, logits = self._generate(prompt_ids, num_tokens)
            best = logits.topk(2).values
            logprobs = self._logprobs(sequence)
        return Expected(
            prompt,
            prompt_ids,
            sequence[len(prompt_ids) :],
            (best[:, 0] - best[:, 1]).tolist(),
            logprobs[len(prompt_ids) - 1 :],
            logprobs[: len(prompt_ids) - 1],
        )

    def _generate(self, prompt_ids: list[int], num_tokens: int) -> tuple[list[int], torch.Tensor]:
        """The whole sequence, and the logits ``[num_tokens, vocab_size]`` that its new tokens were chosen by."""
        import torch

        output = self._model("float32").generate(
            torch.tensor([prompt_ids]),
            do_sample=False,
            max_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return output.sequences[0].tolist(), torch.cat(output.logits)

    def _logprobs(self, sequence: list[int]) -> list[float]:
        """Of each token but the first."""
        import torch

        ids = torch.tensor(sequence)
        logprobs = self._model("float64")(ids[None, :-1]).logits[0].log_softmax(-1)
        return logprobs.gather(1, ids[1:, None])[:, 0].tolist()

    def _model(self, dtype: str) -> Any:
        if dtype not in self._models:
            import torch
            from transformers import AutoModelForCausalLM

            loaded = AutoModelForCausalLM.from_pretrained(self.folder, dtype=getattr(torch, dtype))
            self._models[dtype] = loaded.eval()
        return self._models[dtype]

    def _tokenizer(self) -> Any:
        if "tokenizer" not in self._models:
            from transformers import PreTrainedTokenizerFast

            # AutoTokenizer overrules tokenizer.json for some model types, with the pre-tokenizer usual for them
            self._models["tokenizer"] = PreTrainedTokenizerFast.from_pretrained(self.folder)
        return self._models["tokenizer"]


@cache
def _identity(folder: Path) -> str:
    """Everything but the prompt that an answer depends on."""
    digest = hashlib.sha256(FORM)
    for library in ("torch", "transformers"):
        digest.update(version(library).encode())
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        with (folder / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
