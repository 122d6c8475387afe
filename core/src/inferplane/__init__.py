"""InferPlane: serve large language models on any device.

The public names are resolved on first use, so that ``import inferplane`` costs milliseconds and imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inferplane.engine.llm import LLM
    from inferplane.engine.output import CompletionOutput, RequestOutput
    from inferplane.engine.pooling_output import ClassificationOutput, EmbeddingOutput, ScoreOutput
    from inferplane.request import SamplingParams

    __version__: str

__all__ = [
    "LLM",
    "ClassificationOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "RequestOutput",
    "SamplingParams",
    "ScoreOutput",
    "__version__",
]

_HOME_OF_NAME = {
    "LLM": "inferplane.engine.llm",
    "ClassificationOutput": "inferplane.engine.pooling_output",
    "CompletionOutput": "inferplane.engine.output",
    "EmbeddingOutput": "inferplane.engine.pooling_output",
    "ScoreOutput": "inferplane.engine.pooling_output",
    "RequestOutput": "inferplane.engine.output",
    "SamplingParams": "inferplane.request",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        # importlib.metadata alone costs tens of milliseconds, a cost that only those who ask should pay
        from importlib.metadata import version

        value: Any = version("inferplane")
    elif name in _HOME_OF_NAME:
        value = getattr(import_module(_HOME_OF_NAME[name]), name)
    else:
        raise AttributeError(f"module 'inferplane' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
