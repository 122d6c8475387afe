"""CPU platform plugin of InferPlane."""
