"""NVIDIA GPU platform plugin of InferPlane."""
