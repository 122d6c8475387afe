"""Native paged attention, at each level of instructions, against float64 over the sequences as they were given."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inferplane_kernels_cpu import native
from inferplane_kernels_cpu.native_attention import (
    CODES,
    DTYPES,
    LayerShape,
    PagedAttention,
    Step,
    allocate_kv,
)
from inferplane_kernels_cpu.program import Program

pytestmark = pytest.mark.skipif(
    native.unavailable_reason() is not None, reason=str(native.unavailable_reason())
)

TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3}
TOLERANCE_OF_HALVES = 4e-5
"""Of float32 over float16: numbers in two halves have 17 bits."""
EPS = 1e-6


def poison(kv: torch.Tensor, blocks: torch.Tensor | None = None) -> None:
    """All ones are NaN in every type of floats, that of an int8 row's scale included."""
    kv.view(torch.uint8)[slice(None) if blocks is None else blocks] = 255


def as_stored(x: torch.Tensor, dtype: torch.dtype, scales: torch.Tensor | None = None) -> torch.Tensor:
    """``x: [num_tokens, num_kv_heads, head_dim]`` as float32, rounded as a cache of ``dtype`` rounds."""
    wide = x.float()
    if dtype == torch.int8:
        scale = wide.abs().amax(-1, keepdim=True) / 127
        return (wide / scale.where(scale > 0, 1.0)).round() * scale
    if scales is None:
        return wide.to(dtype).float()
    largest, scales = torch.finfo(dtype).max, scales.unsqueeze(1)
    return (wide / scales).clamp(-largest, largest).to(dtype).float() * scales


