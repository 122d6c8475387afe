"""Scales of fp8 keys and values, wherever a checkpoint keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from inferplane.api.comm import Communicator
from inferplane.api.kv_dtype import KVScales
from inferplane.models.errors import ModelLoadError
from inferplane.models.registry import build_model
from model_harness import make_context, read_config, read_tensors, run_ranks
from tiny_models import make_tiny_model

LAYER = "model.layers.1.self_attn."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"))


def scales(
    folder: Path, stored: dict[str, Sequence[float] | float], comm: Communicator | None = None
) -> list[KVScales | None]:
    """Of the model's two layers, once it is loaded with these tensors below `LAYER`."""
    model = build_model(make_context(read_config(folder), kv_dtype="fp8_e4m3", comm=comm))
    more = [(LAYER + name, torch.tensor(values)) for name, values in stored.items()]
    model.load_weights([*more, *read_tensors(folder)])
    return [layer.kv_scales for layer in model.attention_layers()]


@pytest.mark.parametrize(
    ("stored", "k", "v"),
    [
        ({}, [1, 1], [1, 1]),
        ({"k_scale": 0.5, "v_scale": [0.25]}, [0.5, 0.5], [0.25, 0.25]),
        ({"k_scale": [0.5, 2.0], "v_scale": [4.0, 0.25]}, [0.5, 2], [4, 0.25]),
        ({"k_proj.k_scale": 0.5, "v_proj.v_scale": 3.0}, [0.5, 0.5], [3, 3]),
        ({"k_proj.output_scale": 0.5}, [0.5, 0.5], [1, 1]),
        ({"kv_scale": 0.5}, [0.5, 0.5], [0.5, 0.5]),
    ],
)
def test_where_they_are(folder: Path, stored: dict, k: list[float], v: list[float]) -> None:
    first, second = scales(folder, stored)
    assert first is not None and second is not None
    assert (first.k.tolist(), first.v.tolist()) == ([1, 1], [1, 1])
    assert (second.k.tolist(), second.v.tolist()) == (k, v)


@pytest.mark.parametrize("world_size", [2, 4])
def test_each_rank_keeps_those_of_its_heads(folder: Path, world_size: int) -> None:
    stored: dict = {"k_scale": [0.5, 2.0], "v_scale": 3.0}
    found = run_ranks(world_size, lambda comm: scales(folder, stored, comm)[1])
    assert all(each is not None for each in found)
    # with more ranks than KV heads neighbours keep the same
    want = [0.5] * (world_size // 2) + [2.0] * (world_size // 2)
    assert [each.k.tolist() for each in found if each is not None] == [[value] for value in want]
    assert [each.v.tolist() for each in found if each is not None] == [[3.0]] * world_size


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"k_scale": 0.0}, r"self_attn.k_scale: a scale should be a number above 0, but is \[0.0\]"),
        ({"v_scale": float("nan")}, r"self_attn.v_scale: .* is \[nan\]"),
        (
            {"k_scale": [1.0, 2.0, 3.0]},
            "self_attn.k_scale: has 3 scales, but there should be one, or one for",
        ),
        ({"k_scale": [[1.0, 2.0]]}, r"wrong shape: .*k_scale is \[1, 2\]"),
    ],
)
def test_what_cannot_be(folder: Path, stored: dict, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        scales(folder, stored)


def test_another_cache_needs_none(folder: Path) -> None:
    for kv_dtype in (None, "int8_per_token_head"):
        model = build_model(make_context(read_config(folder), kv_dtype=kv_dtype))
        model.load_weights(read_tensors(folder))
        assert [layer.kv_scales for layer in model.attention_layers()] == [None, None]
