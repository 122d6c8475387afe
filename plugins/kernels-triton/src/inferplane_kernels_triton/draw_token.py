"""A token of each row of logits, drawn by temperature, top_k, top_p and min_p without sorting: one program a row.

A draw is a race, as in the op of this name: every token's time is exponentially distributed at the rate of its weight,
and the first one wins; blocks of tokens race first. The numbers are the op's, so that the same keys give the same
tokens but where rounding decides.

top_k and top_p each come down to the smallest logit that is kept. Its bits are found from the left, two in each pass
over the row, which comes from the second-level cache: of the four ways to go on, the largest number such that the
tokens from there upwards are as many, or weigh as much, as is asked for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inferplane_kernels_triton.launch import begin, options, require_unit_stride

RACING_BLOCK = tl.constexpr(256)
FIRST_BLOCK_INDEX = tl.constexpr(1 << 31)
"""Of the random numbers of blocks; those of tokens begin with 0."""
MAX_TILE = 8192
STAGES = tl.constexpr(3)
"""Tiles of a row on their way at once: a program is alone with its row, and waits for the cache otherwise."""
SIGNIFICANT_BITS = {torch.bfloat16: 16, torch.float16: 20, torch.float32: 32}
"""Of a logit as float32, from the left: the others follow from these. An even number."""

LOG2_E = tl.constexpr(1.4426950408889634)
LARGEST_UNIFORM = tl.constexpr(1.0 - 2.0**-24)
LEAST_WANTED = tl.constexpr(1e-30)
"""Of weight: the largest logit has 1, but a top_p that is 0 in float32 asks for none."""


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0xD35A2D97
    return x ^ (x >> 15)


@triton.jit
def _exponentials(low, high, index):
    """Of mean 1, above 0 and finite. ``low``, ``high``, ``index``: uint32."""
    bits = _mix(_mix(index ^ low) ^ high)
    u = tl.minimum((bits.to(tl.float32) + 0.5) * (2.0**-32), LARGEST_UNIFORM)
    # -log(1 - u), whose series is exact where the difference would lose the small numbers, which win races
    series = 1.0 / 9 * u + 1.0 / 8
    series = series * u + 1.0 / 7
    series = series * u + 1.0 / 6
    series = series * u + 1.0 / 5
    series = series * u + 1.0 / 4
    series = series * u + 1.0 / 3
    series = series * u + 1.0 / 2
    series = (series * u + 1.0) * u
    return tl.where(u < 0.0625, series, -tl.log(1.0 - u))


@triton.jit
def _load(row_ptr, start, vocab_size, TILE: tl.constexpr):
    columns = start + tl.arange(0, TILE)
    logits = tl.load(row_ptr + columns, mask=columns < vocab_size, other=float("-inf")).to(tl.float32)
    return logits + 0.0  # of the two zeros the positive one


@triton.jit
def _ordered(logits):
    """uint32 that are ordered as the logits are."""
    bits = logits.to(tl.int32, bitcast=True)
    flipped = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return flipped.to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _last_kept(
    row_ptr, vocab_size, largest, rate, floor, wanted,
    WEIGHTED: tl.constexpr, PASSES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """[1] uint32, at least ``floor``: of the numbers from which upwards the tokens are ``wanted`` many, or weigh as
    much, the largest. Only tokens from ``floor`` on count."""
    found = tl.zeros((1,), dtype=tl.uint32)
    step = tl.full((1,), 1 << 30, dtype=tl.uint32)
    for _ in range(PASSES):
        from_1 = tl.zeros((TILE,), dtype=tl.float32)
        from_2 = tl.zeros((TILE,), dtype=tl.float32)
        from_3 = tl.zeros((TILE,), dtype=tl.float32)
        for start in tl.range(0, vocab_size, TILE, num_stages=STAGES):
            logits = _load(row_ptr, start, vocab_size, TILE)
            order = _ordered(logits)
            if WEIGHTED:
                share = tl.exp2((logits - largest) * rate)
            else:
                share = tl.where(start + tl.arange(0, TILE) < vocab_size, 1.0, 0.0)
            share = tl.where(order >= floor, share, 0.0)
            from_1 += tl.where(order >= (found | step), share, 0.0)
            from_2 += tl.where(order >= (found | (step << 1)), share, 0.0)
            from_3 += tl.where(order >= (found | step | (step << 1)), share, 0.0)
        total_1, total_2, total_3 = tl.sum(from_1, axis=0), tl.sum(from_2, axis=0), tl.sum(from_3, axis=0)
        digit = (total_1 >= wanted).to(tl.uint32) + (total_2 >= wanted).to(tl.uint32)
        digit += (total_3 >= wanted).to(tl.uint32)
        found = found | (step * digit)
        step = step >> 2
    return tl.maximum(found, floor)


@triton.jit
def _weights(logits, largest, rate, floor, min_p):
    """Of what is kept; 0 for the others. The largest logit's is 1."""
    weights = tl.exp2((logits - largest) * rate)
    return tl.where((_ordered(logits) >= floor) & (weights >= min_p), weights, 0.0)


@triton.jit
def _times(weights, low, high, index):
    """Infinite for a weight of 0."""
    exists = weights > 0.0
    return tl.where(exists, _exponentials(low, high, index) / tl.where(exists, weights, 1.0), float("inf"))