@dataclass
class Case:
    """Requests of which ``query_lens`` tokens are new. NaN stands in every slot that nothing was written to, in blocks
    that nobody sees any more, and in the output."""

    seq_lens: list[int]
    query_lens: list[int]
    dtype: torch.dtype = torch.bfloat16
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 32
    window: int = 0
    chunk: int = 0
    soft_cap: float = 0.0
    has_sinks: bool = False
    rotary_dim: int | None = None
    has_norm: bool = False
    is_latent: bool = False
    seed: int = 0
    kv_dtype: torch.dtype | None = None
    """Where keys and values are not stored as they are."""
    block_table: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._random = torch.Generator().manual_seed(self.seed)
        counts = [-(-length // self.block_size) for length in self.seq_lens]
        self.num_blocks = sum(counts) + 3
        order = torch.randperm(self.num_blocks, generator=self._random).int()
        self.block_table = order[-1].repeat(len(counts), max(counts) + 1)
        for row, blocks in zip(self.block_table, order.split([*counts, 3])):
            row[: len(blocks)] = blocks
        self.pasts = [length - new for length, new in zip(self.seq_lens, self.query_lens)]
        self.sinks = torch.randn(self.num_heads, generator=self._random) if self.has_sinks else None
        angles = torch.randn(max(self.seq_lens), (self.rotary_dim or 0) // 2, generator=self._random)
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
        self.norms = torch.randn(2, self.head_dim, generator=self._random).to(self.dtype)
        self.keys = [self._heads(length, self.num_kv_heads) for length in self.seq_lens]
        self.values = [self._heads(length, self.num_kv_heads) for length in self.seq_lens]
        self.queries = [self._heads(length, self.num_heads) for length in self.query_lens]
        self.kv_scales = None
        if self.kv_dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            self.kv_scales = tuple(torch.rand(2, self.num_kv_heads, generator=self._random) + 0.5)
        if self.kv_dtype is not None:
            self.keys, self.values = (
                [self._as_stored(each, half) for each in stored]
                for half, stored in enumerate((self.keys, self.values))
            )
        if self.is_latent:
            self.values = self.keys

    def _heads(self, length: int, num_heads: int) -> torch.Tensor:
        return torch.randn(length, num_heads, self.head_dim, generator=self._random).to(self.dtype)

    def _as_stored(self, heads: torch.Tensor, half: int) -> torch.Tensor:
        if self.kv_dtype is None:
            return heads
        scales = None if self.kv_scales is None else self.kv_scales[half]
        return as_stored(heads, self.kv_dtype, scales).to(self.dtype)

    def first_visible(self, positions: torch.Tensor) -> torch.Tensor:
        if self.window:
            return (positions - self.window + 1).clamp(min=0)
        return positions // self.chunk * self.chunk if self.chunk else positions * 0

    def step(self, starts: list[int], ends: list[int]) -> Step:
        """One in which request i brings its tokens ``starts[i]`` to ``ends[i]``."""
        slots = []
        for row, start, end in zip(self.block_table.long(), starts, ends):
            positions = torch.arange(start, end)
            slots.append(row[positions // self.block_size] * self.block_size + positions % self.block_size)
        query_start = torch.tensor([0, *(end - start for start, end in zip(starts, ends))]).cumsum(0).int()
        return Step(self.block_table, torch.tensor(ends, dtype=torch.int32), query_start, torch.cat(slots))

    def kernel(self, level: str | None) -> PagedAttention:
        shape = (self.num_heads, self.num_kv_heads, self.head_dim, self.block_size, self.window, self.chunk)
        layer = LayerShape(*shape, self.head_dim**-0.5, self.soft_cap, self.is_latent)
        return PagedAttention(layer, self.dtype, self.kv_dtype, kv_scales=self.kv_scales, at=level)

    def store_past(self, kernel: PagedAttention) -> torch.Tensor:
        """A cache in which everything before the step is."""
        shape = (self.num_blocks, self.num_kv_heads, self.block_size, self.head_dim)
        kv = allocate_kv(*shape, self.kv_dtype or self.dtype, is_latent=self.is_latent)
        rows = math.prod(shape[:-1]) * (1 if self.is_latent else 2)
        assert kv.numel() == rows * (self.head_dim + (4 if self.kv_dtype == torch.int8 else 0))
        poison(kv)
        keys = torch.cat([keys[:past] for keys, past in zip(self.keys, self.pasts)])
        values = torch.cat([values[:past] for values, past in zip(self.values, self.pasts)])
        queries = self._heads(len(keys), self.num_heads)
        kernel.attend(queries, keys, values, kv, self.step([0] * len(self.pasts), self.pasts))
        for row, first in zip(self.block_table.long(), self.first_visible(torch.tensor(self.pasts)).tolist()):
            poison(kv, row[: first // self.block_size])
        return kv

    def run(self, level: str | None = None) -> torch.Tensor:
        """``[num_tokens, num_heads, head_dim]``"""
        kernel = self.kernel(level)
        kv = self.store_past(kernel)
        new = [
            torch.cat([heads[past:] for heads, past in zip(stored, self.pasts)])
            for stored in (self.keys, self.values)
        ]
        # q, k and v as slices of one tensor, as they come from a fused projection
        qkv = torch.cat([torch.cat(self.queries), *new], dim=1)
        before = qkv.clone()
        step = self.step(self.pasts, self.seq_lens)
        out = qkv.new_full((len(qkv), self.num_heads, self.head_dim), math.nan)
        if self.rotary_dim is None:
            q, k, v = qkv.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
            kernel.attend(q, k, v, kv, step, sinks=self.sinks, out=out)
            assert torch.equal(qkv.nan_to_num(), before.nan_to_num())
            return out
        positions = torch.cat([torch.arange(past, end) for past, end in zip(self.pasts, self.seq_lens)])
        qk_norm = (*self.norms, EPS) if self.has_norm else None
        kernel.rotate_and_attend(
            qkv.flatten(1), positions, self.cos_sin, kv, step, qk_norm=qk_norm, sinks=self.sinks, out=out
        )
        assert torch.equal(qkv, before)
        return out

    def truth(self) -> torch.Tensor:
        """Of `run`, in float64."""
        parts = []
        for past, length, q, keys, values in zip(
            self.pasts, self.seq_lens, self.queries, self.keys, self.values
        ):
            positions, seen = torch.arange(past, length), torch.arange(length)
            if self.rotary_dim is not None:
                q = self._turn(q, positions, self.norms[0])
                turned = self._turn(keys[past:], positions, self.norms[1])
                keys = torch.cat([keys[:past], self._as_stored(turned, 0)])
            k, v = (
                x.double().repeat_interleave(self.num_heads // self.num_kv_heads, 1) for x in (keys, values)
            )
            scores = torch.einsum("qhd,khd->hqk", q.double(), k) * self.head_dim**-0.5
            if self.soft_cap:
                scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
            positions = positions.unsqueeze(1)
            scores = scores.masked_fill(
                (seen > positions) | (seen < self.first_visible(positions)), -math.inf
            )
            if self.sinks is not None:
                sinks = self.sinks.double().view(-1, 1, 1).expand(-1, length - past, 1)
                scores = torch.cat([scores, sinks], dim=-1)
            parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :length], v))
        return torch.cat(parts)

    def _turn(self, x: torch.Tensor, positions: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Rounded to the dtype, because that is what is stored and multiplied."""
        assert self.rotary_dim is not None
        x = x.double()
        if self.has_norm:
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight.double()
        half = self.rotary_dim // 2
        cos, sin = self.cos_sin[positions].double().unsqueeze(1).split(half, dim=-1)
        first, second, rest = x.split([half, half, self.head_dim - 2 * half], dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1).to(self.dtype)

    def check(self, level: str | None = None) -> None:
        # a rounded key, turned, may be the other of two neighbours
        is_half = self.kv_dtype == torch.float16
        limit = TOLERANCES[torch.float16 if is_half else self.dtype] * (1 if self.rotary_dim is None else 2)
        if is_half and self.dtype == torch.float32 and self.rotary_dim is None:
            limit = TOLERANCE_OF_HALVES
        torch.testing.assert_close(self.run(level).double(), self.truth(), rtol=limit, atol=limit)


@pytest.fixture(params=native.LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    if request.param not in native.levels():
        pytest.skip("not on this machine")
    return str(request.param)


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [
        (9, 3, 64, 32),
        (8, 2, 128, 64),
        (4, 4, 80, 32),
        (3, 1, 96, 32),
        (40, 1, 32, 32),
        (2, 1, 256, 32),
        (5, 1, 24, 7),
    ],
)
def test_shapes(
    level: str, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    """Pieces of keys, tiles of rows, and both in one step."""
    Case(
        [300, 1, 40, 33, 600],
        [1, 1, 40, 20, 70],
        dtype,
        num_heads,
        num_kv_heads,
        head_dim,
        block_size,
        rotary_dim=head_dim,
    ).check(level)


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("limit", [{}, {"window": 40}, {"chunk": 64}], ids=str)
@pytest.mark.parametrize("more", [{}, {"soft_cap": 1.5}, {"has_sinks": True}], ids=str)
def test_what_is_seen_and_how_it_counts(
    level: str, dtype: torch.dtype, limit: dict[str, int], more: dict[str, float]
) -> None:
    Case([600, 50, 400, 1, 130], [1, 50, 300, 1, 1], dtype, **limit, **more).check(level)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize(
    ("num_heads", "head_dim", "block_size"), [(16, 576, 32), (4, 80, 64), (3, 40, 5)], ids=str
)
def test_latents(level: str, num_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> None:
    """Keys that are values, too, and are kept once."""
    lens = [300, 1, 40, 33, 90], [1, 1, 40, 20, 70]
    Case(*lens, dtype, num_heads, 1, head_dim, block_size, is_latent=True).check(level)


@pytest.mark.parametrize("rotary_dim", [None, 64])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"window": 40, "soft_cap": 1.5},
        {"chunk": 64, "has_sinks": True},
        {"head_dim": 80},
        {"block_size": 7},
        {"num_heads": 40, "num_kv_heads": 1},
    ],
    ids=str,
)
def test_float32_over_float16(level: str, more: dict[str, float], rotary_dim: int | None) -> None:
    """Few rows as they are, many in halves with AMX."""
    lens = [600, 50, 400, 1, 130, 90], [1, 50, 300, 1, 3, 9]
    case = Case(*lens, torch.float32, rotary_dim=rotary_dim, kv_dtype=torch.float16, **more)  # type: ignore[arg-type]
    case.check(level)


@pytest.mark.parametrize("code", list(CODES), ids=str)
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize(
    "more",
    [
        {"has_sinks": True},
        {"window": 40, "head_dim": 40, "block_size": 7, "soft_cap": 1.5},
        {"is_latent": True, "num_kv_heads": 1, "head_dim": 80},
    ],
    ids=str,
)
def test_codes_of_one_byte(level: str, dtype: torch.dtype, code: torch.dtype, more: dict[str, float]) -> None:
    """Few rows and many, whole tiles and the ends of sequences."""
    lens = [300, 40, 130, 1, 90], [1, 40, 70, 1, 9]
    Case(*lens, dtype, kv_dtype=code, **more).check(level)  # type: ignore[arg-type]


@pytest.mark.parametrize("code", list(CODES), ids=str)
def test_keys_are_turned_before_they_are_rounded(level: str, code: torch.dtype) -> None:
    lens = [70, 40], [1, 40]
    Case(*lens, torch.float32, kv_dtype=code, rotary_dim=32, has_norm=True, seed=5).check(level)


@pytest.mark.parametrize("code", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_bfloat16_number_is_stored_as_torch_rounds_it(level: str, code: torch.dtype) -> None:
    """Beyond the type's range as its largest number, and NaN as NaN."""
    numbers = torch.arange(1 << 16).to(torch.uint16).view(torch.bfloat16).view(1024, 1, 64)
    scales = torch.tensor([0.75])
    shape = LayerShape(1, 1, 64, 32, 0, 0, 0.125, 0.0, 0)
    kernel = PagedAttention(shape, torch.bfloat16, code, kv_scales=(scales, scales), at=level)
    kv = allocate_kv(32, 1, 32, 64, code)
    lens, starts = torch.tensor([1024], dtype=torch.int32), torch.tensor([0, 1024], dtype=torch.int32)
    step = Step(torch.arange(32, dtype=torch.int32)[None], lens, starts, torch.arange(1024))
    kernel.attend(numbers, numbers, numbers, kv, step)
    largest = torch.finfo(code).max
    want = (numbers.float() / 0.75).clamp(-largest, largest).to(code).flatten()
    for got in kv.view(32, 2, 32 * 64).transpose(0, 1).flatten(1):
        nan = want.float().isnan()
        assert torch.equal(got.float().isnan(), nan)
        assert torch.equal(got.view(torch.uint8)[~nan], want.view(torch.uint8)[~nan])


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_random_steps(data: st.DataObject) -> None:
    lens = data.draw(st.lists(st.one_of(st.integers(1, 90), st.integers(1, 600)), min_size=1, max_size=6))
    num_kv_heads = data.draw(st.sampled_from([1, 2, 3]))
    head_dim = data.draw(st.sampled_from([16, 22, 32, 64, 80, 128]))
    limit = data.draw(
        st.sampled_from(
            [{}, {}, {"window": 1}, {"window": 19}, {"window": 300}, {"chunk": 10}, {"chunk": 200}]
        )
    )
    dtype, kv_dtype = data.draw(st.sampled_from(DTYPES))
    Case(
        lens,
        [data.draw(st.sampled_from([1, length, data.draw(st.integers(1, length))])) for length in lens],
        dtype,
        num_kv_heads * data.draw(st.sampled_from([1, 2, 5])),
        num_kv_heads,
        head_dim,
        data.draw(st.sampled_from([1, 4, 16, 32, 64])),
        soft_cap=data.draw(st.sampled_from([0.0, 1.5])),
        has_sinks=data.draw(st.booleans()),
        rotary_dim=data.draw(st.sampled_from([None, head_dim, head_dim // 4 * 2])),
        has_norm=data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 1000)),
        kv_dtype=None if kv_dtype == dtype else kv_dtype,
        **limit,
    ).check(data.draw(st.sampled_from(native.levels())))


def test_a_request_gets_the_same_bits_in_any_company() -> None:
    """On any number of threads, and whether its prompt comes at once or in parts."""
    alone = Case([700], [1], seed=3)
    company = Case([700, 90, 300], [1, 90, 1], seed=3)
    company.queries[0], company.keys[0], company.values[0] = alone.queries[0], alone.keys[0], alone.values[0]
    before = native.num_threads()
    want = alone.run()
    try:
        for threads in (1, 2, 5):
            native.set_num_threads(threads)
            assert torch.equal(company.run()[:1], want)
    finally:
        native.set_num_threads(before)


def test_a_requests_own_nan_stays_its_own() -> None:
    case = Case([40, 60, 50], [1, 1, 1], torch.float32, 2, 2)
    case.keys[1][3] = math.nan
    got, want = case.run(), case.truth()
    assert torch.isnan(got[1]).all()
    torch.testing.assert_close(got[[0, 2]].double(), want[[0, 2]], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("code", [torch.int8, torch.float8_e5m2], ids=str)
def test_one_number_that_is_none_spoils_its_row_of_codes(
    level: str, code: torch.dtype, number: float
) -> None:
    """Larger ones before it, and smaller ones behind."""
    case = Case([40, 60], [1, 1], torch.float32, 2, 2)
    case.kv_dtype = code
    case.keys[1][-1, :, 3] = 1000.0
    case.keys[1][-1, :, 5] = number
    got = case.run(level)
    assert torch.isfinite(got[0]).all()
    assert torch.isnan(got[1]).all() or (code != torch.int8 and number == math.inf)


def test_a_prompt_whose_scores_rise_far(level: str) -> None:
    """By more than weights that are counted from the highest of the first keys can tell."""
    case = Case([300], [300])
    case.keys[0][100:] *= 80
    case.check(level)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_prompt_with_a_key_that_is_no_number(level: str, number: float) -> None:
    case = Case([150], [150])
    case.keys[0][70] = number
    got, want = case.run(level), case.truth()
    assert torch.isnan(got[70:]).all()
    torch.testing.assert_close(got[:70].double(), want[:70], rtol=1.2e-2, atol=1.2e-2)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_prompt_with_a_query_that_is_no_number(level: str, number: float) -> None:
    case = Case([150], [150])
    case.queries[0][70] = number
    got, want = case.run(level), case.truth()
    assert torch.isnan(got[70]).all()
    kept = torch.arange(150) != 70
    torch.testing.assert_close(got[kept].double(), want[kept], rtol=1.2e-2, atol=1.2e-2)


def test_a_recorded_step_reads_lengths_and_blocks_when_it_runs() -> None:
    first, second = Case([300, 40], [1, 1], seed=1), Case([500, 7], [1, 1], seed=2)
    kernel = first.kernel(None)
    shape = (second.num_blocks, first.num_kv_heads, 2 * first.block_size * first.head_dim)
    kv = torch.full(shape, math.nan, dtype=first.dtype)
    table = torch.zeros(2, second.block_table.shape[1], dtype=torch.int32)
    lens, slots = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    step = Step(table, lens, torch.arange(3, dtype=torch.int32), slots)
    q, k, v = (first._heads(2, heads) for heads in (6, 2, 2))
    out, program = torch.empty_like(q), Program()

    def fill(case: Case) -> None:
        kv[: case.num_blocks] = case.store_past(kernel)
        table[:, : case.block_table.shape[1]] = case.block_table
        lens.copy_(torch.tensor(case.seq_lens))
        for row, past in enumerate(case.pasts):
            slots[row] = case.block_table[row, past // 32].long() * 32 + past % 32
        q.copy_(torch.cat(case.queries))
        k.copy_(torch.cat([keys[-1:] for keys in case.keys]))
        v.copy_(torch.cat([values[-1:] for values in case.values]))

    fill(first)
    with program.recording():
        kernel.attend(q, k, v, kv, step, out=out)
    for case in (second, first):
        fill(case)
        out.fill_(math.nan)
        program.run()
        assert torch.equal(out, case.run())


def test_metadata_of_a_wrong_type_is_refused() -> None:
    lens, slots = torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"block_table should be torch\.int32"):
        Step(torch.zeros(1, 4, dtype=torch.int64), lens, torch.tensor([0, 1], dtype=torch.int32), slots)
