"""Requests as they arrive. Names are OpenAI's, and for what OpenAI lacks those that this field already uses."""
