"""Counts that are kept for every token. The client library's own take locks, which one event loop does not need, and
cost more than putting the token's bytes together."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Tally(Collector):
    """A counter. ``name`` is without ``_total``."""

    def __init__(self, name: str, text: str) -> None:
        self._name = name
        self._text = text
        self._count = 0

    def add(self, count: int) -> None:
        self._count += count

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(self._name, self._text, value=self._count)


class Durations(Collector):
    """A histogram of seconds. A duration belongs to the first bucket whose bound, in ascending order, it does not
    exceed."""

    def __init__(self, name: str, text: str, bounds_s: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds_s = [*bounds_s, float("inf")]
        self._counts = [0] * len(self._bounds_s)
        self._sum_s = 0.0

    def observe(self, seconds: float, count: int = 1) -> None:
        """``count`` durations of ``seconds`` each."""
        self._counts[bisect_left(self._bounds_s, seconds)] += count
        self._sum_s += seconds * count

    def collect(self) -> Iterator[Metric]:
        names = map(floatToGoString, self._bounds_s)
        yield HistogramMetricFamily(
            self._name, self._text, buckets=list(zip(names, accumulate(self._counts))), sum_value=self._sum_s
        )
