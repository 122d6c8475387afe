"""The report of a run: JSON for machines, a page of HTML made from it for people."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from inferplane.api import API_VERSION
from inferplane_conformance.html_page import render_page
from inferplane_conformance.level import LEVELS
from inferplane_conformance.source.shared_lines import count_lines, shared_lines

if TYPE_CHECKING:
    import pytest

    from inferplane_conformance.expected_failures import Xfail
    from inferplane_conformance.subject import Subject

OUTCOMES = ("passed", "failed", "skipped", "xfailed")
TEARDOWN = " (teardown)"
"""Behind the name of a test in the result of what failed after it."""
FORM = 1
"""Of the JSON: another number when a field changes its meaning."""


class ReportError(ValueError):
    """A report that cannot be added to."""


@dataclass(frozen=True)
class Result:
    """Of one test."""

    level: int
    test: str
    outcome: str
    """One of `OUTCOMES`."""
    reason: str
    """Why it was skipped, is expected to fail, or failed (its last lines)."""
    seconds: float

    @classmethod
    def of(cls, report: pytest.TestReport, level: int, test: str) -> Self:
        if hasattr(report, "wasxfail") and report.skipped:
            return cls(level, test, "xfailed", report.wasxfail, report.duration)
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            return cls(level, test, "skipped", reason.removeprefix("Skipped: "), report.duration)
        reason = "" if report.passed else report.longreprtext[-2000:]
        return cls(level, test, report.outcome, reason, report.duration)


@dataclass(frozen=True)
class Report:
    subject: dict[str, Any]
    has_passed: bool
    levels: list[int]
    is_quick: bool
    num_selected: Counter[int]
    """Tests by level that were to run."""
    xfails: list[Xfail]
    results: list[Result]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        return {
            "form": FORM,
            "passed": self.has_passed,
            "quick": self.is_quick,
            "subject": self.subject,
            "levels": {str(level): self._counts(level) for level in self.levels},
            "xfails": [asdict(xfail) for xfail in self.xfails],
            "seconds": round(self.seconds, 1),
            "results": [{**asdict(each), "seconds": round(each.seconds, 3)} for each in self.results],
        }

    def write(self, file: Path, earlier: dict[str, Any] | None = None) -> None:
        """``file`` and beside it the page, with the suffix ``.html``; with the levels that only ``earlier`` has."""
        content = self.as_json() if earlier is None else added(earlier, self.as_json())
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        file.with_suffix(".html").write_text(render_page(content), encoding="utf-8")

    def summary(self) -> list[str]:
        """A few lines for a terminal: each failure, each level, the source, the verdict."""
        facts = self.subject
        lines = [f"{each.outcome} {each.test}" for each in self.results if each.outcome == "failed"]
        lines += [f"level {level} {LEVELS[level]}: {_spelled(self._counts(level))}" for level in self.levels]
        if facts["num_lines"]:
            lines.append(
                f"source: {facts['num_lines']} lines, of which a first token needs {facts['num_first_token_lines']}; "
                f"{facts['shared_percent']:.1f} % shared with the core"
            )
        verdict = "passed" if self.has_passed else "FAILED"
        quick = " (quick)" if self.is_quick else ""
        lines.append(
            f"conformance of {facts['device']} ({facts['distribution']}): {verdict}{quick} in {self.seconds:.0f} s"
        )
        return lines

    def _counts(self, level: int) -> dict[str, int]:
        of_level = [result for result in self.results if result.level == level]
        found = Counter(result.outcome for result in of_level)
        counts = {outcome: found[outcome] for outcome in OUTCOMES}
        num_run = len({each.test.removesuffix(TEARDOWN) for each in of_level})
        return {**counts, "not_run": self.num_selected[level] - num_run}


def read_report(file: Path, subject: dict[str, Any]) -> dict[str, Any]:
    """An earlier report of the same subject. Raises `ReportError` when it is of another."""
    report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    names = report["subject"].keys() | subject.keys()
    if other := sorted(name for name in names if report["subject"].get(name) != subject.get(name)):
        raise ReportError(f"{file} cannot be added to, it is of another {', '.join(other)}: write a new one")
    return report


def added(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """``new`` with the levels that only ``old`` has."""
    kept = {number: counts for number, counts in old["levels"].items() if number not in new["levels"]}
    results = [each for each in old["results"] if str(each["level"]) in kept] + new["results"]
    return {
        **new,
        "passed": new["passed"] and not any(each["failed"] or each.get("not_run") for each in kept.values()),
        "quick": old["quick"] or new["quick"],
        "levels": dict(sorted({**kept, **new["levels"]}.items())),
        "seconds": round(old["seconds"] + new["seconds"], 1),
        "results": sorted(results, key=lambda each: each["level"]),
    }


def _spelled(counts: Mapping[str, int]) -> str:
    words = (f"{count} {outcome.replace('_', ' ')}" for outcome, count in counts.items() if count)
    return ", ".join(words) or "nothing to run"


def describe_subject(subject: Subject) -> dict[str, Any]:
    """What was tested, by what, on what."""
    record, device = subject.record, subject.device
    files = subject.source_files
    return {
        "platform": device.platform,
        "device": f"{device.platform}:{device.index} ({device.name})",
        "num_devices": subject.num_devices,
        "absence": subject.absence,
        "capabilities": list(device.capabilities),
        "distribution": f"{record.distribution} {record.version}",
        "plugin_api": record.api,
        "num_lines": count_lines(files),
        "num_first_token_lines": count_lines(subject.first_token_files),
        "shared_percent": 100.0 * shared_lines(files).share,
        "core": version("inferplane"),
        "core_api": ".".join(map(str, API_VERSION)),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "python": platform.python_version(),
    }
