"""A copy is measured as one, and what the contract dictates is not."""

from __future__ import annotations

from pathlib import Path

import inferplane
from inferplane_conformance.source.shared_lines import count_lines, shared_lines

CORE = Path(inferplane.__file__).parent

OWN = '''
"""A module."""
from inferplane.api.attention import AttentionBackend, AttentionInputs, AttentionLayer, AttentionQuery

class Mine(AttentionBackend):
    @classmethod
    def unsupported_reason(cls, query: AttentionQuery) -> str | None:
        return "this line is written nowhere else in the world"
'''


def test_a_copied_file_is_a_copy(tmp_path: Path):
    copy = tmp_path / "copy.py"
    copy.write_text((CORE / "runner" / "batch.py").read_text())
    assert shared_lines([copy]).share > 0.95


def test_what_the_contract_dictates_does_not_count(tmp_path: Path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    found = shared_lines([file])
    assert found.shared == ()
    assert found.num_compared == 2  # the class and what it returns
    assert count_lines([file, file]) == 16
