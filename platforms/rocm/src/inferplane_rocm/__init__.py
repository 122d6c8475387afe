"""AMD GPU platform plugin of InferPlane."""
