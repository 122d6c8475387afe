"""Layers that attend to the keys and values of an earlier one, and keep none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attention_steps import ragged_inputs
from inferplane.api.model import ForwardBatch
from inferplane.layers import Attention
from inferplane.models.errors import ModelLoadError
from model_harness import BLOCK_SIZE, make_context

CONFIG = {"architectures": ["Any"], "vocab_size": 8}
SHAPE = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}


def test_what_is_kept_is_kept_once() -> None:
    context = make_context(CONFIG)
    owner = Attention(context, "owner", **SHAPE)
    sharer = Attention(context, "sharer", **SHAPE, scale=0.7, kv_of=owner)
    alone = Attention(context, "alone", **SHAPE, scale=0.7)
    inputs = ragged_inputs([0, 0], [5, 9], block_size=BLOCK_SIZE, num_blocks=8)
    kv = {
        name: owner.backend.allocate_kv(owner.description, 8, torch.float32, torch.device("cpu"))
        for name in ("owner", "alone")
    }
    batch = ForwardBatch(
        token_ids=torch.zeros(14, dtype=torch.int64),
        positions=torch.zeros(14, dtype=torch.int64),
        logits_rows=torch.arange(14),
        kv=kv,
        metadata=dict.fromkeys(kv, inputs),
    )
    qkv = torch.randn(14, 8, 8)
    q, k, v = qkv.split([4, 2, 2], dim=1)
    owner(q, k, v, batch)
    assert torch.equal(sharer(q, k, v, batch), alone(q, k, v, batch))


@pytest.mark.parametrize("other", [{"window": 9}, {"num_kv_heads": 4}])
def test_layers_that_keep_something_else_cannot_share(other: dict[str, Any]) -> None:
    context = make_context(CONFIG)
    owner = Attention(context, "owner", **SHAPE)
    with pytest.raises(ModelLoadError, match="sharer: cannot attend to the keys and values of owner"):
        Attention(context, "sharer", **{**SHAPE, **other}, kv_of=owner)
