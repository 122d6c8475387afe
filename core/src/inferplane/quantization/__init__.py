"""Checkpoint formats: what the numbers of a packed weight mean. One file per format; none of them multiplies."""
