"""`OutputProcessor`: from tokens of the engine core to text for callers."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from inferplane.engine.detokenizer import Detokenizer, DetokenizerFactory
from inferplane.engine.output import CompletionDelta, RequestDelta
from inferplane.engine.stop_strings import StopStrings
from inferplane.request import EngineOutput, EngineRequest, FinishReason, SamplingParams
from inferplane.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProcessedOutputs:
    """What came of the outputs of one step."""

    deltas: list[RequestDelta]
    """At most one for each request."""
    abort_ids: list[str]
    """Completions that a stop string ended: the engine core does not know of it and has to be told."""


@dataclass(slots=True)
class _Request:
    request_id: str
    num_prompt_tokens: int
    completion_ids: list[str]
    num_unfinished: int
    num_cached_tokens: int | None = None
    """Known with the first output."""


class OutputProcessor:
    """Keeps the text side of every request in flight. Outputs of requests that it does not know are dropped: they were
    on their way when the request ended."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._detokenizers = DetokenizerFactory(tokenizer)
        self._requests: dict[str, _Request] = {}
        self._completions: dict[str, _Completion] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def request_ids(self) -> list[str]:
        return list(self._requests)

    @property
    def num_completions(self) -> int:
        """Unfinished ones, over all requests."""
        return len(self._completions)

    def add(self, request_id: str, requests: Sequence[EngineRequest]) -> None:
        """``requests`` are the completions, as `InputProcessor.requests` made them. Raises `ValueError` for an id in
        use."""
        if request_id in self._requests:
            raise ValueError(f"request id {request_id!r} is in use by a request that has not finished")
        ids = [completion.request_id for completion in requests]
        request = _Request(request_id, len(requests[0].prompt_token_ids), ids, num_unfinished=len(ids))
        self._requests[request_id] = request
        for index, completion in enumerate(requests):
            detokenizer = self._detokenizers.create(
                completion.prompt_token_ids, skip_special_tokens=completion.params.skip_special_tokens
            )
            self._completions[completion.request_id] = _Completion(
                request, index, completion.params, detokenizer
            )

    def request_of(self, completion_id: str) -> str | None:
        """The id of the request that an unfinished completion belongs to."""
        completion = self._completions.get(completion_id)
        return None if completion is None else completion.request.request_id

    def remove(self, request_id: str) -> list[str]:
        """Forgets a request; returns the ids of its completions that the engine core may still run."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return []
        return [i for i in request.completion_ids if self._completions.pop(i, None) is not None]

    def process(self, outputs: Iterable[EngineOutput]) -> ProcessedOutputs:
        deltas: dict[str, RequestDelta] = {}
        abort_ids: list[str] = []
        for output in outputs:
            completion = self._completions.get(output.request_id)
            if completion is None:
                continue
            request = completion.request
            delta = deltas.get(request.request_id)
            if delta is None:
                delta = deltas[request.request_id] = RequestDelta(
                    request.request_id, [], request.num_prompt_tokens
                )
            added = _take(completion, output)
            delta.completions.append(added)
            # the first completion to run fills the cache for the others, so its figure is the telling one
            if request.num_cached_tokens is None:
                request.num_cached_tokens = output.num_cached_tokens
            delta.num_cached_tokens = request.num_cached_tokens
            if output.prompt_logprobs is not None:
                delta.prompt_logprobs = output.prompt_logprobs
            if added.finish_reason is not None:
                delta.pooled = output.pooled
                if output.finish_reason is None:
                    abort_ids.append(output.request_id)
                self._finish(output.request_id, request)
                delta.finished = request.num_unfinished == 0
        return ProcessedOutputs(list(deltas.values()), abort_ids)

    def _finish(self, finished_id: str, request: _Request) -> None:
        del self._completions[finished_id]
        request.num_unfinished -= 1
        if request.num_unfinished == 0:
            del self._requests[request.request_id]


def _take(completion: _Completion, output: EngineOutput) -> CompletionDelta:
    try:
        return completion.take(output)
    except Exception as error:  # one request's trouble must not become that of all others
        logger.exception("the text of %s could not be put together", output.request_id)
        reason = f"{type(error).__name__}: {error}"
        return CompletionDelta(completion.index, "", [], finish_reason=FinishReason.ERROR, error=reason)


class _Completion:
    """The text of one completion."""

    __slots__ = (
        "_detokenizer",
        "_min_tokens",
        "_num_tokens",
        "_stop_token_ids",
        "_stops",
        "index",
        "request",
    )

    def __init__(
        self, request: _Request, index: int, params: SamplingParams, detokenizer: Detokenizer
    ) -> None:
        self.request = request
        self.index = index
        self._detokenizer = detokenizer
        self._stops = StopStrings(params.stop or (), include_in_output=params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens
        self._stop_token_ids = params.stop_token_ids or ()
        self._num_tokens = 0

    def take(self, output: EngineOutput) -> CompletionDelta:
        """The delta of one step; ``finish_reason`` set when the completion ends with it."""
        token_ids, logprobs = output.new_token_ids, output.logprobs
        # the token that ends an answer is no part of its text
        text_ids = token_ids if output.stop_token_id is None else token_ids[:-1]
        text, num_read = self._read(text_ids)
        stop_reason: int | str | None = None
        reason = output.finish_reason
        if self._stops.found is not None:
            reason, stop_reason = FinishReason.STOP, self._stops.found
            token_ids = token_ids[:num_read]
            logprobs = logprobs[:num_read] if logprobs is not None else None
        elif reason is not None:
            text += self._stops.push(self._detokenizer.finish(), is_searched=False) + self._stops.finish()
            if output.stop_token_id in self._stop_token_ids:
                stop_reason = output.stop_token_id
        self._num_tokens += len(token_ids)
        return CompletionDelta(
            self.index, text, token_ids, logprobs, reason, stop_reason, output.error, self._num_tokens
        )

    def _read(self, token_ids: list[int]) -> tuple[str, int]:
        """The text that may be shown, and the number of tokens read before a stop string was complete, if one was."""
        if len(token_ids) == 1 and not self._stops.is_watching:  # the usual step
            return self._detokenizer.push(token_ids[0]), 1
        shown = ""
        for num_read, token_id in enumerate(token_ids, start=1):
            is_searched = self._num_tokens + num_read > self._min_tokens
            shown += self._stops.push(self._detokenizer.push(token_id), is_searched=is_searched)
            if self._stops.found is not None:
                return shown, num_read
        return shown, len(token_ids)
