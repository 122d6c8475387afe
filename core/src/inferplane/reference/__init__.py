"""The reference platform: the engine in plain torch on the host. Slow, simple, and what others are tested against."""
