"""OpenAI-compatible HTTP server of InferPlane."""
