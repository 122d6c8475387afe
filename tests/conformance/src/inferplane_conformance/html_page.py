"""One page of HTML from the JSON of a report. It needs nothing but itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from inferplane_conformance.level import LEVELS

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; margin: 0.5rem 0 1.5rem; }
th, td { text-align: left; vertical-align: top; padding: 0.2rem 0.6rem; border-bottom: 1px solid #ddd; }
.passed { color: #176b2c; } .failed { color: #b00020; font-weight: 600; }
.skipped, .xfailed { color: #7a5b00; }
pre { white-space: pre-wrap; margin: 0; font-size: 12px; }
summary { cursor: pointer; font-weight: 600; }
"""


def render_page(report: Mapping[str, Any]) -> str:
    subject = report["subject"]
    verdict = "passed" if report["passed"] else "failed"
    title = f"{_text(subject['distribution'])} on {_text(subject['device'])}"
    parts = [
        f"<h1>{title}: <span class={verdict}>{verdict}</span></h1>",
        _table(["", ""], [[name.replace("_", " "), _shown(value)] for name, value in subject.items()]),
        "<h2>Levels</h2>",
        _table(["level", "passed", "failed", "skipped", "xfailed", "not run"], _level_rows(report["levels"])),
    ]
    for number in report["levels"]:
        parts.append(_level_section(int(number), report["results"]))
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style>\n" + "\n".join(parts) + "\n</html>\n"
    )


def _level_rows(levels: Mapping[str, Mapping[str, int]]) -> list[list[str]]:
    return [
        [f"{number} {LEVELS[int(number)]}", *(str(count) for count in counts.values())]
        for number, counts in levels.items()
    ]


def _level_section(number: int, results: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for result in results:
        if result["level"] == number:
            outcome = result["outcome"]
            reason = f"<pre>{_text(result['reason'])}</pre>" if result["reason"] else ""
            cells = [
                _text(result["test"]),
                f"<span class={outcome}>{outcome}</span>",
                reason,
                result["seconds"],
            ]
            rows.append("".join(f"<td>{cell}</td>" for cell in cells))
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    head = "".join(f"<th>{name}</th>" for name in ("test", "outcome", "reason", "seconds"))
    return (
        f"<details><summary>Level {number}: {LEVELS[number]} ({len(rows)} tests)</summary>"
        f"<table><tr>{head}</tr>{body}</table></details>"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{_text(name)}</th>" for name in head) if any(head) else ""
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1f}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _text(value: object) -> str:
    return escape(str(value))
