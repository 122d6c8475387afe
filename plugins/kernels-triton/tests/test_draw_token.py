"""Drawn tokens against a search in float64 on the host, and how often each is drawn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from inferplane_kernels_triton.draw_token import draw_token
from kernel_checks import gpu

BLOCK = 256
FIRST_BLOCK_INDEX = 1 << 31
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def mixed(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x21F0AAAD)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0xD35A2D97)
    return x ^ (x >> np.uint32(15))


def exponentials(key: np.ndarray, index: np.ndarray) -> np.ndarray:
    low, high = key.view(np.uint32)
    bits = mixed(mixed(index.astype(np.uint32) ^ low) ^ high)
    return -np.log1p(-np.minimum((bits + 0.5) * 2.0**-32, 1 - 2.0**-24))


def kept(weights: np.ndarray, top_k: int | None, top_p: float, min_p: float) -> np.ndarray:
    """The weights with 0 for what may not be drawn, by sorting."""
    largest = weights.max()
    if top_k is not None:
        weights = np.where(weights >= np.sort(weights)[-top_k], weights, 0.0)
    if top_p < 1:
        descending = np.sort(weights)[::-1]
        end = np.searchsorted(descending.cumsum(), top_p * weights.sum())
        weights = np.where(weights >= descending[min(end, len(descending) - 1)], weights, 0.0)
    return np.where(weights >= largest * min_p, weights, 0.0)


def want(row: np.ndarray, floats: np.ndarray, ints: np.ndarray, *, has_top_k: bool, has_top_p: bool) -> int:
    temperature, top_p, min_p = floats.astype(np.float64)
    weights = np.exp((row - row.max()) / temperature)
    weights = kept(weights, int(ints[0]) if has_top_k else None, top_p if has_top_p else 1.0, min_p)
    blocks = np.pad(weights, (0, -len(row) % BLOCK)).reshape(-1, BLOCK)
    with np.errstate(divide="ignore"):
        index = np.arange(len(blocks)) + FIRST_BLOCK_INDEX
        block = int((exponentials(ints[1:], index) / blocks.sum(1)).argmin())
        index = block * BLOCK + np.arange(BLOCK)
        return int(index[(exponentials(ints[1:], index) / blocks[block]).argmin()])


def settings_of(num_rows: int, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """With and without each filter, in turn."""
    floats = torch.stack([0.3 + 1.5 * torch.rand(num_rows), torch.rand(num_rows), 0.2 * torch.rand(num_rows)])
    floats[1, ::3] = 1.0
    floats[2, ::2] = 0.0
    top_k = torch.randint(1, min(vocab_size, 60) + 1, (1, num_rows))
    top_k[0, ::4] = vocab_size
    return floats, torch.cat((top_k, torch.randint(-(2**31), 2**31, (2, num_rows)))).int()


def num_different(logits: torch.Tensor, device: torch.device, **filters: bool) -> int:
    floats, ints = settings_of(*logits.shape)
    tokens, wrong = draw_token(logits.to(device), floats.to(device), ints.to(device), **filters).cpu()
    assert not wrong.any()
    rows = zip(
        logits.double().numpy(), floats.T.numpy(), np.ascontiguousarray(ints.T.numpy()), tokens.tolist()
    )
    return sum(want(row, each, numbers, **filters) != token for row, each, numbers, token in rows)


@pytest.mark.parametrize(
    ("dtype", "has_top_k", "has_top_p"),
    [(each, True, True) for each in DTYPES]
    + [(torch.bfloat16, *each) for each in ((False, False), (True, False), (False, True))],
    ids=str,
)
def test_it_is_what_sorting_gives(
    dtype: torch.dtype, has_top_k: bool, has_top_p: bool, device: torch.device
) -> None:
    torch.manual_seed(0)
    for num_rows, vocab_size in ((4, 9), (3, 700)):
        logits = (2 * torch.randn(num_rows, vocab_size)).to(dtype)
        assert num_different(logits, device, has_top_k=has_top_k, has_top_p=has_top_p) == 0


def test_several_tiles(device: torch.device) -> None:
    torch.manual_seed(1)
    logits = 2 * torch.randn(1, 8192 + 300)
    assert num_different(logits.bfloat16(), device, has_top_k=True, has_top_p=False) == 0


def test_equal_logits_are_kept_together(device: torch.device) -> None:
    """Zeros of both signs are equal; of some rows each of the three tokens is drawn, and no other."""
    num_rows = 8
    torch.manual_seed(4)
    logits = torch.full((num_rows, 300), -1.0)
    logits[:, [7, 290]] = 0.0
    logits[:, 100] = -0.0
    floats, ints = settings_of(num_rows, 300)
    floats[0], floats[1], floats[2], ints[0] = 1.0, 1e-6, 0.0, 1
    tokens, wrong = draw_token(logits.to(device), floats.to(device), ints.to(device)).tolist()
    assert set(tokens) == {7, 100, 290} and not any(wrong)


def test_a_share_of_nearly_nothing_keeps_the_likeliest(device: torch.device) -> None:
    """1e-46 is 0 in float32, and 1e-40 where denormal numbers are."""
    torch.manual_seed(5)
    logits = torch.randn(4, 300)
    floats, ints = settings_of(4, 300)
    floats[1] = torch.tensor([1e-46, 1e-40, 1e-30, 1e-6])
    tokens, wrong = draw_token(logits.to(device), floats.to(device), ints.to(device)).tolist()
    assert tokens == logits.argmax(1).tolist() and not any(wrong)


def test_rows_that_leave_nothing(device: torch.device) -> None:
    logits = torch.randn(5, 400, device=device)
    logits[0] = -math.inf
    logits[1, 390] = math.nan
    logits[2, 3] = math.inf
    logits[3] = -math.inf
    logits[3, 17] = -1e30
    floats, ints = settings_of(5, 400)
    tokens, wrong = draw_token(logits, floats.to(device), ints.to(device)).tolist()
    assert wrong == [1, 1, 1, 0, 0] and tokens[:4] == [0, 0, 0, 17]


def test_rows_of_a_larger_tensor_and_none_at_all(device: torch.device) -> None:
    torch.manual_seed(2)
    logits = torch.randn(4, 320)[1:, 10:300]
    assert num_different(logits, device, has_top_k=True, has_top_p=True) == 0
    none = (
        torch.zeros(0, 10, device=device),
        torch.zeros(3, 0, device=device),
        torch.zeros(3, 0, device=device),
    )
    assert draw_token(none[0], none[1], none[2].int()).shape == (2, 0)
    with pytest.raises(ValueError, match=r"torch\.float64, needs one of"):
        draw_token(none[0].double(), none[1], none[2].int())


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_at_real_shapes(dtype: torch.dtype, device: torch.device) -> None:
    """Rounding may decide where a set ends, or a race."""
    torch.manual_seed(3)
    logits = (2 * torch.randn(128, 128256)).to(dtype)
    for has_top_k, has_top_p in ((False, False), (True, False), (False, True), (True, True)):
        assert num_different(logits, device, has_top_k=has_top_k, has_top_p=has_top_p) <= 2


@gpu
def test_tokens_are_drawn_as_often_as_they_are_likely(device: torch.device) -> None:
    """Chi square of 200,000 rows with a few tokens in each of three blocks; 30 is exceeded once in 10,000 times."""
    num_rows, tokens = 200_000, [0, 5, 255, 256, 300, 520, 521, 700]
    logits = torch.full((1, 701), -math.inf, device=device)
    logits[0, tokens] = torch.tensor([0.0, 1.0, -2.0, 0.5, -1.0, 0.0, -3.0, 1.5], device=device)
    floats = torch.tensor([[0.8], [1.0], [0.0]], device=device).repeat(1, num_rows)
    ints = torch.randint(-(2**31), 2**31, (3, num_rows), device=device, dtype=torch.int32)
    drawn = draw_token(logits.repeat(num_rows, 1), floats, ints, has_top_k=False, has_top_p=False)[0]
    expected = num_rows * (logits[0] / 0.8).double().softmax(0)[tokens]
    counts = drawn.bincount(minlength=701)
    assert counts.sum() == counts[tokens].sum()
    assert ((counts[tokens] - expected) ** 2 / expected).sum() < 30
