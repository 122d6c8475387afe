"""`AsyncEngine`: the engine for servers. The core runs in a process of its own, so that HTTP never waits for a step."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from inferplane.config import ConfigError, EngineArgs, EngineConfig
from inferplane.engine.client import SubprocessClient, describe_exit
from inferplane.engine.delta_stream import DeltaStream
from inferplane.engine.errors import (
    EngineDeadError,
    EngineDrainingError,
    EngineEndedError,
    QueueFullError,
    RequestTooLargeError,
)
from inferplane.engine.messages import Fatal, FromEngine, Heartbeat, Progress, Ready, Rejection
from inferplane.engine.output import RequestDelta
from inferplane.engine.spawn import EngineChild
from inferplane.engine.stat_logging import StatLogging, make_stat_loggers
from inferplane.engine.stats import EngineStats

if TYPE_CHECKING:
    from inferplane.api.stats import StatLogger
    from inferplane.engine.front_end import FrontEnd
    from inferplane.request import EngineRequest, PoolingParams, SamplingParams
    from inferplane.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

LONG_TEXT_CHARS = 2000
"""Texts from here on take milliseconds to tokenize, which the event loop should not wait for."""
LAST_WORDS_S = 0.2
"""After the engine process has ended, what it said last may still be on its way."""


class AsyncEngine:
    """Made by `launch`; then used from one event loop.

    One task reads what the engine sends, once a step, and hands it to the requests' streams; another watches for signs
    of life. When the engine ends or falls silent, every request in flight gets `EngineDeadError`, and so does every
    later one: the owner decides whether to launch another engine.
    """

    def __init__(
        self,
        client: SubprocessClient,
        front_end: FrontEnd,
        args: EngineArgs,
        stat_loggers: Sequence[StatLogger] = (),
    ) -> None:
        self._client = client
        self._front_end = front_end
        self._health_timeout_s = args.health_timeout_s
        self._step_timeout_s = args.step_timeout_s
        self._launched_at = time.monotonic()
        self._streams: dict[str, DeltaStream] = {}
        self._stats = EngineStats.at_start()
        self._stat_logging = StatLogging(stat_loggers, self.stats)
        self._tasks: list[asyncio.Task[None]] = []
        self._started: asyncio.Event | None = None
        """Set when the engine is ready, and when it will never be."""
        self._is_ready = False
        self._failure: Exception | None = None
        self._silence_s = 0.0
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_draining = False
        self._is_shut_down = False

    @classmethod
    def launch(cls, args: EngineArgs, child: EngineChild | None = None) -> AsyncEngine:
        """Starts the engine process, unless the caller already has, and returns while it still loads the model.

        Raises `ConfigError`, `ModelLoadError` or `PluginError` for what can be known before; then the child is ended.
        """
        # First of all: the child imports torch for seconds, while this process finds out what it is to load.
        child = child or EngineChild()
        try:
            client = SubprocessClient(child)
        except BaseException:
            child.kill()
            child.wait_for_end()
            child.clean_up()
            raise
        try:
            from inferplane.config.resolve import resolve
            from inferplane.engine.front_end import FrontEnd
            from inferplane.plugins import load_plugins

            plugins = load_plugins()
            config = resolve(args, plugins)
            client.configure(config, heartbeat_s=min(1.0, args.health_timeout_s / 4))
            stat_loggers = make_stat_loggers(plugins.stat_loggers(), config)
            return cls(client, FrontEnd.open(args, config, plugins), args, stat_loggers)
        except BaseException:
            child.kill()
            child.wait_for_end()
            client.close()
            raise

    @property
    def config(self) -> EngineConfig:
        """Once the engine is ready, with the context length that it really serves."""
        return self._front_end.config

    @property
    def tokenizer(self) -> Tokenizer:
        return self._front_end.tokenizer

    @property
    def generation_defaults(self) -> dict[str, Any]:
        """Sampling parameters that the model recommends for requests that leave them open."""
        return dict(self._front_end.generation_defaults)

    @property
    def is_ready(self) -> bool:
        return self._is_ready and self._failure is None

    @property
    def num_in_flight(self) -> int:
        """Requests whose stream has not ended."""
        return len(self._streams)

    def stats(self) -> EngineStats:
        """As last pushed by the engine: after each step, and when it became idle."""
        return self._stats

    def check_health(self) -> None:
        """Raises `EngineDeadError` when the engine has ended or has not given a sign of life for too long."""
        if self._failure is not None:
            kind = EngineEndedError if isinstance(self._failure, EngineEndedError) else EngineDeadError
            raise kind(str(self._failure)) from self._failure

    async def wait_ready(self) -> None:
        """Until the model is loaded; `ConfigError`, `ModelLoadError` or `EngineDeadError` when it never will be."""
        if self._started is None:
            self._started = asyncio.Event()
            self._begin_to_listen()
        await self._started.wait()
        if self._failure is not None:
            # raised once for each request: the tracebacks must not pile up, with every prompt in their frames
            raise self._failure.with_traceback(None)

    def _begin_to_listen(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._listen()), loop.create_task(self._watch())]

        def wait_for_exit() -> None:
            returncode = self._client.child.process.wait()
            with suppress(RuntimeError):  # the loop may be closed by now
                loop.call_soon_threadsafe(loop.call_later, LAST_WORDS_S, self._on_exit, returncode)

        threading.Thread(target=wait_for_exit, name="engine-exit", daemon=True).start()

    # From the engine

    async def _listen(self) -> None:
        try:
            while True:
                self._take(await self._client.receive())
        except Exception as error:
            logger.exception("reading from the engine failed")
            self._fail(EngineDeadError(f"reading from the engine failed: {error}"))

    def _take(self, message: FromEngine) -> None:
        self._silence_s = 0.0
        match message:
            case Progress(outputs, stats, rejections):
                self._stats = stats
                for rejection in rejections:
                    self._reject(rejection)
                processed = self._front_end.outputs.process(outputs)
                if processed.abort_ids:
                    self._client.abort(processed.abort_ids)
                for delta in processed.deltas:
                    if (stream := self._streams.get(delta.request_id)) is not None:
                        stream.put(delta)
            case Heartbeat(step_age_s):
                if step_age_s > self._step_timeout_s:
                    self._fail(
                        EngineDeadError(f"the engine hangs: its step has been running for {step_age_s:.0f} s")
                    )
            case Ready():
                self._on_ready(message)
            case Fatal():
                self._fail(_failure_of(message), ends_itself=True)

    def _on_ready(self, ready: Ready) -> None:
        self._stats = ready.stats
        self._front_end.set_max_model_len(ready.max_model_len)
        phases = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in ready.timings.items())
        logger.info(
            "engine ready after %.2f s (%s): %d KV blocks of %s, max_model_len %d",
            time.monotonic() - self._launched_at,
            phases,
            ready.stats.num_blocks,
            self._front_end.config.kv_dtype,
            ready.max_model_len,
        )
        self._is_ready = True
        self._stat_logging.start()
        assert self._started is not None
        self._started.set()

    def _reject(self, rejection: Rejection) -> None:
        """A request with several completions goes as a whole."""
        request_id = self._front_end.outputs.request_of(rejection.request_id)
        if request_id is None or (stream := self._streams.get(request_id)) is None:
            return
        error: Exception
        if rejection.kind == "queue_full":
            error = QueueFullError(rejection.message)
        elif rejection.kind == "too_large":
            error = RequestTooLargeError(rejection.param, rejection.message)
        else:
            error = ValueError(rejection.message)
        stream.fail(error)

    # Life and death

    async def _watch(self) -> None:
        """Counts silence in ticks of this loop, so that a pause of this process (or of the machine) is not blamed on
        the engine."""
        tick_s = min(0.5, self._health_timeout_s / 8)
        while self._failure is None:
            await asyncio.sleep(tick_s)
            self._silence_s += tick_s
            # what the engine does until it is ready has no bound: it may compile, or read a slow disk
            if self._is_ready and self._silence_s > self._health_timeout_s:
                self._fail(
                    EngineDeadError(f"the engine has not given a sign of life for {self._silence_s:.0f} s")
                )

    def _on_exit(self, returncode: int) -> None:
        if returncode == 0:
            self._fail(EngineEndedError("the engine process was told to end, and did"))
        else:
            self._fail(EngineDeadError(f"the engine process {describe_exit(returncode)}"))

    def _fail(self, error: Exception, *, ends_itself: bool = False) -> None:
        """Ends everything in flight, and the process unless it does so itself."""
        if self._failure is not None:
            return
        self._failure = error
        self._stats = self._stats.without_requests()
        # until it is ready nothing is in flight, and `wait_ready` raises the error where it is told
        if self._is_ready and not self._is_shut_down:
            level = logging.WARNING if isinstance(error, EngineEndedError) else logging.CRITICAL
            logger.log(level, "%s; %d requests in flight are lost", error, len(self._streams))
        if not ends_itself:
            self._client.child.kill()
        if self._started is not None:
            self._started.set()
        for stream in self._streams.values():
            stream.fail(EngineDeadError(str(error)))

    # Requests

    async def encode_prompt(self, prompt: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; long ones are encoded in a thread."""
        if len(prompt) < LONG_TEXT_CHARS:
            return self.tokenizer.encode(prompt, add_special_tokens)
        return await asyncio.to_thread(
            self._front_end.inputs.encode, prompt, add_special_tokens=add_special_tokens
        )

    async def generate(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
    ) -> AsyncGenerator[RequestDelta, None]:
        """Events of one request until it is finished. Closing the generator, or cancelling the task that reads it, ends
        the request wherever it is.

        Refusals are raised by the first step: `ParameterError`, `EmptyPromptError`, `PromptTooLongError`,
        `RequestTooLargeError`, `QueueFullError`, `EngineDrainingError`; `ValueError` for a request id in use.
        `EngineDeadError` may come at any time.
        """
        await self.wait_ready()
        token_ids = (
            await self.encode_prompt(prompt, add_special_tokens) if isinstance(prompt, str) else prompt
        )
        requests = await self._make_requests(request_id, token_ids, params, priority, cache_salt)
        stream = self._submit(request_id, requests)
        try:
            while True:
                delta = await stream.next()
                yield delta
                if delta.finished:
                    return
        finally:
            self._release(request_id)

    async def pool(
        self,
        prompt_token_ids: list[int],
        params: PoolingParams,
        *,
        request_id: str,
        second_text_start: int | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> RequestDelta:
        """The only event of a request for a vector, which carries it unless the request failed. Cancelling the task
        that waits ends the request. Raises what the first step of `generate` raises, and `TaskError`."""
        await self.wait_ready()
        request = self._front_end.inputs.pooling_request(
            request_id,
            prompt_token_ids,
            params,
            second_text_start=second_text_start,
            priority=priority,
            cache_salt=cache_salt,
        )
        stream = self._submit(request_id, [request])
        try:
            return await stream.next()
        finally:
            self._release(request_id)

    async def _make_requests(
        self,
        request_id: str,
        token_ids: list[int],
        params: SamplingParams,
        priority: int,
        cache_salt: str | None,
    ) -> list[EngineRequest]:
        make = partial(
            self._front_end.inputs.requests,
            request_id,
            token_ids,
            params,
            priority=priority,
            cache_salt=cache_salt,
        )
        # many words take a while to spell
        return await asyncio.to_thread(make) if params.bad_words else make()

    def _submit(self, request_id: str, requests: list[EngineRequest]) -> DeltaStream:
        self.check_health()
        if self._is_draining:
            raise EngineDrainingError
        self._check_queue(len(requests))
        self._front_end.outputs.add(request_id, requests)
        stream = self._streams[request_id] = DeltaStream()
        self._idle.clear()
        try:
            self._client.add(requests)
        except BaseException:  # an argument for a plugin's logits processor that no message can carry, say
            self._release(request_id)
            raise
        return stream

    def _check_queue(self, n: int) -> None:
        """Turns requests away that are sure to wait behind too many. The core checks again, with its own counts."""
        limit = self.config.scheduler.max_num_waiting
        if limit is None:
            return
        num_waiting = self._front_end.outputs.num_completions + n - self.config.scheduler.max_num_seqs
        if num_waiting > limit:
            raise QueueFullError(
                f"{num_waiting - n} requests wait already, and max_num_waiting is {limit}: try again later"
            )

    def _release(self, request_id: str) -> None:
        unfinished = self._front_end.outputs.remove(request_id)
        del self._streams[request_id]
        if not self._streams:
            self._idle.set()
        if unfinished and self._failure is None:
            self._client.abort(unfinished)

    # The end

    async def drain(self, timeout_s: float) -> bool:
        """Takes nothing new and waits for what is in flight; False when some of it is not finished in time."""
        self._is_draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def shutdown(self) -> None:
        """Ends the engine process; what is in flight gets `EngineDeadError`. May be called twice."""
        if self._is_shut_down:
            return
        self._is_shut_down = self._is_draining = True
        self._client.request_end()
        await asyncio.to_thread(self._client.child.wait_for_end)
        self._fail(EngineDeadError("the engine was shut down"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._stat_logging.stop)
        self._client.close()


def _failure_of(fatal: Fatal) -> Exception:
    if fatal.kind == "config":
        return ConfigError(fatal.option, fatal.message)
    if fatal.kind == "model":
        from inferplane.models.errors import ModelLoadError

        return ModelLoadError(fatal.message)
    if fatal.kind == "plugin":
        from inferplane.plugins import PluginError

        return PluginError(fatal.message)
    return EngineDeadError(f"the engine cannot go on: {fatal.message}")
