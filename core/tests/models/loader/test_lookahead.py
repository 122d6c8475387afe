"""Results in order, one ahead and no more, and errors where they belong."""

from __future__ import annotations

import threading

import pytest

from inferplane.models.loader.lookahead import map_ahead


@pytest.mark.parametrize("num", [0, 1, 2, 7])
def test_results_come_in_order(num: int) -> None:
    assert list(map_ahead(lambda item: item * 10, range(num))) == [item * 10 for item in range(num)]


def test_one_item_is_worked_on_ahead_and_no_more() -> None:
    started: list[int] = []
    second = threading.Event()

    def work(item: int) -> int:
        started.append(item)
        if item == 1:
            second.set()
        return item

    results = map_ahead(work, range(5))
    assert next(results) == 0
    assert second.wait(10)
    assert started == [0, 1]
    results.close()
    assert not any(thread.name.startswith("lookahead") for thread in threading.enumerate())


def test_an_error_comes_where_its_result_would_have_come() -> None:
    def work(item: int) -> int:
        if item == 2:
            raise ValueError("two")
        return item

    results = map_ahead(work, range(5))
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ValueError, match="two"):
        next(results)
