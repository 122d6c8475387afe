"""What the shipped table says of the library's products can be told to who cuts them into parts."""

from __future__ import annotations

import json

from inferplane_kernels_cuda import tuning_file
from inferplane_kernels_triton.tuning import TuningTable
from inferplane_torch_accelerator.products import ManyRowsConfig


def test_every_entry_for_many_rows_fits() -> None:
    path = tuning_file((9, 0))
    assert path is not None
    table = TuningTable.read(path)
    for shape in json.loads(path.read_text())["kernels"].get("many_rows", {}):
        assert table.measured("many_rows", tuple(map(int, shape.split("x"))), ManyRowsConfig()) is not None
