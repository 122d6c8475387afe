"""Which entry of a tuning table a shape gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferplane_kernels_triton.matvec import MatvecConfig
from inferplane_kernels_triton.tuning import TuningTable

TABLE = TuningTable({"matvec": {"4096x4096": {"rows": 2}, "128256x4096": {"rows": 8}, "*": {"rows": 16}}})


@pytest.mark.parametrize(
    ("shape", "rows"),
    [((4096, 4096), 2), ((128256, 4096), 8), ((6144, 4096), 2), ((151936, 2048), 8), ((1, 2, 3), 16)],
)
def test_the_nearest_shape_counts(shape: tuple[int, ...], rows: int):
    assert TABLE.config("matvec", shape, MatvecConfig(unroll=1)) == MatvecConfig(rows=rows, unroll=1)


def test_an_unknown_kernel_keeps_its_default():
    assert TABLE.config("other", (1,), MatvecConfig()) == MatvecConfig()


def test_an_unknown_field_is_an_error():
    with pytest.raises(TypeError, match="speed"):
        TuningTable({"matvec": {"*": {"speed": 1}}}).config("matvec", (1, 1), MatvecConfig())


@pytest.mark.parametrize("text", ["{", "[]", '{"kernels": {"matvec": {"axb": {}}}}', '{"kernels": 3}'])
def test_a_file_that_is_no_table_is_named(text: str, tmp_path: Path):
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"table\.json: not a tuning table"):
        TuningTable.read(path)


def test_only_what_is_listed_was_measured():
    assert TABLE.measured("matvec", (4096, 4096), MatvecConfig()) == MatvecConfig(rows=2)
    assert TABLE.measured("matvec", (6144, 4096), MatvecConfig()) is None
    assert TABLE.measured("other", (4096, 4096), MatvecConfig()) is None
