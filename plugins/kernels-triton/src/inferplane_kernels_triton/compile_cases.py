"""One call or more of each kernel at the shapes it is made for, on tensors that have a shape and no memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from triton.backends.compiler import GPUTarget

from inferplane_kernels_triton.activation import silu_and_mul
from inferplane_kernels_triton.best_token import best_token
from inferplane_kernels_triton.block_matmul import BlockMatmulConfig, block_matmul
from inferplane_kernels_triton.block_scale import BlockScale
from inferplane_kernels_triton.decode_attention import DecodeConfig, decode_attention
from inferplane_kernels_triton.draw_token import draw_token
from inferplane_kernels_triton.fp8_matvec import Fp8MatvecConfig, fp8_matvec
from inferplane_kernels_triton.int4_dequantize import DequantizeConfig, dequantize_int4
from inferplane_kernels_triton.int4_fixed_matvec import Int4FixedMatvecConfig, int4_fixed_matvec
from inferplane_kernels_triton.int4_matmul import Int4MatmulConfig, int4_matmul
from inferplane_kernels_triton.int4_matrix import Int4Matrix
from inferplane_kernels_triton.int4_matvec import Int4MatvecConfig, int4_matvec
from inferplane_kernels_triton.kv_store import store_kv
from inferplane_kernels_triton.latent_attention import LatentConfig, latent_attention
from inferplane_kernels_triton.matvec import MatvecConfig, NormBefore, matvec
from inferplane_kernels_triton.moe_codes import ExpertCodes
from inferplane_kernels_triton.moe_experts import ExpertsConfig, fused_experts
from inferplane_kernels_triton.moe_routing import topk_softmax
from inferplane_kernels_triton.norm import add_rms_norm, add_rms_norm_in_fp8, rms_norm
from inferplane_kernels_triton.packed_attention import causal_attention, encoder_attention
from inferplane_kernels_triton.prefill_attention import PrefillConfig, prefill_attention
from inferplane_kernels_triton.quantize import quantize_per_token
from inferplane_kernels_triton.rope_and_store import rope_and_store
from inferplane_kernels_triton.rotary import rotary
from inferplane_kernels_triton.skinny_matmul import MatmulConfig, skinny_matmul
from inferplane_kernels_triton.tuning import TuningTable

BF16 = torch.bfloat16


def _meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _index(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return _meta(*shape, dtype=dtype)


def _cache(dtype: torch.dtype = BF16) -> tuple[torch.Tensor, torch.Tensor]:
    kv = _meta(64, 2, 16, 8, 128, dtype=dtype)
    return kv[:, 0], kv[:, 1]


def _scales() -> tuple[torch.Tensor, torch.Tensor]:
    return _meta(8, dtype=torch.float32), _meta(8, dtype=torch.float32)


def _elementwise(tuning: TuningTable) -> None:
    x, weight = _meta(32, 4096), _meta(4096)
    rms_norm(x, weight, 1e-5)
    add_rms_norm(x, _meta(32, 4096), weight, 1e-5)
    add_rms_norm_in_fp8(x, _meta(32, 4096), weight, 1e-5)
    silu_and_mul(_meta(32, 28672))


def _best_token(tuning: TuningTable) -> None:
    best_token(_meta(32, 128256))


def _draw_token(tuning: TuningTable) -> None:
    floats, ints = _meta(3, 32, dtype=torch.float32), _index(3, 32)
    draw_token(_meta(32, 128256), floats, ints)
    draw_token(_meta(32, 128256, dtype=torch.float32), floats, ints, has_top_k=False)


def _rotary(tuning: TuningTable) -> None:
    rotary(_meta(32, 32, 128), _meta(32, 8, 128), _index(32, dtype=torch.int64), _meta(8192, 128))


def _rope_and_store(tuning: TuningTable) -> None:
    slots, table, norm = _index(32, dtype=torch.int64), _meta(8192, 128, dtype=torch.float32), _meta(128)
    rope_and_store(_meta(32, 6144), *_cache(), slots, slots, table, 32)
    rope_and_store(_meta(32, 6144), *_cache(), slots, slots, table, 32, qk_norm=(norm, norm, 1e-6))
    cache = _cache(torch.float8_e4m3fn)
    rope_and_store(_meta(32, 6144), *cache, slots, slots, table, 32, kv_scales=_scales())


def _store_kv(tuning: TuningTable) -> None:
    k, v, slots = _meta(32, 8, 128), _meta(32, 8, 128), _index(32, dtype=torch.int64)
    store_kv(k, v, *_cache(), slots)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        store_kv(k, v, *_cache(dtype), slots, kv_scales=_scales())


def _int8_cache() -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    scales = _meta(64, 2, 16, 8, dtype=torch.float32)
    return _cache(torch.int8), (scales[:, 0], scales[:, 1])


def _int8_attention(tuning: TuningTable) -> None:
    k, slots, table = _meta(32, 8, 128), _index(32, dtype=torch.int64), _index(32, 512)
    cache, scales = _int8_cache()
    store_kv(k, k, *cache, slots, kv_scales=scales)
    config = tuning.config("decode_attention", (32, 256), DecodeConfig())
    for splits in (1, 8):
        decode_attention(
            _meta(32, 32, 128),
            *cache,
            table,
            _index(32),
            0.1,
            num_splits=splits,
            config=config,
            kv_scales=scales,
        )
    prefill = tuning.config("prefill_attention", (4, 4096), PrefillConfig())
    prefill_attention(
        _meta(512, 32, 128), *cache, table, _index(33), _index(32), 0.1, config=prefill, kv_scales=scales
    )


def _decode_attention(tuning: TuningTable) -> None:
    table, lengths = _index(32, 512), _index(32)
    config = tuning.config("decode_attention", (256, 256), DecodeConfig())
    for num_splits in (1, 8):
        q = _meta(32, 32, 128)
        decode_attention(q, *_cache(), table, lengths, 0.1, num_splits=num_splits, config=config)
    decode_attention(_meta(32, 32, 128, dtype=torch.float32), *_cache(torch.float32), table, lengths, 0.1)
    decode_attention(
        _meta(32, 32, 128), *_cache(torch.float8_e4m3fn), table, lengths, 0.1, num_splits=8,
        window=128, soft_cap=30.0, sinks=_meta(32, dtype=torch.float32), config=config, kv_scales=_scales(),
    )  # fmt: skip


def _prefill_attention(tuning: TuningTable) -> None:
    table, lengths, starts = _index(32, 512), _index(32), _index(33)
    config = tuning.config("prefill_attention", (4, 4096), PrefillConfig())
    prefill_attention(_meta(512, 32, 128), *_cache(), table, starts, lengths, 0.1, config=config)
    q = _meta(512, 32, 128, dtype=torch.float32)
    prefill_attention(q, *_cache(torch.float32), table, starts, lengths, 0.1)
    prefill_attention(
        _meta(512, 32, 128), *_cache(torch.float8_e4m3fn), table, starts, lengths, 0.1,
        window=128, soft_cap=30.0, sinks=_meta(32, dtype=torch.float32), config=config, kv_scales=_scales(),
    )  # fmt: skip


def _latent_attention(tuning: TuningTable) -> None:
    """Of DeepSeek V3 on eight ranks, and on one."""
    table, lengths, starts = _index(32, 512), _index(32), _index(33)
    config = tuning.config("latent_attention", (32, 1024), LatentConfig())
    cases = ((BF16, BF16, 16, 8), (BF16, BF16, 128, 1), (BF16, torch.float8_e4m3fn, 16, 8))
    for dtype, cache_dtype, num_heads, num_splits in (*cases, (torch.float32, torch.float32, 16, 1)):
        latent_attention(
            _meta(32, num_heads, 576, dtype=dtype), _meta(64, 64, 576, dtype=cache_dtype), 512, table, starts, lengths,
            0.1, longest_query=1, num_splits=num_splits, config=config if dtype == BF16 else None,
            cache_scale=_meta(1, dtype=torch.float32) if cache_dtype.itemsize == 1 else None,
        )  # fmt: skip


def _packed_attention(tuning: TuningTable) -> None:
    for dtype, window in ((BF16, None), (BF16, 64), (torch.float32, None)):
        q, k = _meta(512, 12, 64, dtype=dtype), _meta(512, 12, 64, dtype=dtype)
        encoder_attention(q, k, k, [128] * 4, _index(5), 0.1, window)
    for dtype in (BF16, torch.float32):  # heads of DeepSeek V3
        q, k, v = (
            _meta(512, 16, 192, dtype=dtype),
            _meta(4096, 16, 192, dtype=dtype),
            _meta(4096, 16, 128, dtype=dtype),
        )
        causal_attention(q, k, v, [128] * 4, _index(5), [1024] * 4, _index(5), 0.1)


def _matvec(tuning: TuningTable) -> None:
    x, norm = _meta(1, 4096), NormBefore(_meta(4096), 1e-5, _meta(1, 4096), _meta(1, 4096))
    weight = _meta(28672, 4096)
    config = tuning.config("matvec", (28672, 4096), MatvecConfig())
    matvec(x, weight, config=config)
    matvec(x, weight, norm=norm, gated=True, config=config)
    scale = _meta(28672, dtype=torch.float32)
    matvec(x, weight.to(torch.float8_e4m3fn), weight_scale=scale, config=config)


def _matvec_pdl(tuning: TuningTable) -> None:
    matvec(_meta(1, 4096), _meta(28672, 4096), pdl=True, gated=True)


def _fp8_matvec(tuning: TuningTable) -> None:
    x, norm = _meta(1, 4096), NormBefore(_meta(4096), 1e-5, _meta(1, 4096), _meta(1, 4096))
    weight, scale = _meta(28672, 4096, dtype=torch.float8_e4m3fn), _meta(28672, dtype=torch.float32)
    config = tuning.config("fp8_matvec", (28672, 4096), Fp8MatvecConfig())
    fp8_matvec(x, weight, scale, config=config)
    fp8_matvec(x, weight, scale, norm=norm, gated=True, config=config, pdl=True)


def _skinny_matmul(tuning: TuningTable) -> None:
    weight, scale = _meta(28672, 4096), _meta(28672, dtype=torch.float32)
    config = tuning.config("skinny_matmul", (8, 28672, 4096), MatmulConfig())
    for num_tokens in (8, 32):
        skinny_matmul(_meta(num_tokens, 4096), weight, config=config)
    skinny_matmul(_meta(8, 4096), weight, gated=True, config=dataclasses.replace(config, splits=4))
    skinny_matmul(_meta(8, 4096), weight.to(torch.float8_e4m3fn), weight_scale=scale, config=config)


def _fp8_by_block(tuning: TuningTable) -> None:
    """What few and many rows make of a weight, and what rounds them."""
    fp8 = torch.float8_e4m3fn
    weight, x, norm = _meta(28672, 4096, dtype=fp8), _meta(8192, 4096), _meta(4096)
    scale = BlockScale(_meta(224, 32, dtype=torch.float32), 128, 128)
    matvec(x[:1], weight, norm=NormBefore(norm, 1e-5, x[:1], x[:1]), weight_scale=scale, gated=True)
    add_rms_norm_in_fp8(x, x, norm, 1e-5, by_group=True)
    codes, x_scale = quantize_per_token(x, by_group=True)
    for num_tokens, gated in ((8, True), (64, False)):
        few, few_scale = quantize_per_token(x[:num_tokens], by_group=True)
        config = MatmulConfig(splits=1 if gated else 2)
        skinny_matmul(
            few, weight, x_scale=few_scale, weight_scale=scale, gated=gated, out_dtype=BF16, config=config
        )
    for num_tokens in (100, 300, 8192):
        block_matmul(codes, x_scale, weight, scale, config=BlockMatmulConfig.default(num_tokens, 4096))
    by_row = BlockScale(_meta(28672, 32, dtype=torch.float32), 1, 128)
    block_matmul(codes, x_scale, weight, by_row)


def _int4_matrix(out_features: int, in_features: int, *, has_zero: bool) -> Int4Matrix:
    groups = (out_features, in_features // 128)
    zero = _index(*groups, dtype=torch.int8) if has_zero else None
    return Int4Matrix(_index(out_features, in_features // 8), _meta(*groups), zero, None, in_features, 128)


def _mxfp4_matrix(out_features: int, in_features: int) -> Int4Matrix:
    exponents = _index(out_features, in_features // 32, dtype=torch.uint8)
    words = _index(out_features, -(-in_features // 128) * 16)
    return Int4Matrix(words, exponents, None, None, in_features, 32, is_e2m1=True)


def _int4(tuning: TuningTable) -> None:
    norm = NormBefore(_meta(4096), 1e-5, _meta(1, 4096), _meta(1, 4096))
    config = tuning.config("int4_matvec", (28672, 4096), Int4MatvecConfig())
    fixed = tuning.config("int4_fixed_matvec", (28672, 4096), Int4FixedMatvecConfig())
    write = tuning.config("int4_dequantize", (28672, 4096), DequantizeConfig())
    for has_zero in (False, True):
        weight = _int4_matrix(28672, 4096, has_zero=has_zero)
        int4_matvec(_meta(1, 4096), weight, config=config)
        int4_matvec(_meta(1, 4096), weight, norm=norm, gated=True, config=config)
        int4_fixed_matvec(_meta(1, 4096), weight, config=fixed)
        int4_fixed_matvec(_meta(1, 4096), weight, norm=norm, gated=True, config=fixed)
        for num_tokens in (8, 32):
            few = Int4MatmulConfig.default(num_tokens, 28672)
            few = tuning.config("int4_matmul", (num_tokens, 28672, 4096), few)
            int4_matmul(_meta(num_tokens, 4096), weight, gated=num_tokens == 8, config=few)
        dequantize_int4(weight, _meta(28672, 4096), config=write)


def _mxfp4(tuning: TuningTable) -> None:
    weight = _mxfp4_matrix(28672, 4096)
    config = tuning.config("int4_matvec", (28672, 4096), Int4MatvecConfig())
    int4_matvec(_meta(1, 4096), weight, gated=True, config=config)
    int4_matmul(_meta(8, 4096), weight, config=Int4MatmulConfig.default(8, 28672))
    dequantize_int4(weight, _meta(28672, 4096))


def _experts(tuning: TuningTable) -> None:
    for num_tokens in (1, 8, 4096):
        weights, ids = topk_softmax(_meta(num_tokens, 128), 8, True)
        config = ExpertsConfig.default(8 * num_tokens, 128, BF16)
        config = tuning.config("fused_experts", (num_tokens, 128, 2048, 768), config)
        x, w13, w2 = _meta(num_tokens, 2048), _meta(128, 1536, 2048), _meta(128, 2048, 768)
        fused_experts(x, weights, ids, w13, w2, config=config if num_tokens > 1 else None)


def _experts_in_eight_bits(tuning: TuningTable) -> None:
    def coded(block: tuple[int, int], dtype: torch.dtype, *shape: int) -> ExpertCodes:
        scale = _meta(shape[0], -(-shape[1] // block[0]), -(-shape[2] // block[1]), dtype=torch.float32)
        return ExpertCodes(_meta(*shape, dtype=dtype), scale, *block)

    by_row, by_block = (torch.int8, (1, 2048)), (torch.float8_e4m3fn, (128, 128))
    for num_tokens, (dtype, block) in ((1, by_row), (1, by_block), (8, by_block), (4096, by_row)):
        weights, ids = topk_softmax(_meta(num_tokens, 128), 8, True)
        config = ExpertsConfig.default(8 * num_tokens, 128, BF16)
        config = tuning.config("fused_experts", (num_tokens, 128, 2048, 768), config)
        w13, w2 = coded(block, dtype, 128, 1536, 2048), coded(block, dtype, 128, 2048, 768)
        fused_experts(
            _meta(num_tokens, 2048), weights, ids, w13, w2, config=config if num_tokens > 1 else None
        )


def _experts_in_four_bits(tuning: TuningTable) -> None:
    for num_tokens in (1, 4096):
        weights, ids = topk_softmax(_meta(num_tokens, 32), 4, True)
        config = ExpertsConfig.for_four_bits(4 * num_tokens, 32)
        w13, w2 = _mxfp4_matrix(32 * 5760, 2880), _mxfp4_matrix(32 * 2880, 2880)
        fused_experts(_meta(num_tokens, 2880), weights, ids, w13, w2, config=config)


def _skinny_matmul_pdl(tuning: TuningTable) -> None:
    weight = _meta(28672, 4096)
    skinny_matmul(_meta(8, 4096), weight, pdl=True)
    fp8, scale = torch.float8_e4m3fn, _meta(28672, dtype=torch.float32)
    skinny_matmul(
        _meta(8, 4096).to(fp8), weight.to(fp8), x_scale=scale, weight_scale=scale, gated=True, pdl=True,
        out_dtype=torch.bfloat16,
    )  # fmt: skip


CASES: dict[str, Callable[[TuningTable], None]] = {
    "elementwise": _elementwise,
    "best_token": _best_token,
    "rotary": _rotary,
    "rope_and_store": _rope_and_store,
    "store_kv": _store_kv,
    "draw_token": _draw_token,
    "decode_attention": _decode_attention,
    "prefill_attention": _prefill_attention,
    "int8_attention": _int8_attention,
    "latent_attention": _latent_attention,
    "packed_attention": _packed_attention,
    "matvec": _matvec,
    "skinny_matmul": _skinny_matmul,
    "int4": _int4,
    "mxfp4": _mxfp4,
    "experts": _experts,
    "experts_in_eight_bits": _experts_in_eight_bits,
    "experts_in_four_bits": _experts_in_four_bits,
}
"""Calls for every device."""

CUDA_CASES: dict[str, Callable[[TuningTable], None]] = {
    "matvec_pdl": _matvec_pdl,
    "fp8_matvec": _fp8_matvec,
    "skinny_matmul_pdl": _skinny_matmul_pdl,
}
"""Calls that only NVIDIA's compiler understands, from capability 9.0."""

FP8_CASES: dict[str, Callable[[TuningTable], None]] = {"fp8_by_block": _fp8_by_block}
"""Products of fp8 by fp8, which are for matrix units that have them: where these have nothing of the kind, as those of
gfx1100, the compiler spells them out and takes minutes."""


def cases_for(target: GPUTarget) -> dict[str, Callable[[TuningTable], None]]:
    """By name; each compiles some kernels when it is called within `compile_only`."""
    more = CUDA_CASES if target.backend == "cuda" else {}
    return {**CASES, **more, **({} if target.arch == "gfx1100" else FP8_CASES)}
