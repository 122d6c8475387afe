"""Prometheus metrics. Figures of the engine are asked for at each scrape, so that none can be stale."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from types import TracebackType

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from inferplane.engine.output import RequestDelta
from inferplane.engine.stats import EngineStats
from inferplane.request import FinishReason, PoolingTask
from inferplane_server.tallies import Durations, Tally

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SUCCESSES = (FinishReason.STOP, FinishReason.LENGTH)
_TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.0)
_DURATION_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)


class ServerMetrics:
    """One registry for each server, none for the process: two servers in one process do not share figures."""

    def __init__(self, read_stats: Callable[[], EngineStats]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(read_stats))
        self.prompt_tokens = self._counter(
            "prompt_tokens", "Prompt tokens of requests that got a first token or a vector."
        )
        self.generation_tokens = Tally("inferplane_generation_tokens", "Output tokens delivered.")
        self._registry.register(self.generation_tokens)
        self.cached_prompt_tokens = self._counter(
            "cached_prompt_tokens", "Prompt tokens that the prefix cache held."
        )
        self.pooled = Counter(
            "inferplane_pooling_requests",
            "Prompts that a vector or a score was made of.",
            ["task"],
            registry=self._registry,
        )
        for task in PoolingTask:
            self.pooled.labels(task.value)
        self.aborted = self._counter("requests_aborted", "Requests whose caller left before the end.")
        self.failed = self._counter("requests_failed", "Requests that an error ended.")
        self.finished = Counter(
            "inferplane_requests_success",
            "Completions by the reason of their end.",
            ["finish_reason"],
            registry=self._registry,
        )
        for reason in _SUCCESSES:
            self.finished.labels(reason.value)
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", _TTFT_BUCKETS_S
        )
        self.itl = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of a request.", _ITL_BUCKETS_S
        )
        self.duration = self._histogram(
            "request_duration_seconds", "From arrival to the last token.", _DURATION_BUCKETS_S
        )

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"inferplane_{name}", text, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Durations:
        durations = Durations(f"inferplane_{name}", text, buckets)
        self._registry.register(durations)
        return durations

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def meter(self) -> RequestMeter:
        return RequestMeter(self)

    def pooling_meter(self, task: PoolingTask) -> PoolingMeter:
        return PoolingMeter(self, task)


class RequestMeter:
    """Follows one prompt from its arrival to its end. Exactly one of finished, aborted and failed is counted."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._arrival_s = time.perf_counter()
        self._last_s: dict[int, float] = {}
        self._has_begun = False
        self._has_ended = False

    def observe(self, delta: RequestDelta) -> None:
        metrics, now_s = self._metrics, time.perf_counter()
        if not self._has_begun:
            self._has_begun = True
            metrics.ttft.observe(now_s - self._arrival_s)
            metrics.prompt_tokens.inc(delta.num_prompt_tokens)
            metrics.cached_prompt_tokens.inc(delta.num_cached_tokens)
        for completion in delta.completions:
            num_tokens = len(completion.token_ids)
            if num_tokens:
                metrics.generation_tokens.add(num_tokens)
                self._observe_gaps(completion.index, num_tokens, now_s)
            if completion.finish_reason is not None and completion.finish_reason in _SUCCESSES:
                metrics.finished.labels(completion.finish_reason.value).inc()
        if delta.finished:
            self._has_ended = True
            metrics.duration.observe(now_s - self._arrival_s)

    def _observe_gaps(self, index: int, num_tokens: int, now_s: float) -> None:
        """Tokens that arrive together share the time since the last ones."""
        last_s = self._last_s.get(index)
        self._last_s[index] = now_s
        if last_s is not None:
            self._metrics.itl.observe((now_s - last_s) / num_tokens, num_tokens)

    def abort(self) -> None:
        if not self._has_ended:
            self._metrics.aborted.inc()

    def fail(self) -> None:
        if not self._has_ended:
            self._metrics.failed.inc()


class PoolingMeter:
    """Follows one prompt that is to be pooled, for the length of a ``with`` block."""

    def __init__(self, metrics: ServerMetrics, task: PoolingTask) -> None:
        self._metrics = metrics
        self._task = task
        self._arrival_s = time.perf_counter()

    def finish(self, delta: RequestDelta) -> None:
        metrics = self._metrics
        metrics.pooled.labels(self._task.value).inc()
        metrics.prompt_tokens.inc(delta.num_prompt_tokens)
        metrics.cached_prompt_tokens.inc(delta.num_cached_tokens)
        metrics.duration.observe(time.perf_counter() - self._arrival_s)

    def __enter__(self) -> PoolingMeter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, asyncio.CancelledError):
            self._metrics.aborted.inc()
        elif error is not None:
            self._metrics.failed.inc()


class EngineCollector(Collector):
    """Reads the engine at the moment of the scrape."""

    def __init__(self, read_stats: Callable[[], EngineStats]) -> None:
        self._read_stats = read_stats

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self._read_stats()
        yield _gauge("requests_running", "Requests in the batch.", stats.num_running)
        yield _gauge("requests_waiting", "Requests that wait for a place in the batch.", stats.num_waiting)
        yield _gauge("kv_cache_usage_ratio", "Share of KV blocks that requests hold, 0 to 1.", stats.kv_usage)
        yield _gauge("kv_blocks", "KV blocks in all.", stats.num_blocks)
        yield _gauge(
            "kv_blocks_free",
            "KV blocks that no request holds, cached ones among them.",
            stats.num_free_blocks,
        )
        yield _counter("preemptions", "Requests put back to be computed again.", stats.num_preemptions)
        yield _counter(
            "prefix_cache_query_tokens",
            "Prompt tokens looked up in the prefix cache.",
            stats.num_prefix_query_tokens,
        )
        yield _counter(
            "prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache.", stats.num_prefix_hit_tokens
        )
        yield _counter("engine_steps", "Steps of the engine.", stats.num_steps)
        if stats.expert_tokens:
            yield _expert_tokens(stats.expert_tokens)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"inferplane_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"inferplane_{name}", text, value=value)


def _expert_tokens(tokens: dict[str, list[int]]) -> Metric:
    family = CounterMetricFamily(
        "inferplane_expert_tokens", "Tokens that an expert of a mixture got.", labels=["layer", "expert"]
    )
    for layer, counts in tokens.items():
        for expert, count in enumerate(counts):
            family.add_metric([layer, str(expert)], count)
    return family
