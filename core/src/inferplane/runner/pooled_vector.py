"""From what a model made of a prompt to what the caller asked for. Host code without torch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inferplane.config import PoolerConfig
from inferplane.request import PoolingParams

Vector = NDArray[np.float32]
MIN_LENGTH = 1e-12
"""Below it a vector is not stretched to length 1: torch's own bound."""


def finish_vector(vector: Vector, params: PoolingParams, pooler: PoolerConfig) -> Vector:
    """An embedding cut and normalised, or class logits as probabilities."""
    if pooler.labels:
        return _probabilities(vector, pooler.activation) if params.use_activation else vector
    vector = vector[: params.dimensions]
    if not (pooler.normalize if params.normalize is None else params.normalize):
        return vector
    return vector / max(float(np.linalg.norm(vector)), MIN_LENGTH)


def _probabilities(logits: Vector, activation: str) -> Vector:
    if activation == "softmax":
        shifted = np.exp(logits - logits.max())
        return shifted / shifted.sum()
    return 0.5 * (1.0 + np.tanh(0.5 * logits)) if activation == "sigmoid" else logits


def encode_vector(vector: Vector) -> bytes:
    """float32, the lowest byte first, on any machine."""
    return vector.astype("<f4").tobytes()


def decode_vector(data: bytes) -> Vector:
    return np.frombuffer(data, "<f4")
