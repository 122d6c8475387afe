"""What callers get back: whole outputs that grow (`RequestOutput`), or only what is new (`RequestDelta`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from inferplane.request import FinishReason, PositionLogprobs


@dataclass
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    """0 to n - 1."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """All sampled tokens, the one that ended the request included."""
    logprobs: list[PositionLogprobs] | None = None
    """One entry for each of ``token_ids``, when asked for."""
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it; None for end of sequence and for length."""
    error: str | None = None
    """What went wrong, when ``finish_reason`` is ``error``."""

    def grow(self, delta: CompletionDelta) -> None:
        """Takes in what is new."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += delta.logprobs
            added = sum(position.chosen.logprob for position in delta.logprobs)
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + added
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason, self.error = (
                delta.finish_reason,
                delta.stop_reason,
                delta.error,
            )


@dataclass
class RequestOutput:
    """A prompt and its completions, so far or finished."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    """One entry for each prompt token; None for the first, which nothing predicts."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""
    finished: bool = False
    pooled: bytes | None = None
    """What was asked for in place of completions: numbers in float32, the lowest byte first."""

    @classmethod
    def begin(cls, request_id: str, prompt: str | None, prompt_token_ids: list[int], n: int) -> RequestOutput:
        """Of a request that has no output yet."""
        return cls(request_id, prompt, prompt_token_ids, [CompletionOutput(index) for index in range(n)])

    def grow(self, delta: RequestDelta) -> None:
        """Takes in the next event of the request."""
        self.num_cached_tokens = delta.num_cached_tokens
        self.finished, self.pooled = delta.finished, delta.pooled
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        for added in delta.completions:
            self.outputs[added.index].grow(added)

    def snapshot(self) -> RequestOutput:
        """A copy that later events do not change."""
        outputs = [
            replace(o, token_ids=list(o.token_ids), logprobs=None if o.logprobs is None else list(o.logprobs))
            for o in self.outputs
        ]
        return replace(self, outputs=outputs)


@dataclass(slots=True)
class CompletionDelta:
    """What is new in one completion since the last event of its request."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_output_tokens: int = 0
    """Total so far, for usage figures."""


@dataclass(slots=True)
class RequestDelta:
    """One event of a streamed request: deltas of one or more of its completions."""

    request_id: str
    completions: list[CompletionDelta]
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    """Once, in the event in which the prompt is done."""
    finished: bool = False
    """Whether every completion of the request has ended."""
    pooled: bytes | None = None
    """What was asked for in place of completions: numbers in float32, the lowest byte first."""


def merge_deltas(deltas: Sequence[RequestDelta]) -> RequestDelta:
    """One event that says what these events of one request, in their order, say."""
    if len(deltas) == 1:
        return deltas[0]
    parts: dict[int, list[CompletionDelta]] = {}
    for delta in deltas:
        for completion in delta.completions:
            parts.setdefault(completion.index, []).append(completion)
    last = deltas[-1]
    return RequestDelta(
        request_id=last.request_id,
        completions=[_merge_completion(parts[index]) for index in sorted(parts)],
        num_prompt_tokens=last.num_prompt_tokens,
        num_cached_tokens=last.num_cached_tokens,
        prompt_logprobs=next((d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None), None),
        finished=last.finished,
        pooled=last.pooled,
    )


def _merge_completion(parts: Sequence[CompletionDelta]) -> CompletionDelta:
    logprobs = [position for part in parts for position in part.logprobs or ()]
    return replace(
        parts[-1],
        text="".join(part.text for part in parts),
        token_ids=[token_id for part in parts for token_id in part.token_ids],
        logprobs=logprobs if any(part.logprobs is not None for part in parts) else None,
    )
