"""The one error of everything between a model's name and its loaded weights."""

from __future__ import annotations


class ModelLoadError(ValueError):
    """A model that cannot be found, read or trusted. The message names the file or tensor and the mend."""
