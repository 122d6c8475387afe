"""Orders of requests: the policy seam, the built-in policies, and the list that both queues are."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Protocol

from inferplane.request import EngineRequest
from inferplane.scheduler.sequence import Sequence

_order = attrgetter("order")


class SchedulerPolicy(Protocol):
    """Who is served first. A plugin brings one under a name, and ``--scheduler-policy`` picks it."""

    def order_key(self, request: EngineRequest) -> Any:
        """Called once, when a request arrives. Lower keys are admitted first, get their share of a step first, and are
        preempted last; equal keys by arrival. Keys must be comparable with each other."""
        ...


class FcfsPolicy:
    """First come, first served."""

    def order_key(self, request: EngineRequest) -> int:
        return 0


class PriorityPolicy:
    """By ``priority``, lower first, then by arrival."""

    def order_key(self, request: EngineRequest) -> int:
        return request.priority


BUILTIN_POLICIES: Mapping[str, SchedulerPolicy] = MappingProxyType(
    {"fcfs": FcfsPolicy(), "priority": PriorityPolicy()}
)


class SequenceQueue:
    """Sequences, first in order first.

    A preempted sequence goes back to where it was, ahead of all that arrived later. One sorted list of references is
    faster here than a heap: arrivals go to the end, aborts leave the middle, and the batch is walked in order.
    """

    __slots__ = ("_sequences",)

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __reversed__(self) -> Iterator[Sequence]:
        return reversed(self._sequences)

    @property
    def first(self) -> Sequence:
        return self._sequences[0]

    def push(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        """Raises `ValueError` when the sequence is not here."""
        index = bisect_left(self._sequences, sequence.order, key=_order)
        if index == len(self._sequences) or self._sequences[index] is not sequence:
            raise ValueError(f"{sequence!r} is not in this queue")
        del self._sequences[index]
