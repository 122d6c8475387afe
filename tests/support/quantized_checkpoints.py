"""Matrices as the tools of quantization store them, laid out by hand from each format's description, in numpy.

Each writer draws codes, scales and zero points, and returns the tensors by suffix together with the numbers that they
stand for, computed in float32 where the codes are still plain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Drawn = tuple[dict[str, torch.Tensor], torch.Tensor]
"""Stored tensors by suffix, and the matrix ``[out, in]`` float32."""


@dataclass(frozen=True)
class Case:
    """A configuration and who writes a matrix for it."""

    config: Mapping[str, Any]
    write: Callable[[np.random.Generator, int, int], Drawn]


def stream(codes: np.ndarray, bits: int) -> np.ndarray:
    """``[rows, n]`` codes from 0 up, one after another from the lowest bit of the first word, int32."""
    rows = codes.shape[0]
    flat = ((codes[..., None] >> np.arange(bits)) & 1).reshape(rows, -1).astype(np.uint8)
    flat = np.pad(flat, ((0, 0), (0, -flat.shape[1] % 32)))
    return np.ascontiguousarray(np.packbits(flat, axis=1, bitorder="little")).view(np.int32)


def groups_of(columns: int, size: int, *, shuffled: bool) -> np.ndarray:
    """The same for all matrices of an input, whose columns are ordered by what goes into them."""
    groups = np.arange(columns) // size
    return np.random.default_rng(columns).permutation(groups) if shuffled else groups


def half_scales(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.uniform(0.002, 0.02, shape).astype(np.float16)


def tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def gptq(bits: int = 4, size: int = 32, *, sym: bool = True, order: bool = False, version: int = 1) -> Case:
    def write(rng: np.random.Generator, out: int, columns: int) -> Drawn:
        group = columns if size == -1 else size
        num_groups = -(-columns // group)
        codes = rng.integers(0, 2**bits, (out, columns))
        zero = (
            np.full((num_groups, out), 2 ** (bits - 1))
            if sym
            else rng.integers(0, 2**bits, (num_groups, out))
        )
        if not sym:
            zero[0, :2] = 0, 2**bits - 1
        scale = half_scales(rng, num_groups, out)
        of_column = groups_of(columns, group, shuffled=order)
        want = (codes - zero[of_column].T) * scale[of_column].T.astype(np.float32)
        stored_zero = (zero - 1) % 2**bits if version == 1 else zero
        tensors = {
            ".qweight": tensor(stream(codes, bits).T),
            ".qzeros": tensor(stream(stored_zero, bits)),
            ".scales": tensor(scale),
            ".g_idx": tensor(of_column.astype(np.int32)),
        }
        return tensors, tensor(want.astype(np.float32))

    fields = {"bits": bits, "group_size": size, "sym": sym, "desc_act": order}
    version_name = "gptq" if version == 1 else "gptq_v2"
    return Case({"quant_method": "gptq", "checkpoint_format": version_name, **fields}, write)


def awq_words(codes: np.ndarray) -> np.ndarray:
    """``[n, out]`` codes to ``[n, out / 8]``, of each eight the even ones first."""
    packed = np.zeros((codes.shape[0], codes.shape[1] // 8), np.int64)
    for nibble, output in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
        packed |= (codes[:, output::8].astype(np.int64) & 15) << 4 * nibble
    return packed.astype(np.uint32).view(np.int32)


def awq(size: int = 32, *, has_zero: bool = True) -> Case:
    def write(rng: np.random.Generator, out: int, columns: int) -> Drawn:
        group = columns if size == -1 else size
        codes = rng.integers(0, 16, (columns, out))
        zero = (
            rng.integers(0, 16, (columns // group, out)) if has_zero else np.full((columns // group, out), 8)
        )
        if has_zero:
            zero[0, :2] = 0, 15
        scale = half_scales(rng, columns // group, out)
        of_column = np.arange(columns) // group
        want = ((codes - zero[of_column]) * scale[of_column].astype(np.float32)).T
        tensors = {".qweight": tensor(awq_words(codes)), ".scales": tensor(scale)}
        if has_zero:
            tensors[".qzeros"] = tensor(awq_words(zero))
        return tensors, tensor(want.astype(np.float32))

    return Case(
        {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": has_zero, "version": "gemm"},
        write,
    )


def quark(dtype: str, size: int | None = None, *, zero_points: str = "drawn") -> Case:
    """With ``zero_points`` drawn, all zero, or none. int4 and uint4 have groups of ``size``, and int8 one scale."""
    least, most = (0, 16) if dtype == "uint4" else (-8, 8) if dtype == "int4" else (-128, 128)

    def write(rng: np.random.Generator, out: int, columns: int) -> Drawn:
        codes = rng.integers(least, most, (columns, out))
        shape = (columns // size, out) if size else (1, 1)
        zero = rng.integers(least, most, shape) if zero_points == "drawn" else np.zeros(shape, np.int64)
        scale = half_scales(rng, *shape)
        of_column = np.arange(columns) // (size or columns)
        want = ((codes - zero[of_column]) * scale[of_column].astype(np.float32)).T
        if size:
            stored, stored_zero = awq_words(codes), awq_words(zero)
        else:
            stored, stored_zero, scale = (
                codes.T.astype(np.int8),
                zero.reshape(1).astype(np.int8),
                scale.reshape(1),
            )
        tensors = {".weight": tensor(stored), ".weight_scale": tensor(scale)}
        if zero_points != "none":
            tensors[".weight_zero_point"] = tensor(stored_zero)
        return tensors, tensor(want.astype(np.float32))

    weight = {"dtype": dtype, "qscheme": "per_group", "ch_axis": -1, "group_size": size}
    if size is None:
        weight = {"dtype": dtype, "qscheme": "per_tensor"}
    weight["symmetric"] = zero_points != "drawn"
    return Case({"quant_method": "quark", "global_quant_config": {"weight": weight}}, write)


def float8(rng: np.random.Generator, out: int, columns: int) -> torch.Tensor:
    return torch.from_numpy(rng.normal(0, 60, (out, columns))).clamp(-448, 448).to(torch.float8_e4m3fn)


def fp8(*, static: bool = False, block: tuple[int, int] | None = None) -> Case:
    config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "static" if static else "dynamic"}
    if block:
        config["weight_block_size"] = list(block)

    def write(rng: np.random.Generator, out: int, columns: int) -> Drawn:
        codes = float8(rng, out, columns)
        if block is None:
            scale = torch.tensor(rng.uniform(1e-4, 1e-3), dtype=torch.float32)
            tensors = {".weight": codes, ".weight_scale": scale}
            if static:
                tensors[".input_scale"] = torch.tensor([0.01])
            return tensors, codes.float() * scale
        shape = -(-out // block[0]), -(-columns // block[1])
        scales = torch.from_numpy(rng.uniform(1e-4, 1e-3, shape).astype(np.float32))
        spread = np.ix_(np.arange(out) // block[0], np.arange(columns) // block[1])
        return {".weight": codes, ".weight_scale_inv": scales}, codes.float() * scales[spread]

    return Case(config, write)


def fbgemm() -> Case:
    def write(rng: np.random.Generator, out: int, columns: int) -> Drawn:
        codes = float8(rng, out, columns)
        scale = torch.from_numpy(rng.uniform(1e-4, 1e-3, (out, 1)).astype(np.float32))
        return {".weight": codes, ".weight_scale": scale}, codes.float() * scale

    return Case({"quant_method": "fbgemm_fp8"}, write)


def compressed(
    kind: str = "int",
    bits: int = 4,
    strategy: str = "group",
    size: int | None = None,
    *,
    symmetric: bool = True,
    packed: bool = False,
    ordered: bool = False,
    activations: Mapping[str, Any] | None = None,
) -> Case:
    weights = {
        "num_bits": bits, "type": kind, "strategy": strategy, "group_size": size, "symmetric": symmetric,
        "actorder": "group" if ordered else None,
    }  # fmt: skip
    layout = "pack-quantized" if packed else f"{kind}-quantized"
    config = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}
        },
        "ignore": ["lm_head"],
    }

    def write(rng: np.random.Generator, out: int, columns: int) -> Drawn:
        group = size or columns
        shape = (1,) if strategy == "tensor" else (out, columns // group)
        scale = torch.from_numpy(rng.uniform(0.002, 0.02, shape).astype(np.float32)).bfloat16()
        of_column = groups_of(columns, group, shuffled=ordered)
        wide = scale.float().expand(out, columns) if strategy == "tensor" else scale.float()[:, of_column]
        if kind == "float":
            codes = float8(rng, out, columns)
            return {".weight": codes, ".weight_scale": scale}, codes.float() * wide
        half = 2 ** (bits - 1)
        codes = rng.integers(-half, half, (out, columns))
        tensors = {".weight_scale": scale}
        zero = np.zeros((out, columns // group), np.int64)
        if not symmetric:
            zero = rng.integers(-half, half, zero.shape)
            tensors[".weight_zero_point"] = tensor(
                stream((zero + half).T, bits).T if packed else zero.astype(np.int8)
            )
        if packed:
            tensors[".weight_packed"] = tensor(stream(codes + half, bits))
            tensors[".weight_shape"] = torch.tensor([out, columns])
        else:
            tensors[".weight"] = tensor(codes.astype(np.int8))
        if ordered:
            tensors[".weight_g_idx"] = tensor(of_column.astype(np.int32))
        return tensors, torch.from_numpy((codes - zero[:, of_column]).astype(np.float32)) * wide

    return Case(config, write)


FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def nibbles(codes: np.ndarray, *, high_first: bool = False) -> np.ndarray:
    low, high = (codes[:, 1::2], codes[:, ::2]) if high_first else (codes[:, ::2], codes[:, 1::2])
    return (low | (high << 4)).astype(np.uint8)


def mxfp4() -> Case:
    """As compressed-tensors names it; the layout of a dense matrix is the one of GPT-OSS without its experts."""
    config = compressed("float", 4, "group", 32).config
    config = {**config, "format": "mxfp4-pack-quantized"}

    def write(rng: np.random.Generator, out: int, columns: int) -> Drawn:
        codes, exponent = rng.integers(0, 16, (out, columns)), rng.integers(118, 124, (out, columns // 32))
        want = FP4[codes] * np.exp2(exponent - 127.0).astype(np.float32).repeat(32, 1)
        tensors = {
            ".weight_packed": tensor(nibbles(codes)),
            ".weight_scale": tensor(exponent.astype(np.uint8)),
        }
        return tensors, tensor(want)

    return Case(config, write)


def nvfp4() -> Case:
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}

    def write(rng: np.random.Generator, out: int, columns: int) -> Drawn:
        codes = rng.integers(0, 16, (out, columns))
        scale = torch.from_numpy(rng.uniform(10, 400, (out, columns // 16))).to(torch.float8_e4m3fn)
        of_all = torch.tensor(1e-4 * rng.uniform(1, 2), dtype=torch.float32)
        want = tensor(FP4[codes]) * (scale.float() * of_all).repeat_interleave(16, 1)
        tensors = {
            ".weight": tensor(nibbles(codes)),
            ".weight_scale": scale,
            ".weight_scale_2": of_all,
            ".input_scale": torch.tensor(0.1),
        }
        return tensors, want

    return Case(config, write)


def torchao(kind: str, **fields: Any) -> dict[str, Any]:
    """A configuration as transformers writes it."""
    return {
        "quant_method": "torchao",
        "quant_type": {"default": {"_type": kind, "_version": 2, "_data": fields}},
    }


def torchao_int4(size: int = 32) -> Case:
    def write(rng: np.random.Generator, out: int, columns: int) -> Drawn:
        codes = rng.integers(-8, 8, (out, columns))
        scale, offset = half_scales(rng, columns // size, out), half_scales(rng, columns // size, out)
        spread = [each.repeat(size, 0).T.astype(np.float32) for each in (scale, offset)]
        tensors = {
            "._weight_qdata": tensor((codes[:, ::2] & 15 | codes[:, 1::2] << 4).astype(np.int8)),
            "._weight_scale": tensor(scale),
            "._weight_zero_point": tensor(offset),
        }
        return tensors, tensor(codes.astype(np.float32) * spread[0] + spread[1])

    return Case(torchao("Int4WeightOnlyConfig", group_size=size), write)


def torchao_int(
    kind: str, bits: int, size: int | None = None, *, is_symmetric: bool = True, **fields: Any
) -> Case:
    half = 2 ** (bits - 1)

    def write(rng: np.random.Generator, out: int, columns: int) -> Drawn:
        group = size or columns
        codes = rng.integers(-half, half, (out, columns))
        zero = np.zeros((out, columns // group), np.int64)
        if not is_symmetric:
            zero = rng.integers(-half, half, zero.shape)
        scale = half_scales(rng, *zero.shape)
        tensors = {
            "._weight_qdata": tensor(codes.astype(np.int8)),
            "._weight_scale": tensor(scale),
            "._weight_zero_point": tensor(zero.astype(np.int8)),
        }
        want = (codes - zero.repeat(group, 1)).astype(np.float32) * scale.repeat(group, 1).astype(np.float32)
        return tensors, tensor(want)

    return Case(torchao(kind, **fields), write)


def torchao_group(size: int) -> dict[str, Any]:
    return {"_type": "PerGroup", "_version": 1, "_data": {"group_size": size}}


def torchao_name(kind: str, value: str) -> dict[str, Any]:
    return {"_type": kind, "_data": value}


CASES = {
    "gptq-4": gptq(),
    "gptq-4-order": gptq(order=True),
    "gptq-4-asymmetric": gptq(sym=False),
    "gptq-4-asymmetric-v2-order": gptq(sym=False, order=True, version=2),
    "gptq-4-column": gptq(size=-1),
    "gptq-8": gptq(8, 16, sym=False),
    "gptq-8-order": gptq(8, 32, order=True),
    "gptq-3": gptq(3, 32, sym=False),
    "gptq-2": gptq(2, 16),
    "awq": awq(),
    "awq-symmetric-column": awq(-1, has_zero=False),
    "quark-uint4": quark("uint4", 32),
    "quark-int4": quark("int4", 16),
    "quark-int4-zeros": quark("int4", 32, zero_points="zero"),
    "quark-int4-no-zeros": quark("int4", 32, zero_points="none"),
    "quark-int8": quark("int8"),
    "quark-int8-no-zero": quark("int8", zero_points="none"),
    "fp8-dynamic": fp8(),
    "fp8-static": fp8(static=True),
    "fp8-block": fp8(block=(32, 32)),
    "fp8-block-tails": fp8(block=(24, 16)),
    "fbgemm": fbgemm(),
    "ct-w4-group": compressed("int", 4, "group", 32, packed=True),
    "ct-w4-group-asymmetric": compressed("int", 4, "group", 16, packed=True, symmetric=False),
    "ct-w4-order": compressed("int", 4, "group", 32, packed=True, ordered=True),
    "ct-w8-channel-packed": compressed("int", 8, "channel", packed=True),
    "ct-w3-group": compressed("int", 3, "group", 32, packed=True, symmetric=False),
    "ct-w8a8": compressed(
        "int", 8, "channel",
        activations={"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
    ),
    "ct-w8-tensor": compressed("int", 8, "tensor"),
    "ct-w8-asymmetric": compressed("int", 8, "channel", symmetric=False),
    "ct-fp8": compressed(
        "float", 8, "channel",
        activations={"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
    ),
    "ct-mxfp4": mxfp4(),
    "modelopt-nvfp4": nvfp4(),
    "torchao-int4": torchao_int4(),
    "torchao-int8": torchao_int("Int8WeightOnlyConfig", 8),
    "torchao-w8a8": torchao_int("Int8DynamicActivationInt8WeightConfig", 8),
    "torchao-intx-4": torchao_int(
        "IntxWeightOnlyConfig", 4, 16, is_symmetric=False, granularity=torchao_group(16),
        weight_dtype=torchao_name("torch.dtype", "int4"), mapping_type=torchao_name("MappingType", "ASYMMETRIC"),
    ),
    "torchao-intx-5": torchao_int(
        "Int8DynamicActivationIntxWeightConfig", 5, 32, weight_granularity=torchao_group(32),
        weight_dtype=torchao_name("torch.dtype", "int5"),
    ),
}  # fmt: skip
