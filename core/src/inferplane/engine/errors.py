"""What can go wrong between a caller and the engine. Sampling parameters out of range are `ParameterError`."""

from __future__ import annotations

from collections.abc import Sequence

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
    "TaskError",
]


class PromptError(ValueError):
    """A prompt that cannot be answered."""


class EmptyPromptError(PromptError):
    """A prompt without a single token."""

    def __init__(self) -> None:
        super().__init__("the prompt is empty: it has no tokens, and the tokenizer adds none of its own")


class PromptTooLongError(PromptError):
    """A prompt that leaves no room for one more token, where there is to be one."""

    def __init__(
        self, num_prompt_tokens: int, max_model_len: int, *, is_exact: bool = True, needs_room: bool = True
    ) -> None:
        """``num_prompt_tokens`` may be a floor, of a prompt so long that it was not encoded."""
        number = f"{num_prompt_tokens}" if is_exact else f"{num_prompt_tokens} or more"
        limit = (
            f"{max_model_len} tokens for prompt and output together: a prompt may have at most {max_model_len - 1}"
            if needs_room
            else f"{max_model_len} tokens"
        )
        super().__init__(f"the prompt has {number} tokens, but the context length is {limit}")
        self.num_prompt_tokens = num_prompt_tokens
        self.max_model_len = max_model_len


class TaskError(ValueError):
    """The model is not made for what is asked of it."""

    def __init__(self, asked: str, tasks: Sequence[str]) -> None:
        made_for = " and to ".join(_WORDS[task] for task in tasks)
        super().__init__(f"the model cannot {_WORDS[asked]}: it is loaded to {made_for}")
        self.asked = asked


_WORDS = {
    "generate": "generate text",
    "embed": "embed texts",
    "classify": "classify texts",
    "score": "score pairs of texts",
}


class EngineDrainingError(QueueFullError):
    """The engine finishes what it has and takes nothing new."""

    def __init__(self) -> None:
        super().__init__("the engine is shutting down and takes no new requests")


class EngineDeadError(RuntimeError):
    """The engine ended or hangs. What was in flight is lost; a new engine has to be started."""


class EngineEndedError(EngineDeadError):
    """The engine's process was told to end, by a signal of its own, and did so in order."""
