"""What can go wrong between a caller and the engine. Sampling parameters out of range are `ParameterError`."""

from __future__ import annotations

from inferplane.scheduler.errors import QueueFullError, RequestTooLargeError

__all__ = [
    "EmptyPromptError",
    "EngineDeadError",
    "EngineDrainingError",
    "EngineEndedError",
    "PromptError",
    "PromptTooLongError",
    "QueueFullError",
    "RequestTooLargeError",
]


class PromptError(ValueError):
    """A prompt that cannot be answered."""


class EmptyPromptError(PromptError):
    """A prompt without a single token."""

    def __init__(self) -> None:
        super().__init__("the prompt is empty: it has no tokens, and the tokenizer adds none of its own")


class PromptTooLongError(PromptError):
    """A prompt that leaves no room for one more token."""

    def __init__(self, num_prompt_tokens: int, max_model_len: int, *, is_exact: bool = True) -> None:
        """``num_prompt_tokens`` may be a floor, of a prompt so long that it was not encoded."""
        number = f"{num_prompt_tokens}" if is_exact else f"{num_prompt_tokens} or more"
        super().__init__(
            f"the prompt has {number} tokens, but the context length is {max_model_len} tokens for "
            f"prompt and output together: a prompt may have at most {max_model_len - 1}"
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.max_model_len = max_model_len


class EngineDrainingError(QueueFullError):
    """The engine finishes what it has and takes nothing new."""

    def __init__(self) -> None:
        super().__init__("the engine is shutting down and takes no new requests")


class EngineDeadError(RuntimeError):
    """The engine ended or hangs. What was in flight is lost; a new engine has to be started."""


class EngineEndedError(EngineDeadError):
    """The engine's process was told to end, by a signal of its own, and did so in order."""
