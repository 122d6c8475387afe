"""Lists of visible devices, as runtimes read them."""

from __future__ import annotations

import pytest

from inferplane_torch_accelerator.visible_devices import visible

DEVICES = ["GPU-aa11", "GPU-ab22", "GPU-cc33"]


@pytest.mark.parametrize(
    ("setting", "left"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("2,1", [2, 1]),
        ("1,9,2", [1]),
        ("1,1", [1]),
        ("GPU-cc", [2]),
        ("GPU-a", []),
        ("GPU-ab22, 2", [1, 2]),
    ],
)
def test_what_is_left(setting: str | None, left: list[int]) -> None:
    assert visible(DEVICES, setting, str) == [DEVICES[index] for index in left]


def test_without_names_only_numbers_count() -> None:
    assert visible(DEVICES, "2,GPU-aa11") == ["GPU-cc33"]


def test_devices_that_look_alike_are_several() -> None:
    assert visible(["same", "same", "same"], "2,0") == ["same", "same"]
