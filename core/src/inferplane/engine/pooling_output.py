"""What callers get of a model that pools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from inferplane.config import PoolerConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vector = NDArray[np.float32]

_HOW = {"mean": "the mean of all tokens", "cls": "the first token", "last": "the last token"}


@dataclass(frozen=True)
class EmbeddingOutput:
    """One text as a vector."""

    prompt: str | None
    prompt_token_ids: list[int]
    embedding: Vector
    """[dimensions]"""


@dataclass(frozen=True)
class ClassificationOutput:
    """One text, and what the model makes of it for each class."""

    prompt: str | None
    prompt_token_ids: list[int]
    probs: Vector
    """[number of classes]: probabilities, or logits where those were asked for."""
    labels: tuple[str, ...]

    @property
    def label(self) -> str:
        """Of the likeliest class."""
        return self.labels[int(self.probs.argmax())]


@dataclass(frozen=True)
class ScoreOutput:
    """How well a document answers a query: what a cross-encoder says, or the cosine between the two embeddings."""

    score: float
    num_prompt_tokens: int


def decode_vector(data: bytes) -> Vector:
    """Of an engine's answer; read-only."""
    import numpy as np  # here, because a server of another model needs none

    return np.frombuffer(data, "<f4")


def cosine(first: Vector, second: Vector) -> float:
    """0 where one of them is."""
    import numpy as np

    lengths = float(np.linalg.norm(first)) * float(np.linalg.norm(second))
    return float(first @ second) / lengths if lengths else 0.0


def pooling_announcement(pooler: PoolerConfig) -> str:
    """For the log: how vectors come about."""
    of = f"the model pools {_HOW[pooler.kind]}"
    if pooler.labels:
        return f"{of} for {len(pooler.labels)} classes (activation: {pooler.activation})"
    return f"{of} ({'normalised' if pooler.normalize else 'as it is'}; by {pooler.source})"
