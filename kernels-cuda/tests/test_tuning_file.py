"""Shipped tables are found by capability, and say what the kernels that they are for can be told."""

from __future__ import annotations

import json

from inferplane_kernels_cuda import tuning_file


def test_a_capability_without_a_table():
    assert tuning_file((1, 0)) is None


def test_every_entry_of_the_table_for_the_h200_fits_its_kernel():
    # late: other tests set Triton to interpret, which it reads when it is first imported
    from inferplane_kernels_triton.block_matmul import BlockMatmulConfig
    from inferplane_kernels_triton.decode_attention import DecodeConfig
    from inferplane_kernels_triton.fp8_matvec import Fp8MatvecConfig
    from inferplane_kernels_triton.int4_dequantize import DequantizeConfig
    from inferplane_kernels_triton.int4_fixed_matvec import Int4FixedMatvecConfig
    from inferplane_kernels_triton.matvec import MatvecConfig
    from inferplane_kernels_triton.moe_experts import ExpertsConfig
    from inferplane_kernels_triton.moe_one_token import OneTokenConfig
    from inferplane_kernels_triton.prefill_attention import PrefillConfig
    from inferplane_kernels_triton.skinny_matmul import MatmulConfig
    from inferplane_kernels_triton.tuning import TuningTable

    path = tuning_file((9, 0))
    assert path is not None
    defaults = {
        "matvec": MatvecConfig(),
        "matvec_gated": MatvecConfig(),
        "fp8_matvec": Fp8MatvecConfig(),
        "fp8_matvec_gated": Fp8MatvecConfig(),
        "fused_experts": ExpertsConfig(),
        "fused_experts_down": ExpertsConfig(),
        "one_token_experts": OneTokenConfig(),
        "one_token_experts_down": OneTokenConfig(),
        "skinny_matmul": MatmulConfig(),
        "skinny_matmul_gated": MatmulConfig(),
        "skinny_matmul_fp8": MatmulConfig(),
        "skinny_matmul_gated_fp8": MatmulConfig(),
        "matvec_fp8_block": MatvecConfig(),
        "matvec_gated_fp8_block": MatvecConfig(),
        "skinny_matmul_fp8_block": MatmulConfig(),
        "skinny_matmul_gated_fp8_block": MatmulConfig(),
        "block_matmul": BlockMatmulConfig(),
        "int4_fixed_matvec": Int4FixedMatvecConfig(),
        "int4_fixed_matvec_gated": Int4FixedMatvecConfig(),
        "int4_dequantize": DequantizeConfig(),
        "decode_attention": DecodeConfig(),
        "prefill_attention": PrefillConfig(),
    }
    kernels = json.loads(path.read_text())["kernels"]
    of_products = {"many_rows", "quack", "quack_gated"}  # of libraries: who reads them checks them
    assert kernels.keys() <= defaults.keys() | of_products
    table = TuningTable.read(path)
    for kernel in kernels.keys() - of_products:
        for shape, entry in kernels[kernel].items():
            key = () if shape == "*" else tuple(map(int, shape.split("x")))
            config = table.config(kernel, key, defaults[kernel])
            assert {name: getattr(config, name) for name in entry} == entry
