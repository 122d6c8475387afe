"""Token counts grow as they would be counted anew."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from inferplane.runner.penalties import TokenCounts

tokens = st.lists(st.integers(0, 30), max_size=200)


@given(tokens, tokens, tokens)
def test_appending_equals_rebuilding(prompt: list[int], before: list[int], after: list[int]):
    grown = TokenCounts(np.array(prompt, np.int32), np.array(before, np.int32))
    for token in after:
        grown.append(token)
    rebuilt = TokenCounts(np.array(prompt, np.int32), np.array(before + after, np.int32))
    expected = dict.fromkeys(prompt, 0) | dict(Counter(before + after))
    for counts in (grown, rebuilt):
        assert dict(zip(counts.token_ids.tolist(), counts.output_counts.tolist())) == expected
        assert len(counts.token_ids) == len(expected)


def test_many_distinct_tokens_are_kept():
    counts = TokenCounts(np.zeros(0, np.int32), np.zeros(0, np.int32))
    for token in range(1000):
        counts.append(token)
    counts.append(5)
    assert counts.token_ids.tolist() == list(range(1000))
    assert counts.output_counts.tolist() == [1, 1, 1, 1, 1, 2, *[1] * 994]