@triton.jit(do_not_specialize=["num_rows"])
def _draw_token(
    logits_ptr, floats_ptr, ints_ptr, out_ptr, logits_row, floats_row, ints_row, vocab_size, num_rows,
    HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr, PASSES: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * logits_row
    rate = LOG2_E / tl.load(floats_ptr + row)
    min_p = tl.load(floats_ptr + 2 * floats_row + row)
    low = tl.load(ints_ptr + ints_row + row).to(tl.uint32, bitcast=True)
    high = tl.load(ints_ptr + 2 * ints_row + row).to(tl.uint32, bitcast=True)
    tops = tl.full((TILE,), float("-inf"), dtype=tl.float32)
    for start in tl.range(0, vocab_size, TILE, num_stages=STAGES):
        logits = _load(row_ptr, start, vocab_size, TILE)
        tops = tl.maximum(tops, tl.where(logits == logits, logits, float("inf")))
    largest = tl.max(tops, axis=0)
    is_wrong = (largest == float("inf")) | (largest == float("-inf"))
    largest = tl.where(is_wrong, 0.0, largest)
    floor = tl.zeros((1,), dtype=tl.uint32)
    if HAS_TOP_K:
        top_k = tl.load(ints_ptr + row).to(tl.float32)
        floor = _last_kept(row_ptr, vocab_size, largest, rate, floor, top_k, False, PASSES, TILE)
    if HAS_TOP_P:
        top_p = tl.load(floats_ptr + floats_row + row)
        total = tl.zeros((TILE,), dtype=tl.float32)
        for start in tl.range(0, vocab_size, TILE, num_stages=STAGES):
            total += _weights(_load(row_ptr, start, vocab_size, TILE), largest, rate, floor, 0.0)
        # more than there is where all are kept
        wanted = tl.where(top_p < 1.0, tl.maximum(top_p * tl.sum(total, axis=0), LEAST_WANTED), float("inf"))
        floor = _last_kept(row_ptr, vocab_size, largest, rate, floor, wanted, True, PASSES, TILE)
    first_time = float("inf")
    first_block = 0
    blocks = tl.arange(0, TILE // RACING_BLOCK)
    for start in tl.range(0, vocab_size, TILE, num_stages=STAGES):
        weights = _weights(_load(row_ptr, start, vocab_size, TILE), largest, rate, floor, min_p)
        sums = tl.sum(tl.reshape(weights, (TILE // RACING_BLOCK, RACING_BLOCK)), axis=1)
        index = start // RACING_BLOCK + blocks
        times = _times(sums, low, high, index.to(tl.uint32) + FIRST_BLOCK_INDEX)
        time, place = tl.min(times, axis=0, return_indices=True)
        first_block = tl.where(time < first_time, start // RACING_BLOCK + place, first_block)
        first_time = tl.minimum(time, first_time)
    start = first_block * RACING_BLOCK
    weights = _weights(_load(row_ptr, start, vocab_size, RACING_BLOCK), largest, rate, floor, min_p)
    times = _times(weights, low, high, (start + tl.arange(0, RACING_BLOCK)).to(tl.uint32))
    time, place = tl.min(times, axis=0, return_indices=True)
    is_wrong = is_wrong | (time == float("inf"))
    tl.store(out_ptr + row, tl.where(is_wrong, 0, start + place).to(tl.int64))
    tl.store(out_ptr + num_rows + row, is_wrong.to(tl.int64))


def draw_token(
    logits: torch.Tensor,
    floats: torch.Tensor,
    ints: torch.Tensor,
    *,
    has_top_k: bool = True,
    has_top_p: bool = True,
    pdl: bool = False,
) -> torch.Tensor:
    """``logits: [num_rows, vocab_size]`` in a dtype of `SIGNIFICANT_BITS`, by ``floats: [3, num_rows]`` float32
    (temperature above 0, top_p, min_p) and ``ints: [3, num_rows]`` int32 (top_k, and a key as two halves of 32 bits).
    ``has_top_k`` and ``has_top_p``: whether theirs are looked at, for any row.

    Returns ``[2, num_rows]`` int64: the tokens, and below each 0; or 0 and below it 1 for a row that leaves nothing to
    choose: all are negative infinity, or some are not numbers. Nothing is read back to the host.
    """
    require_unit_stride(logits=logits, floats=floats, ints=ints)
    if logits.dtype not in SIGNIFICANT_BITS:
        raise ValueError(f"logits: {logits.dtype}, needs one of {', '.join(map(str, SIGNIFICANT_BITS))}")
    num_rows, vocab_size = logits.shape
    out = torch.empty((2, num_rows), dtype=torch.int64, device=logits.device)
    if num_rows:
        tile = max(RACING_BLOCK.value, min(MAX_TILE, triton.next_power_of_2(vocab_size)))
        _draw_token[(num_rows,)](
            logits, floats, ints, out, logits.stride(0), floats.stride(0), ints.stride(0), vocab_size, num_rows,
            HAS_TOP_K=has_top_k, HAS_TOP_P=has_top_p, PASSES=SIGNIFICANT_BITS[logits.dtype] // 2, TILE=tile, PDL=pdl,
            **options(pdl, num_warps=max(1, min(16, tile // 512))),
        )  # fmt: skip
    return out
