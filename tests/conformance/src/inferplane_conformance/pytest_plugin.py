"""The kit inside pytest: its fixtures, what may weaken a test, and the report at the end.

``inferplane conform`` makes it; a vendor's own test run can do the same with ``pytest.main``.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from inferplane_conformance.expected_failures import Xfail, read_xfails, stale_xfails
from inferplane_conformance.level import level_of
from inferplane_conformance.report import TEARDOWN, Report, Result, describe_subject, read_report
from inferplane_conformance.subject import Subject


@dataclass(frozen=True, kw_only=True)
class KitOptions:
    device: str
    levels: tuple[int, ...]
    report: Path | None = None
    is_added: bool = False
    """Whether the report keeps what it has of other levels."""
    soak_s: float = 10.0
    is_quick: bool = False
    """Whether one case stands for those that differ in seed, in block size, or in two things at once."""
    limit_s: float | None = None
    """Of the run: after it no further test begins."""
    num_workers: int = 1
    """Processes for the tests that are marked with ``beside_others``; more than 1: none of them runs in this one."""
    share: tuple[int, int] | None = None
    """Of a worker, its number and how many there are: it runs such tests alone, and that part of them."""


class KitPlugin:
    """One run over one device. Raises `ReportError` for an earlier report that it cannot add to."""

    def __init__(self, options: KitOptions) -> None:
        self.options = options
        self._subject = Subject(options.device)
        self.xfails: list[Xfail] = read_xfails(self._subject.package)
        self.results: list[Result] = []
        self._llama_folder: Path | None = None
        self._earlier = self._earlier_report()
        self._num_selected: Counter[int] = Counter()
        self._started = time.time()
        self._report: Report | None = None
        self._session: pytest.Session | None = None
        self._have_shares_passed = True

    @property
    def has_passed(self) -> bool:
        """Once the run is over."""
        return self._report is not None and self._report.has_passed

    def take_over(self, shares: Sequence[dict[str, Any]]) -> None:
        """What workers found, from their reports."""
        for share in shares:
            self.results += [Result(**each) for each in share["results"]]
            self._have_shares_passed &= share["passed"]
            for level, counts in share["levels"].items():
                self._num_selected[int(level)] += sum(counts.values())

    def _earlier_report(self) -> dict[str, Any] | None:
        file = self.options.report
        if not self.options.is_added or file is None or not file.exists():
            return None
        return read_report(file, describe_subject(self._subject))

    # -- fixtures

    @pytest.fixture
    def subject(self) -> Subject:
        return self._subject

    @pytest.fixture
    def kit_options(self) -> KitOptions:
        return self.options

    @pytest.fixture
    def llama_folder(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A random model, small enough for every device; one for the run."""
        if self._llama_folder is None:
            from inferplane_conformance.tiny_llama import write_tiny_llama

            self._llama_folder = write_tiny_llama(tmp_path_factory.mktemp("model"))
        return self._llama_folder

    @pytest.fixture(params=["float32", "bfloat16", "float16"])
    def dtype(self, request: pytest.FixtureRequest, subject: Subject) -> Any:
        """Each type that the platform takes; one that its `validate_config` refuses is skipped with its words."""
        import torch

        dtype = getattr(torch, request.param)
        if fault := subject.dtype_fault(dtype):
            pytest.skip(f"the platform refuses {request.param}: {fault}")
        return dtype

    # -- what may weaken a test

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        kept = [item for item in items if not (self.options.is_quick and item.get_closest_marker("thorough"))]
        if self.options.share is not None:
            index, count = self.options.share
            kept = [item for item in kept if item.get_closest_marker("beside_others")][index::count]
        elif self.options.num_workers > 1:
            kept = [item for item in kept if not item.get_closest_marker("beside_others")]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept
        for item in items:
            if self._subject.absence and item.get_closest_marker("without_device") is None:
                item.add_marker(pytest.mark.skip(reason=f"there is no device: {self._subject.absence}"))
            for marker in item.iter_markers("needs"):
                if not self._subject.has(marker.args[0]):
                    item.add_marker(pytest.mark.skip(reason=f"the device declares no {marker.args[0]}"))
            for xfail in self.xfails:
                if xfail.matches(_id(item.nodeid)):
                    item.add_marker(pytest.mark.xfail(reason=xfail.reason, strict=True))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._num_selected += Counter(level_of(item.path.name) for item in session.items)

    def pytest_runtest_logfinish(self) -> None:
        limit_s = self.options.limit_s
        if limit_s is not None and time.time() - self._started > limit_s and self._session is not None:
            self._session.shouldstop = f"the limit of {limit_s:g} s is over"

    # -- results

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        report: pytest.TestReport = yield
        if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
            self.results.append(Result.of(report, level_of(item.path.name), _id(item.nodeid)))
        elif report.when == "teardown" and report.failed:
            self.results.append(Result.of(report, level_of(item.path.name), _id(item.nodeid) + TEARDOWN))
        return report

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._report = Report(
            subject=describe_subject(self._subject),
            has_passed=exitstatus in self._good_statuses() and self._have_shares_passed,
            levels=list(self.options.levels),
            is_quick=self.options.is_quick,
            num_selected=self._num_selected,
            xfails=self.xfails,
            results=self.results,
            seconds=time.time() - self._started,
        )
        if self.options.report is not None:
            self._report.write(self.options.report, self._earlier)

    def _good_statuses(self) -> set[int]:
        """Part of a run may have no test."""
        is_part = self.options.share is not None or self.options.num_workers > 1
        return {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED} if is_part else {pytest.ExitCode.OK}

    def pytest_unconfigure(self, config: pytest.Config) -> None:
        """The last that is printed, after pytest's own lists."""
        terminal: Any = config.pluginmanager.get_plugin("terminalreporter")
        if terminal is None or self._report is None or self.options.share is not None:
            return
        for line in self._report.summary():
            terminal.write_line(line)
        for stale in stale_xfails(self.xfails, [result.test for result in self.results], self.options.levels):
            terminal.write_line(f"xfail for {stale.test!r} matches no test of these levels", yellow=True)


def _id(node_id: str) -> str:
    """``level_2_ops.py::test_op[rms_norm-float32]`` wherever the kit is installed."""
    return node_id.rpartition("/")[2]
