"""How byte-level vocabularies cut a text before they merge, by the name that GGUF files give it.

A GGUF file carries the merges but only the *name* of the rule, so a name that is not here is refused: with
another rule the ids would be nearly right, which is worse than none.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

from inferplane.models.errors import ModelLoadError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
)
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)


@dataclass(frozen=True)
class SplitRule:
    pattern: str | None = None
    """None for the rule of GPT-2, which the tokenizers library has built in."""
    has_single_digits: bool = False
    has_nfc: bool = False
    """Whether text is composed first."""
    ignores_merges: bool = False
    """Whether a piece that is a token as a whole stays whole."""
    adds_bos: bool = False
    """Where the file does not say."""

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.has_single_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if self.pattern is not None:
            steps.append(pre_tokenizers.Split(Regex(self.pattern), behavior="isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.pattern is None))
        return pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]


_GPT2_RULE = SplitRule()
_SMOLLM_RULE = SplitRule(has_single_digits=True)
_LLAMA3_RULE = SplitRule(_LLAMA3, ignores_merges=True, adds_bos=True)
_QWEN2_RULE = SplitRule(_QWEN2, has_nfc=True)
_TEKKEN_RULE = SplitRule(_TEKKEN, ignores_merges=True, adds_bos=True)

SPLIT_RULES = {
    "default": _GPT2_RULE,
    "gpt-2": _GPT2_RULE,
    "smollm": _SMOLLM_RULE,
    "starcoder": _SMOLLM_RULE,
    "llama-bpe": _LLAMA3_RULE,
    "llama3": _LLAMA3_RULE,
    "llama-v3": _LLAMA3_RULE,
    "qwen2": _QWEN2_RULE,
    "deepseek-r1-qwen": _QWEN2_RULE,
    "tekken": _TEKKEN_RULE,
}
"""By ``tokenizer.ggml.pre``."""


def split_rule(name: str | None, file: object) -> SplitRule:
    if name is None:
        raise ModelLoadError(
            f"{file}: does not say how its tokenizer cuts text (tokenizer.ggml.pre), so it was made by too old a "
            "converter: convert the model again"
        )
    if name not in SPLIT_RULES:
        raise ModelLoadError(
            f"{file}: its tokenizer cuts text by the rule {name!r} (tokenizer.ggml.pre), which is unknown; "
            f"known rules: {', '.join(SPLIT_RULES)}"
        )
    return SPLIT_RULES[name]
