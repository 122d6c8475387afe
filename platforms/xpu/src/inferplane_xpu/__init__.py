"""Intel GPU platform plugin of InferPlane."""
