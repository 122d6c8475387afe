"""What layers do with kernels that take a neighbour's work along: the numbers of the composition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from inferplane.api.attention import AttentionLayer
from inferplane.api.comm import Communicator
from inferplane.api.linear import FusedMultiply
from inferplane.api.ops import add_rms_norm, rms_norm, rotary, silu_and_mul
from inferplane.models.registry import build_model
from model_harness import (
    DenseLinear,
    GatherAttention,
    PromptRun,
    load_tiny,
    make_context,
    read_config,
    read_tensors,
    run_ranks,
)


class ToyFused(FusedMultiply):
    adds: ClassVar[bool] = False

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self.asked: set[str] = set()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.asked.add("plain")
        return self._product(x)

    def after_add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        *,
        is_gated: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked.add("norm and gate" if is_gated else "norm")
        if residual is None:
            normed, total = rms_norm(x, weight, eps), x
        else:
            normed, total = add_rms_norm(x, residual, weight, eps)
        product = self._product(normed)
        return silu_and_mul(product) if is_gated else product, total

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        self.asked.add("gate")
        return silu_and_mul(self._product(x))

    def added_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        self.asked.add("sum")
        return residual.add_(self._product(x)) if self.adds else None

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self._weight, self._bias)


class ToyLinear(DenseLinear):
    made: ClassVar[list[ToyFused]] = []

    @classmethod
    def prepare(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> ToyFused:
        cls.made.append(ToyFused(weight, bias))
        return cls.made[-1]


class RotatingAttention(GatherAttention):
    fuses_rotary = True

    def __init__(self) -> None:
        self.num_calls = 0

    def rotary_forward(
        self,
        layer: AttentionLayer,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        kv: torch.Tensor,
        metadata: Any,
        *,
        qk_norm: tuple[torch.Tensor, torch.Tensor, float] | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.num_calls += 1
        heads = [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads]
        q, k, v = qkv.view(len(qkv), -1, layer.head_dim).split(heads, dim=1)
        if qk_norm is not None:
            q, k = rms_norm(q, qk_norm[0], qk_norm[2]), rms_norm(k, qk_norm[1], qk_norm[2])
        q, k = rotary(q, k, positions, cos_sin)
        return self.forward(layer, q, k, v, kv, metadata, sinks=sinks)


PROMPTS = [[5, 9, 2, 40, 11], [7], [3, 3, 8]]


@pytest.mark.parametrize(
    ("arch", "num_with_norm", "num_with_gate"),
    [
        ("llama", 1, 1),
        ("qwen3", 1, 1),
        ("gpt_oss", 1, 0),  # its feed-forward block is a mixture of experts
        ("gemma3", 2, 0),  # its gate is no silu
    ],
)
def test_a_fused_model_is_the_composed_one(
    arch: str, num_with_norm: int, num_with_gate: int, tiny_model: Callable[[str], Path]
) -> None:
    folder = tiny_model(arch)
    want = PromptRun(load_tiny(folder)).logits(PROMPTS)
    ToyLinear.made.clear()
    attention = RotatingAttention()
    context = make_context(read_config(folder), choose_linear=lambda shape: ToyLinear)
    model = build_model(replace(context, choose_attention=lambda layer: attention))
    model.load_weights(read_tensors(folder))
    got = PromptRun(model).logits(PROMPTS)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs)
    num_layers = read_config(folder)["num_hidden_layers"]
    assert attention.num_calls == num_layers
    asked = [fused.asked for fused in ToyLinear.made]
    assert asked.count({"norm"}) == num_with_norm * num_layers
    assert asked.count({"norm and gate"}) == num_with_gate * num_layers


@pytest.mark.parametrize(
    ("arch", "num_adding"), [("llama", 2), ("gemma3", 0), ("granite", 0), ("gpt_oss", 1)]
)
def test_products_that_add_leave_no_residual(
    arch: str, num_adding: int, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But where a norm or a factor stands between product and sum."""
    folder = tiny_model(arch)
    want = PromptRun(load_tiny(folder)).logits(PROMPTS)
    ToyLinear.made.clear()
    monkeypatch.setattr(ToyFused, "adds", True)
    got = PromptRun(load_tiny(folder, choose_linear=lambda shape: ToyLinear)).logits(PROMPTS)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs)
    asked = [fused.asked for fused in ToyLinear.made]
    assert asked.count({"sum"}) == num_adding * read_config(folder)["num_hidden_layers"]


def test_ranks_add_no_residual_to_their_parts(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model("llama")
    want = PromptRun(load_tiny(folder)).logits(PROMPTS)
    monkeypatch.setattr(ToyFused, "adds", True)

    def work(comm: Communicator) -> list[torch.Tensor]:
        return PromptRun(load_tiny(folder, comm=comm, choose_linear=lambda shape: ToyLinear)).logits(PROMPTS)

    for rank in run_ranks(2, work):
        for ours, theirs in zip(rank, want, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_tokens_that_nobody_asks_for_end_at_the_last_attention(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model("llama")
    want = [each[-1:] for each in PromptRun(load_tiny(folder)).logits(PROMPTS)]
    sizes: list[int] = []

    def product(self: ToyFused, x: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        return torch.nn.functional.linear(x, self._weight, self._bias)

    monkeypatch.setattr(ToyFused, "_product", product)
    got = PromptRun(load_tiny(folder, choose_linear=lambda shape: ToyLinear)).logits(
        PROMPTS, asks_for_last=True
    )
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs)
    num_layers, num_tokens = read_config(folder)["num_hidden_layers"], sum(map(len, PROMPTS))
    products = ["qkv", "o", "gate and up", "down"] * num_layers
    narrow = [len(PROMPTS)] * 3
    assert sizes == [num_tokens] * (len(products) - 3) + narrow + sizes[len(products) :]  # and the head


def test_without_a_norm_before_it_only_the_gate_is_fused(tiny_model: Callable[[str], Path]) -> None:
    folder = tiny_model("olmo2")  # its norms stand behind the blocks
    want = PromptRun(load_tiny(folder)).logits(PROMPTS)
    ToyLinear.made.clear()
    got = PromptRun(load_tiny(folder, choose_linear=lambda shape: ToyLinear)).logits(PROMPTS)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs)
    asked = [fused.asked for fused in ToyLinear.made]
    assert asked.count({"gate"}) == read_config(folder)["num_hidden_layers"]
    assert {"norm"} not in asked


def test_heads_that_a_model_places_in_its_own_way_are_not_rotated_for_it(
    tiny_model: Callable[[str], Path],
) -> None:
    """Llama 4 norms them after the rotation, in one of its layers, and has no rotation in the other."""
    folder = tiny_model("llama4")
    want = PromptRun(load_tiny(folder)).logits(PROMPTS)
    attention = RotatingAttention()
    context = replace(make_context(read_config(folder)), choose_attention=lambda layer: attention)
    model = build_model(context)
    model.load_weights(read_tensors(folder))
    for ours, theirs in zip(PromptRun(model).logits(PROMPTS), want, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert attention.num_calls == 0
