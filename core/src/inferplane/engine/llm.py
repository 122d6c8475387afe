"""`LLM`: offline generation in this process."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from inferplane.config import ConfigError, EngineArgs, EngineConfig
from inferplane.engine.client import InProcessClient
from inferplane.engine.front_end import FrontEnd
from inferplane.engine.input_processor import ParsedPrompt, Prompt, parse_prompt
from inferplane.engine.interrupts import deferred_interrupt
from inferplane.engine.output import RequestOutput
from inferplane.engine.pooling_input import check_pooling, leading_text, text_pairs
from inferplane.engine.pooling_output import (
    ClassificationOutput,
    EmbeddingOutput,
    ScoreOutput,
    cosine,
    decode_vector,
)
from inferplane.request import EngineRequest, PoolingParams, PoolingTask, SamplingParams

if TYPE_CHECKING:
    from tqdm import tqdm

    from inferplane.engine.pooling_output import Vector
    from inferplane.engine.stats import EngineStats
    from inferplane.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]
Conversation = Sequence[Message]
Params = SamplingParams | Mapping[str, Any] | None
"""Parameters as they are; or some of them by name, on top of the model's defaults; or only those defaults."""


class LLM:
    """A model loaded into this process, for scripts and batches.

    ``model`` is a folder, a GGUF file, a Hugging Face id, or None for the demo model; further arguments are the fields
    of `EngineArgs`, which may also be given whole as ``engine_args``.

    Raises `ConfigError`, `ModelLoadError` or `PluginError` when it cannot be loaded. Not for use from several threads.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        device: str | None = None,
        dtype: str = "auto",
        tensor_parallel_size: int = 1,
        engine_args: EngineArgs | None = None,
        **more_engine_args: Any,
    ) -> None:
        from inferplane.config.resolve import resolve
        from inferplane.plugins import load_plugins

        if engine_args is None:
            engine_args = _engine_args(
                model=model,
                device=device,
                dtype=dtype,
                tensor_parallel_size=tensor_parallel_size,
                **more_engine_args,
            )
        plugins = load_plugins()
        config = resolve(engine_args, plugins, serves_streams=False)
        self._front_end = FrontEnd.open(engine_args, config, plugins)
        self._client = InProcessClient(config, plugins)
        core = self._client.core
        self._front_end.set_max_model_len(core.config.model.max_model_len)
        phases = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in core.timings.items())
        logger.info(
            "engine ready (%s): %d KV blocks of %s, max_model_len %d",
            phases,
            core.num_blocks,
            self.config.kv_dtype,
            self.config.model.max_model_len,
        )
        self._end = weakref.finalize(self, self._client.shutdown)
        self._unfinished: dict[str, RequestOutput] = {}
        """Everything in flight: while one caller steps the engine, the requests of a paused stream grow too."""
        self._num_requests = 0

    @property
    def config(self) -> EngineConfig:
        return self._front_end.config

    @property
    def generation_defaults(self) -> dict[str, Any]:
        """Sampling parameters that the model recommends."""
        return dict(self._front_end.generation_defaults)

    def get_tokenizer(self) -> Tokenizer:
        return self._front_end.tokenizer

    def stats(self) -> EngineStats:
        return self._client.stats()

    @property
    def timings(self) -> dict[str, float]:
        """Seconds of each phase of the start."""
        return dict(self._client.core.timings)

    def profile(self, run: Callable[[], object]) -> str | None:
        """Calls ``run`` under the profiler of the first rank's device and returns its report: the share of the time in
        which the device was busy, and its most expensive kernels. None, with nothing called, where there is none."""
        return self._client.core.profile(run)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[SamplingParams] = None,
        *,
        use_tqdm: bool = True,
        add_special_tokens: bool = True,
    ) -> list[RequestOutput]:
        """Completes each prompt; results are in the order of the prompts.

        A prompt is a text, ``{"prompt": text}``, ``{"prompt_token_ids": ids}`` or a list of ids. ``sampling_params``
        is one for all or one for each. A request that fails by itself has the finish reason ``error``; a prompt or
        parameter that cannot be served raises before anything runs, naming the first one at fault.

        Ctrl-C drops what is in flight, and the engine can be used again.
        """
        parsed = [parse_prompt(prompt) for prompt in _as_prompts(prompts)]
        params = self._params_for(sampling_params, len(parsed), {})
        return self._complete(self._tokenized(parsed, add_special_tokens), params, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Params | Sequence[SamplingParams] = None,
        *,
        use_tqdm: bool = True,
        **template_kwargs: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation, or each of a list of them. Without ``sampling_params`` an answer may be as long as
        the context allows. ``template_kwargs`` go to the chat template. Raises `ChatTemplateError` as well."""
        conversations = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        prompts = [self._rendered(conversation, template_kwargs) for conversation in conversations]  # type: ignore[arg-type]
        params = self._params_for(sampling_params, len(prompts), {"max_tokens": None})
        return self._complete(prompts, params, use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: Params = None) -> Iterator[RequestOutput]:
        """The request after each step, growing, and the last time finished. Closing the iterator ends the request."""
        [params] = self._params_for(sampling_params, 1, {})
        [tokenized] = self._tokenized([parse_prompt(prompt)], add_special_tokens=True)
        return self._stream(tokenized, params)

    def stream_chat(
        self, messages: Conversation, sampling_params: Params = None, **template_kwargs: Any
    ) -> Iterator[RequestOutput]:
        """As `stream`, for a conversation; greedy unless something says otherwise."""
        [params] = self._params_for(sampling_params, 1, {"max_tokens": None, "temperature": 0.0})
        return self._stream(self._rendered(messages, template_kwargs), params)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        prompt_name: str | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingOutput]:
        """A vector for each prompt, in the order of the prompts.

        ``prompt_name`` picks one of the model's own texts to put before each (``query``, say); ``normalize`` overrides
        what the model was made for; ``dimensions`` asks for shorter vectors where the model has them. Raises
        `TaskError` where the model does not embed, and as `generate` does.
        """
        params = PoolingParams(task=PoolingTask.EMBED, normalize=normalize, dimensions=dimensions)
        check_pooling(self.config.model.pooler, params)
        lead = leading_text(self.config.model.pooler, prompt_name)
        parsed = [parse_prompt(prompt) for prompt in _as_prompts(prompts)]
        if lead:  # token ids are taken as they are
            parsed = [replace(each, text=lead + each.text) if each.text else each for each in parsed]
        return [
            EmbeddingOutput(done.prompt, done.prompt_token_ids, vector)
            for done, vector in self._pool(parsed, params, use_tqdm)
        ]

    def classify(
        self, prompts: Prompt | Sequence[Prompt], *, use_activation: bool = True, use_tqdm: bool = True
    ) -> list[ClassificationOutput]:
        """The probability of each class for each prompt, or the logits without ``use_activation``. Raises as `embed`
        does."""
        params = PoolingParams(task=PoolingTask.CLASSIFY, use_activation=use_activation)
        parsed = [parse_prompt(prompt) for prompt in _as_prompts(prompts)]
        pooler = self.config.model.pooler
        return [
            ClassificationOutput(
                done.prompt, done.prompt_token_ids, vector, () if pooler is None else pooler.labels
            )
            for done, vector in self._pool(parsed, params, use_tqdm)
        ]

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        use_activation: bool = True,
        use_tqdm: bool = True,
    ) -> list[ScoreOutput]:
        """How well each document answers its query: one query for all documents, or one for each.

        A cross-encoder reads both together; of a model that embeds it is the cosine of two vectors. Raises as `embed`
        does.
        """
        pairs = text_pairs(queries, documents)
        params = PoolingParams(task=PoolingTask.SCORE, use_activation=use_activation)
        pooler, inputs = self.config.model.pooler, self._front_end.inputs
        check_pooling(pooler, params)
        if pooler is not None and pooler.labels:
            joined = [inputs.encode_pair(query, document) for query, document in pairs]
            done = self._pool(joined, params, use_tqdm)
            return [ScoreOutput(float(vector[0]), len(each.prompt_token_ids)) for each, vector in done]
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        found = dict(zip(texts, self._pool([ParsedPrompt(text, None) for text in texts], params, use_tqdm)))
        return [
            ScoreOutput(
                cosine(found[query][1], found[document][1]),
                len(found[query][0].prompt_token_ids) + len(found[document][0].prompt_token_ids),
            )
            for query, document in pairs
        ]

    def _pool(
        self, prompts: list[ParsedPrompt], params: PoolingParams, use_tqdm: bool
    ) -> list[tuple[RequestOutput, Vector]]:
        check_pooling(self.config.model.pooler, params)
        tokenized = self._tokenized(prompts, add_special_tokens=True)
        outputs = self._complete(tokenized, [params] * len(prompts), use_tqdm)
        for number, output in enumerate(outputs):
            if output.pooled is None:
                raise RuntimeError(f"prompt {number} failed in the engine: {output.outputs[0].error}")
        return [(output, decode_vector(output.pooled)) for output in outputs if output.pooled is not None]

    # Preparing requests

    def _params_for(
        self, given: Params | Sequence[SamplingParams], num_prompts: int, defaults: dict[str, Any]
    ) -> list[SamplingParams]:
        if isinstance(given, SamplingParams):
            return [given] * num_prompts
        if given is None or isinstance(given, Mapping):
            return [
                SamplingParams(**{**defaults, **self._front_end.generation_defaults, **(given or {})})
            ] * num_prompts
        if len(given) != num_prompts:
            raise ValueError(
                f"there are {num_prompts} prompts but {len(given)} sampling_params: give one, or one for each"
            )
        return list(given)

    def _tokenized(self, prompts: list[ParsedPrompt], add_special_tokens: bool) -> list[ParsedPrompt]:
        """The same prompts, all with token ids; texts are encoded together, on all cores."""
        texts = [prompt.text for prompt in prompts if prompt.token_ids is None and prompt.text is not None]
        encoded = iter(self.get_tokenizer().encode_batch(texts, add_special_tokens) if texts else ())
        return [
            prompt if prompt.token_ids is not None else replace(prompt, token_ids=next(encoded))
            for prompt in prompts
        ]

    def _rendered(self, conversation: Conversation, template_kwargs: dict[str, Any]) -> ParsedPrompt:
        self._front_end.inputs.check_generates()
        tokenizer = self.get_tokenizer()
        text = tokenizer.apply_chat_template(conversation, **template_kwargs)
        # the template has written the special tokens itself
        return ParsedPrompt(text, tokenizer.encode(text, add_special_tokens=False))

    def _submit(
        self, prompts: Sequence[ParsedPrompt], params: Sequence[SamplingParams | PoolingParams]
    ) -> list[RequestOutput]:
        """All of them or, if one is refused, none."""
        submitted: list[RequestOutput] = []
        try:
            for prompt, prompt_params in zip(prompts, params, strict=True):
                request_id = str(self._num_requests)
                self._num_requests += 1
                assert prompt.token_ids is not None
                requests = self._requests(request_id, prompt, prompt.token_ids, prompt_params)
                output = RequestOutput.begin(request_id, prompt.text, prompt.token_ids, len(requests))
                submitted.append(output)
                self._front_end.outputs.add(request_id, requests)
                self._unfinished[request_id] = output
                self._client.add(requests)
        except BaseException:
            self._abort(submitted)
            raise
        return submitted

    def _requests(
        self,
        request_id: str,
        prompt: ParsedPrompt,
        token_ids: list[int],
        params: SamplingParams | PoolingParams,
    ) -> list[EngineRequest]:
        inputs = self._front_end.inputs
        if isinstance(params, PoolingParams):
            return [
                inputs.pooling_request(
                    request_id,
                    token_ids,
                    params,
                    second_text_start=prompt.second_text_start,
                    cache_salt=prompt.cache_salt,
                )
            ]
        return inputs.requests(request_id, token_ids, params, cache_salt=prompt.cache_salt)

    # Running them

    def _step(self) -> None:
        assert self._client.core.has_work(), "requests are unfinished, but the engine knows of none"
        processed = self._front_end.outputs.process(self._client.step())
        if processed.abort_ids:
            self._client.abort(processed.abort_ids)
        for delta in processed.deltas:
            self._unfinished[delta.request_id].grow(delta)
            if delta.finished:
                del self._unfinished[delta.request_id]
        if not self._unfinished:
            while self._client.core.has_work():  # a step ahead of stops that were found late
                self._client.step()

    def _abort(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            if self._unfinished.pop(output.request_id, None) is not None:
                self._client.abort(self._front_end.outputs.remove(output.request_id))

    def _complete(
        self,
        prompts: Sequence[ParsedPrompt],
        params: Sequence[SamplingParams | PoolingParams],
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        outputs = self._submit(prompts, params)
        try:
            with deferred_interrupt() as check_interrupt, _Progress(outputs, use_tqdm) as progress:
                while progress.unfinished():
                    self._step()
                    check_interrupt()
        finally:
            self._abort(outputs)
        return outputs

    def _stream(self, prompt: ParsedPrompt, params: SamplingParams) -> Iterator[RequestOutput]:
        [output] = self._submit([prompt], [params])
        num_shown = 0
        try:
            while True:
                num_tokens = _num_output_tokens(output)
                if num_tokens > num_shown or output.finished:
                    num_shown = num_tokens
                    shown = output.snapshot()
                    yield shown
                    if shown.finished:
                        return
                else:  # while this was paused, another caller's steps may have moved it, even to its end
                    with deferred_interrupt() as check_interrupt:
                        self._step()
                        check_interrupt()
        finally:
            self._abort([output])

    # The end

    def shutdown(self) -> None:
        """Frees the model's memory and ends its workers. May be called twice; the object is of no use afterwards."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


class _Progress:
    """A bar of finished requests, with tokens per second."""

    REFRESH_S = 0.1

    def __init__(self, outputs: Sequence[RequestOutput], is_shown: bool) -> None:
        self._outputs = list(outputs)
        self._is_shown = is_shown
        self._bar: tqdm[None] | None = None
        self._started = self._refreshed = time.perf_counter()
        self._num_done_tokens = 0
        self._num_prompt_tokens = 0

    def __enter__(self) -> Self:
        if self._is_shown:
            from tqdm import tqdm

            self._bar = tqdm(total=len(self._outputs), desc="Requests", dynamic_ncols=True)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self.unfinished()
            self._bar.close()

    def unfinished(self) -> list[RequestOutput]:
        """Those that are not finished; counts the others."""
        done = [output for output in self._outputs if output.finished]
        if done:
            self._outputs = [output for output in self._outputs if not output.finished]
            self._num_done_tokens += sum(map(_num_output_tokens, done))
            self._num_prompt_tokens += sum(len(output.prompt_token_ids) for output in done)
        now = time.perf_counter()
        if self._bar is not None and (done or now - self._refreshed > self.REFRESH_S):
            self._refreshed = now
            seconds = max(now - self._started, 1e-6)
            num_tokens = self._num_done_tokens + sum(map(_num_output_tokens, self._outputs))
            speeds = f"in {self._num_prompt_tokens / seconds:.0f} tok/s, out {num_tokens / seconds:.0f} tok/s"
            self._bar.set_postfix_str(speeds, refresh=False)
            self._bar.update(len(done))
            self._bar.refresh()
        return self._outputs


def _num_output_tokens(output: RequestOutput) -> int:
    return sum(len(completion.token_ids) for completion in output.outputs)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """A text, a dict and a list of token ids are one prompt; a list of prompts is several."""
    if isinstance(prompts, (str, Mapping)) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def _engine_args(**given: Any) -> EngineArgs:
    known = {field.name for field in fields(EngineArgs)}
    if unknown := sorted(given.keys() - known):
        raise ConfigError(
            unknown[0], f"unknown engine settings: {', '.join(unknown)}; there are {', '.join(sorted(known))}"
        )
    return EngineArgs(**given)
