"""The table of formats and devices says what the platforms' kernels say."""

from __future__ import annotations

import format_cases


def test_the_table_is_written_down() -> None:
    written = format_cases.FILE.read_text(encoding="utf-8")
    assert written == format_cases.as_json(), (
        f"what serves a format has changed; write it down: {format_cases.COMMAND}"
    )
