"""The bar that loading shows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def with_progress(items: Iterable[tuple[int, T]], total_bytes: int, *, show: bool) -> Iterator[T]:
    """Yields the second of each pair; the first is the number of bytes that it stands for."""
    if not show:
        for _, item in items:
            yield item
        return
    from tqdm import tqdm

    with tqdm(total=total_bytes, desc="Loading weights", unit="B", unit_scale=True, unit_divisor=1024) as bar:
        for num_bytes, item in items:
            yield item
            bar.update(num_bytes)
