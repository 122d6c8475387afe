"""Programs: what was recorded runs again, on the contents that its memory has by then."""

from __future__ import annotations

import gc

import pytest
import torch

from inferplane_kernels_cpu import native
from inferplane_kernels_cpu.native import int64, pointer
from inferplane_kernels_cpu.native_linear import NativeLinear
from inferplane_kernels_cpu.program import Program

pytestmark = pytest.mark.skipif(
    native.unavailable_reason() is not None, reason=str(native.unavailable_reason())
)


@pytest.mark.parametrize("level", native.LEVELS)
def test_a_program_runs_its_calls_in_their_order_on_new_contents(level: str) -> None:
    if level not in native.levels():
        pytest.skip("not on this machine")
    take_rows = native.kernel("take_rows", *[pointer] * 3, *[int64] * 2, at=level)
    table, multiply = (
        torch.randn(50, 96).bfloat16(),
        NativeLinear(torch.randn(40, 96).bfloat16(), None, level),
    )
    ids, rows, out = torch.tensor([3, 49, 3]), torch.empty(3, 96).bfloat16(), torch.empty(3, 40).bfloat16()

    def call() -> None:
        take_rows(rows.data_ptr(), table.data_ptr(), ids.data_ptr(), 3, rows.stride(0) * 2)
        multiply.into(out, rows)

    program = Program()
    with program.recording():
        call()
    assert torch.equal(rows, table[ids])
    call()  # not recorded any more
    assert len(program) == 2
    for new_ids in ([0, 1, 2], [48, 7, 7]):
        ids.copy_(torch.tensor(new_ids))
        out.zero_()
        program.run()
        assert torch.equal(rows, table[new_ids])
        again = out.clone()
        call()
        assert torch.equal(again, out)


def test_what_is_not_recordable_says_so_and_recording_ends_with_its_block() -> None:
    program = Program()
    refused = native.kernel("take_rows", *[pointer] * 3, *[int64] * 2)
    checked = native._refused_in_programs("pack", refused)
    x = torch.zeros(4)
    with pytest.raises(RuntimeError, match="pack is no part of a step"), program.recording():
        checked(x.data_ptr(), x.data_ptr(), x.data_ptr(), 0, 4)
    checked(x.data_ptr(), x.data_ptr(), x.data_ptr(), 0, 4)
    assert len(program) == 0
    program.run()


def test_programs_are_freed() -> None:
    copy = native.kernel("copy_bytes", pointer, pointer, int64)
    x = torch.zeros(1)
    for _ in range(20):
        program = Program()
        with program.recording():
            for _ in range(1000):
                copy(x.data_ptr(), x.data_ptr(), 0)
        assert len(program) == 1000
        del program
    gc.collect()


@pytest.mark.parametrize(("num_rows", "row_bytes"), [(0, 8), (1, 2), (3, 1152), (129, 1152), (1000, 30)])
def test_take_rows_and_copy_bytes(num_rows: int, row_bytes: int) -> None:
    table = torch.randint(0, 256, (77, row_bytes), dtype=torch.uint8)
    ids = torch.randint(0, 77, (num_rows,))
    out = torch.zeros(num_rows, row_bytes, dtype=torch.uint8)
    native.kernel("take_rows", *[pointer] * 3, *[int64] * 2)(
        out.data_ptr(), table.data_ptr(), ids.data_ptr(), num_rows, row_bytes
    )
    assert torch.equal(out, table[ids])
    copied = torch.zeros_like(out)
    native.kernel("copy_bytes", pointer, pointer, int64)(copied.data_ptr(), out.data_ptr(), out.nbytes)
    assert torch.equal(copied, out)
