"""32 prompts unlike each other, for comparisons with another implementation."""

from __future__ import annotations

from pathlib import Path


def _license(num_chars: int) -> str:
    """The beginning of a text that does not change."""
    return (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8").lstrip()[:num_chars]


LONG = _license(3300)
"""Some 700 tokens."""

FEW = [
    "The",
    "Once upon a time, in a small village between two rivers, there lived a clockmaker who",
    "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "東京は日本の首都であり、人口は約",
    "🙂 😀 🚀 means: happy, happy, rocket. 🐶 🐱 means:",
    "Shopping list:\n- apples\n- bread\n- cheese\n-",
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
]
"""A first selection for quick runs: short ones, of each kind one."""

PROMPTS = [
    *FEW,
    LONG,
    "It was a bright cold day in April, and the clocks were striking",
    "Water boils at 100 degrees Celsius because",
    "Q: Why is the sky blue?\nA:",
    "Dear Sir or Madam,\n\nI am writing to complain about the",
    '{"name": "Ada", "born": 1815, "languages": ["English", "French"], "works": [',
    "<html>\n  <head>\n    <title>Hello</title>\n  </head>\n  <body>\n",
    "SELECT name, COUNT(*) FROM orders WHERE",
    "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n",
    "for i in $(seq 1 10); do\n  echo",
    "The first digits of pi are 3.14159265358979",
    "12 + 30 = 42\n17 + 5 = 22\n8 + 61 =",
    "Monday, Tuesday, Wednesday,",
    "中国的长城是世界上最长的",
    "대한민국의 수도는",
    "La capitale de la France est Paris. La capitale de l'Italie est",
    "Der Hund lief über die Straße, weil",
    "Привет! Как дела? Сегодня хорошая",
    "مرحبا بالعالم",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "  \n\n\t  ",
    "THE QUICK BROWN FOX JUMPS OVER THE LAZY DOG. the quick brown fox",
    "| city | country |\n|---|---|\n| Oslo | Norway |\n| Rome |",
    "To be, or not to be, that is the question:\nWhether 'tis nobler in the mind to suffer\nThe slings and",
]
