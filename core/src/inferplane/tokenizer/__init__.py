"""Text to token ids and back, and chat templates. Free of torch and of transformers."""

from inferplane.tokenizer.chat_template import ChatTemplateError
from inferplane.tokenizer.tokenizer import Tokenizer

__all__ = ["ChatTemplateError", "Tokenizer"]
