from __future__ import annotations

import pytest
import torch

from inferplane.api.kv import (
    KV_DTYPE_BYTES,
    QUANTIZED_KV,
    AttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
)
from inferplane.api.kv_dtype import number_type, stored_type


@pytest.mark.parametrize(
    ("dtype", "row_bytes"),
    [("float32", 256), ("bfloat16", 128), ("fp8_e4m3", 64), ("fp8_e5m2", 64), ("int8_per_token_head", 68)],
)
def test_bytes_of_a_block(dtype: str, row_bytes: int) -> None:
    full: AttentionSpec = FullAttentionSpec(block_size=16, num_kv_heads=3, head_dim=64, dtype=dtype)
    latent = MLAAttentionSpec(block_size=16, head_dim=64, rope_dim=16, dtype=dtype)
    assert full.block_bytes == 2 * 16 * 3 * row_bytes
    assert latent.block_bytes == 16 * row_bytes


def test_types_of_numbers() -> None:
    assert {name: number_type(name).itemsize for name in KV_DTYPE_BYTES} == KV_DTYPE_BYTES
    assert len({number_type(name) for name in QUANTIZED_KV}) == len(QUANTIZED_KV)
    state = MambaSpec(block_size=16, shapes=((2, 3),), dtypes=("float32",))
    assert stored_type(state, torch.bfloat16) is torch.bfloat16
