"""How many calls one decoder layer makes: each costs microseconds on the host, or a launch on an accelerator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from inferplane.api.linear import LinearShape, Multiply
from inferplane.api.model import BuildContext, ForwardBatch
from inferplane.api.ops import OPS, OpTable
from inferplane.models.registry import build_model
from inferplane.models.weights import dummy_tensors, weight_slots
from model_harness import DenseLinear, GatherAttention, make_context, read_config


class DispatchCounter(TorchDispatchMode):
    def __init__(self, calls: Counter[str]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def _counted_context(hf_config: dict[str, Any], calls: Counter[str]) -> BuildContext:
    """Every op, product and attention is one call that costs nothing else."""

    def once(name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls[name] += 1
            return answer(*args)

        return call

    def product(size: int) -> Multiply:
        out = torch.zeros(1, size)
        return once("linear", lambda x: out)

    class OneCallLinear(DenseLinear):
        @classmethod
        def prepare(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> Multiply:
            return product(len(weight))

    class OneCallAttention(GatherAttention):
        forward = staticmethod(once("attention", lambda layer, q, k, v, kv, metadata: q))

    gated = torch.zeros(1, hf_config["intermediate_size"])
    ops = {
        "rms_norm": lambda x, weight, eps: x,
        "add_rms_norm": lambda x, residual, weight, eps: (x, residual),
        "rotary": lambda q, k, positions, table: (q, k),
        "silu_and_mul": lambda gate_up: gated,
    }
    attention = OneCallAttention()

    def choose(shape: LinearShape) -> type[DenseLinear]:
        return OneCallLinear

    return replace(
        make_context(hf_config, choose_linear=choose),
        ops=OpTable(
            {name: once(name, ops[name]) if name in ops else op.reference for name, op in OPS.items()}
        ),
        choose_attention=lambda layer: attention,
    )


def _calls(hf_config: dict[str, Any], num_layers: int) -> Counter[str]:
    calls: Counter[str] = Counter()
    model = build_model(_counted_context({**hf_config, "num_hidden_layers": num_layers}, calls))
    model.load_weights(dummy_tensors(weight_slots(model)))
    names = [layer.name for layer in model.attention_layers()]
    one = torch.tensor([1])
    batch = ForwardBatch(
        token_ids=one,
        positions=one,
        logits_rows=one,
        kv=dict.fromkeys(names, one),
        metadata=dict.fromkeys(names),
    )
    model(batch)  # makes the rotary table
    calls.clear()
    with DispatchCounter(calls), torch.inference_mode():
        model(batch)
    return calls


@pytest.mark.parametrize(("arch", "most"), [("llama", 11), ("qwen2", 11), ("qwen3", 13)])
def test_calls_per_layer_beside_attention(arch: str, most: int, tiny_model: Callable[[str], Path]):
    hf_config = {**read_config(tiny_model(arch)), "layer_types": None}
    per_layer = _calls(hf_config, 3)
    per_layer.subtract(_calls(hf_config, 2))
    assert per_layer.pop("attention") == 1
    assert per_layer.total() <= most, per_layer
