"""The most likely token of each row of logits: a program looks through one block of a row, then one through its blocks.

A row that has none (see `best_token`) is told apart by the value that wins, so that nothing but the maximum is looked
for: what is not a number counts as infinite.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inferplane_kernels_triton.launch import begin, options, require_unit_stride

BLOCK = 4096
"""Logits of one program: enough 16-byte loads to fill it, and enough programs to fill the device for a single row."""


@triton.jit
def _best_of_block(
    logits_ptr, best_ptr, places_ptr, logits_row, vocab_size, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * logits_row + columns, mask=columns < vocab_size, other=float("-inf"))
    logits = logits.to(tl.float32)
    logits = tl.where(logits == logits, logits, float("inf"))
    best, place = tl.max(logits, axis=0, return_indices=True)
    where = row * tl.num_programs(0) + block
    tl.store(best_ptr + where, best)
    tl.store(places_ptr + where, block * BLOCK + place)


@triton.jit(do_not_specialize=["num_rows"])
def _best_of_row(
    best_ptr, places_ptr, out_ptr, num_rows, num_blocks, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row = tl.program_id(0)
    blocks = tl.arange(0, BLOCKS)
    inside = blocks < num_blocks
    best = tl.load(best_ptr + row * num_blocks + blocks, mask=inside, other=float("-inf"))
    places = tl.load(places_ptr + row * num_blocks + blocks, mask=inside, other=0)
    largest, block = tl.max(best, axis=0, return_indices=True)
    token = tl.sum(tl.where(blocks == block, places, 0), axis=0)
    is_wrong = (largest == float("inf")) | (largest == float("-inf"))
    tl.store(out_ptr + row, tl.where(is_wrong, 0, token).to(tl.int64))
    tl.store(out_ptr + num_rows + row, is_wrong.to(tl.int64))


def best_token(logits: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """The most likely token of each row, of equal ones the first.

    ``logits: [num_rows, vocab_size]`` of a floating dtype. Returns ``[2, num_rows]`` int64: the tokens, and below each
    0; or 0 and below it 1 for a row that has something that is not a number, or whose largest logit is infinite.
    Nothing is read back to the host.
    """
    require_unit_stride(logits=logits)
    num_rows, vocab_size = logits.shape
    out = torch.empty((2, num_rows), dtype=torch.int64, device=logits.device)
    if not num_rows:
        return out
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    best = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=logits.device)
    places = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=logits.device)
    _best_of_block[(num_blocks, num_rows)](
        logits, best, places, logits.stride(0), vocab_size, BLOCK=BLOCK, PDL=pdl, **options(pdl, num_warps=8)
    )
    _best_of_row[(num_rows,)](
        best, places, out, num_rows, num_blocks,
        BLOCKS=triton.next_power_of_2(num_blocks), PDL=pdl, **options(pdl, num_warps=1),
    )  # fmt: skip
    return out
