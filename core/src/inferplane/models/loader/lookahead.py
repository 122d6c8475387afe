"""One item of work ahead of whoever takes the items."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def map_ahead(work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """As ``map``, with the next result being made on another thread while the caller is busy with the last one.

    No more than two results exist at once, so that a large tensor is not kept while many wait. What ``work`` raises
    is raised where its result would have come.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="lookahead") as pool:
        pending: Future[R] | None = None
        try:
            for item in items:
                previous, pending = pending, pool.submit(work, item)
                if previous is not None:
                    yield previous.result()
            if pending is not None:
                yield pending.result()
        finally:
            if pending is not None:
                pending.cancel()
