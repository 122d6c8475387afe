"""Each layer against the whole matrices that it is a share of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch.nn.functional import embedding, linear

from inferplane.api.comm import Communicator
from inferplane.api.model import BuildContext
from inferplane.layers import (
    ColumnParallelLinear,
    GatedActivation,
    Heads,
    Layer,
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    ReplicatedLinear,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    walk_layers,
)
from inferplane.models.weights import load_weights
from model_harness import make_context, run_ranks

HF_CONFIG = {"architectures": ["LlamaForCausalLM"], "vocab_size": 8}
WORLD_SIZES = [1, 2, 3]
assert_close = torch.testing.assert_close


class Holder:
    """Something with layers on its attributes, as a model is."""

    def __init__(self, *layers: Layer) -> None:
        self.layers = layers


def _context(comm: Communicator) -> BuildContext:
    return make_context(HF_CONFIG, comm=comm)


def _tensors(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    named = {name.replace("__", "."): shape for name, shape in shapes.items()}
    return {name: torch.randn(shape, generator=generator) for name, shape in named.items()}


def _loaded(layer: Any, tensors: dict[str, torch.Tensor]) -> Any:
    load_weights(Holder(layer), tensors.items())
    return layer


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_column_then_row_parallel_equals_two_products(world_size: int, bias: bool):
    tensors = _tensors(up__weight=(12, 5), down__weight=(5, 12), up__bias=(12,), down__bias=(5,))
    if not bias:
        tensors = {name: tensor for name, tensor in tensors.items() if "weight" in name}
    x = torch.randn(4, 5)

    def work(comm: Communicator) -> torch.Tensor:
        up = ColumnParallelLinear(_context(comm), "up", 5, 12, bias=bias)
        down = RowParallelLinear(_context(comm), "down", 12, 5, bias=bias)
        load_weights(Holder(up, down), tensors.items())
        assert up(x).shape == (4, 12 // world_size)
        return down(up(x))

    inner = linear(x, tensors["up.weight"], tensors.get("up.bias"))
    expected = linear(inner, tensors["down.weight"], tensors.get("down.bias"))
    for found in run_ranks(world_size, work):
        assert_close(found, expected)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_merged_column_parallel_has_its_part_of_each(world_size: int):
    tensors = _tensors(
        mlp__gate__weight=(6, 5), mlp__up__weight=(12, 5), mlp__gate__bias=(6,), mlp__up__bias=(12,)
    )
    x = torch.randn(4, 5)

    def work(comm: Communicator) -> torch.Tensor:
        layer = MergedColumnParallelLinear(_context(comm), "mlp", 5, {"gate": 6, "up": 12}, bias=True)
        return _loaded(layer, tensors)(x)

    wholes = [
        linear(x, tensors[f"mlp.{part}.weight"], tensors[f"mlp.{part}.bias"]) for part in ("gate", "up")
    ]
    for rank, found in enumerate(run_ranks(world_size, work)):
        assert_close(found, torch.cat([whole.chunk(world_size, -1)[rank] for whole in wholes], -1))


@pytest.mark.parametrize(("world_size", "num_kv_heads"), [(1, 2), (2, 2), (2, 1), (3, 3), (3, 1), (6, 2)])
def test_qkv_parallel_splits_by_heads_and_repeats_kv_heads_where_they_are_few(
    world_size: int, num_kv_heads: int
):
    num_heads, head_dim = 6, 4
    kv_size = num_kv_heads * head_dim
    tensors = _tensors(
        a__q_proj__weight=(24, 5), a__k_proj__weight=(kv_size, 5), a__v_proj__weight=(kv_size, 5),
        a__q_proj__bias=(24,), a__k_proj__bias=(kv_size,), a__v_proj__bias=(kv_size,),
    )  # fmt: skip
    x = torch.randn(3, 5)

    def work(comm: Communicator) -> torch.Tensor:
        layer = QKVParallelLinear(
            _context(comm),
            "a",
            5,
            Heads(num_heads, num_kv_heads, head_dim),
            bias=True,
        )
        assert layer.num_heads == num_heads // world_size
        assert layer.num_kv_heads == max(1, num_kv_heads // world_size)
        return _loaded(layer, tensors)(x)

    q, k, v = (
        linear(x, tensors[f"a.{part}.weight"], tensors[f"a.{part}.bias"]).unflatten(-1, (-1, head_dim))
        for part in ("q_proj", "k_proj", "v_proj")
    )
    for rank, found in enumerate(run_ranks(world_size, work)):
        queries = list(range(num_heads))[
            rank * num_heads // world_size : (rank + 1) * num_heads // world_size
        ]
        kv_heads = sorted({query * num_kv_heads // num_heads for query in queries})
        assert_close(found, torch.cat([q[:, queries], k[:, kv_heads], v[:, kv_heads]], 1).flatten(1))


def test_replicated_linear_is_whole_on_each_rank():
    tensors = _tensors(gate__weight=(7, 5), gate__bias=(7,))
    x = torch.randn(2, 5)

    def work(comm: Communicator) -> torch.Tensor:
        return _loaded(ReplicatedLinear(_context(comm), "gate", 5, 7, bias=True), tensors)(x)

    for found in run_ranks(3, work):
        assert_close(found, linear(x, tensors["gate.weight"], tensors["gate.bias"]))


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("vocab_size", [1, 5, 12, 13])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_vocabulary_of_any_size_is_split(world_size: int, vocab_size: int, is_tied: bool):
    tensors = _tensors(embed__weight=(vocab_size, 6), head__weight=(vocab_size, 6))
    if is_tied:
        del tensors["head.weight"]
    token_ids = torch.tensor([0, vocab_size - 1, vocab_size // 2, 0])
    hidden = torch.randn(3, 6)

    def work(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        ctx = _context(comm)
        embed = VocabParallelEmbedding(ctx, "embed", vocab_size, 6)
        head = ParallelLMHead(ctx, "head", vocab_size, 6, tied_to=embed if is_tied else None)
        load_weights(Holder(embed, head), tensors.items())
        return embed(token_ids), head(hidden)

    for vectors, logits in run_ranks(world_size, work):
        assert torch.equal(vectors, embedding(token_ids, tensors["embed.weight"]))
        assert logits.shape == (3, vocab_size)
        assert_close(logits, linear(hidden, tensors["embed.weight" if is_tied else "head.weight"]))


def test_rms_norm_adds_the_residual_first():
    tensors = _tensors(norm__weight=(6,))
    norm = run_ranks(1, lambda comm: _loaded(RMSNorm(_context(comm), "norm", 6, 1e-3), tensors))[0]
    x, residual = torch.randn(2, 4, 6)

    def expected(total: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(total, (6,), tensors["norm.weight"], 1e-3)

    assert_close(norm(x), expected(x))
    normed, same = norm.add(x, None)
    assert_close(normed, expected(x))
    assert same is x
    normed, total = norm.add(x.clone(), residual.clone())
    assert_close(normed, expected(x + residual))
    assert_close(total, x + residual)


def test_silu_and_mul_gates_the_second_half():
    act = run_ranks(1, lambda comm: GatedActivation(_context(comm)))[0]
    gate, up = torch.randn(2, 3, 5)
    assert_close(act(torch.cat([gate, up], -1)), torch.nn.functional.silu(gate) * up)


def test_walk_finds_each_layer_once_in_order():
    class Block(Layer):
        def __init__(self, shared: Layer) -> None:
            self.first, self.many, self.by_name = Layer(), [Layer(), Layer()], {"a": Layer()}
            self.shared = shared

    class Root(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = Layer()
            self.blocks = [Block(self.shared), Block(self.shared)]
            self.inner = torch.nn.ModuleList([torch.nn.Identity()])

    root = Root()

    def of_block(block: Block) -> Iterable[Layer]:
        return [block, block.first, *block.many, block.by_name["a"]]

    expected = [root.shared, *of_block(root.blocks[0]), *of_block(root.blocks[1])]
    assert list(walk_layers(root)) == expected


def test_a_layer_that_computes_nothing_says_so():
    with pytest.raises(NotImplementedError, match="Layer must say what it computes"):
        Layer()()


@pytest.mark.parametrize(
    "make",
    [
        lambda ctx: ColumnParallelLinear(ctx, "model.x", 4, 5),
        lambda ctx: RowParallelLinear(ctx, "model.x", 5, 4),
        lambda ctx: MergedColumnParallelLinear(ctx, "model", 4, {"x": 5}),
    ],
)
def test_a_bad_division_names_the_layer_and_the_numbers(make: Callable[[BuildContext], Layer]):
    from inferplane.config import ConfigError

    with pytest.raises(ConfigError, match=r"model\.x: \w+_features 5 cannot be split over 2 ranks"):
        run_ranks(2, lambda comm: make(_context(comm)))
