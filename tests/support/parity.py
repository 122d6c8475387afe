"""Comparing what the engine answered with what the oracle expects."""

from __future__ import annotations

from collections.abc import Sequence

from inferplane import RequestOutput
from oracle import Expected

LOGPROB_TOLERANCE = 1e-4
TIE_LEAD = 1e-4
"""Where the oracle's best logit leads by less than this, rounding decides, and a different choice is no error."""
MAX_TIES = 1
"""In one set of prompts. More of them would mean that differences are explained away."""


def assert_parity(
    outputs: Sequence[RequestOutput],
    expected: Sequence[Expected],
    *,
    tolerance: float = LOGPROB_TOLERANCE,
) -> None:
    """Tokens are the same, and the log-probabilities that are there are within the tolerance."""
    assert len(outputs) == len(expected)
    num_ties = 0
    for output, wanted in zip(outputs, expected):
        assert output.prompt_token_ids == wanted.prompt_token_ids, wanted.prompt
        num_same = _num_same_tokens(output, wanted)
        num_ties += num_same < len(wanted.token_ids)
        _assert_logprobs(output, wanted, num_same, tolerance)
    assert num_ties <= MAX_TIES, f"{num_ties} of {len(outputs)} answers leave the oracle's at a tie"


def leads_at_first_difference(outputs: Sequence[RequestOutput], expected: Sequence[Expected]) -> list[float]:
    """Of each answer that differs from the oracle's: by how much the oracle's choice led there."""
    leads = []
    for output, wanted in zip(outputs, expected, strict=True):
        pairs = zip(output.outputs[0].token_ids, wanted.token_ids, strict=True)
        first = next((index for index, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        if first is not None:
            leads.append(wanted.leads[first])
    return leads


def _num_same_tokens(output: RequestOutput, wanted: Expected) -> int:
    """Up to a tie, or all. Anything else fails."""
    [completion] = output.outputs
    assert completion.error is None, f"{wanted.prompt!r}: {completion.error}"
    assert len(completion.token_ids) == len(wanted.token_ids), wanted.prompt
    pairs = zip(completion.token_ids, wanted.token_ids)
    first = next((index for index, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    if first is None:
        return len(wanted.token_ids)
    assert wanted.leads[first] < TIE_LEAD, (
        f"after {wanted.prompt!r} token {first} is {completion.token_ids[first]} instead of {wanted.token_ids[first]}, "
        f"which leads by {wanted.leads[first]:.2g}:\n{completion.token_ids}\n{wanted.token_ids}"
    )
    return first


def _assert_logprobs(output: RequestOutput, wanted: Expected, num_same: int, tolerance: float) -> None:
    [completion] = output.outputs
    if completion.logprobs is not None:
        assert len(completion.logprobs) == len(completion.token_ids)
        assert [entry.chosen.token_id for entry in completion.logprobs] == completion.token_ids
        found = [entry.chosen.logprob for entry in completion.logprobs[:num_same]]
        assert largest_difference(found, wanted.logprobs[:num_same]) < tolerance, wanted.prompt
    if output.prompt_logprobs is not None:
        assert output.prompt_logprobs[0] is None
        entries = [entry for entry in output.prompt_logprobs[1:] if entry is not None]
        assert [entry.chosen.token_id for entry in entries] == output.prompt_token_ids[1:]
        found = [entry.chosen.logprob for entry in entries]
        assert largest_difference(found, wanted.prompt_logprobs) < tolerance, wanted.prompt


def largest_difference(found: Sequence[float], wanted: Sequence[float]) -> float:
    assert len(found) == len(wanted)
    return max((abs(a - b) for a, b in zip(found, wanted)), default=0.0)
