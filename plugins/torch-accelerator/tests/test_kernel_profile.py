"""The report on kernels that ran, from runs made by hand."""

from __future__ import annotations

from inferplane_torch_accelerator.kernel_profile import KernelRun, busy_us, report

RUNS = [KernelRun("b", 5, 9), KernelRun("a", 0, 4), KernelRun("a", 8, 12), KernelRun("b", 9, 10)]


def test_overlapping_kernels_count_once() -> None:
    assert busy_us(RUNS) == 4 + 7


def test_the_report_ranks_by_time() -> None:
    first, _, *rows = report(RUNS).splitlines()
    assert first == "device busy 0.01 ms of 0.01 ms (91.7%), 4 launches"
    assert [row.split() for row in rows] == [
        ["0.008", "72.7%", "2", "4.00", "a"],
        ["0.005", "45.5%", "2", "2.50", "b"],
    ]


def test_nothing_ran() -> None:
    assert report([]) == "nothing ran on the device"
