"""Who would run a model and why: the model is built and filled on the meta device, and every choice that it asks for is
written down. No weights are needed. Imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from inferplane.api.attention import AttentionBackend, AttentionLayer, AttentionQuery
from inferplane.api.comm import SoloCommunicator
from inferplane.api.device import DeviceDescriptor
from inferplane.api.kv import KVCacheGroup, KVCacheSpec, MLAAttentionSpec
from inferplane.api.kv_dtype import stored_type
from inferplane.api.linear import LinearKernel, LinearShape, Multiply, RowProduct
from inferplane.api.model import BuildContext
from inferplane.api.quant import QuantizedLinearKernel, QuantizedWeight
from inferplane.api.quantized_experts import ExpertsShape, MultiplyExperts, QuantizedExpertsKernel
from inferplane.config.args import EngineArgs
from inferplane.config.defaults import Setting
from inferplane.config.engine import EngineConfig
from inferplane.config.resolve import resolve_in_full
from inferplane.engine.kv_grouping import group_layers
from inferplane.kvcache.managers import manager_class_for
from inferplane.layers import WeightSlot, walk_layers
from inferplane.models.registry import build_model, find_target
from inferplane.plugins.decision import Decision
from inferplane.plugins.plugin_set import PluginSet
from inferplane.plugins.resolution import make_op_table
from inferplane.quantization.registry import DEQUANTIZE, make_format
from inferplane.reference.attention import ReferenceAttention


@dataclass(frozen=True)
class Choice:
    """One decision, and everything that it was made for."""

    kind: str
    """``op``, ``attention``, ``linear``, ``quantized`` or ``experts``, which are quantized ones."""
    subjects: tuple[str, ...]
    """Names of the op or of the layers, which are alike in all that matters to a provider."""
    detail: str
    """What the providers were asked about."""
    decision: Decision

    def losing_reason(self, index: int) -> str:
        """Why the candidate of that index did not win."""
        candidate, winner = self.decision.candidates[index], self.decision.winner
        if candidate.reason is not None or winner is None:
            return candidate.reason or ""
        if candidate.priority < winner.priority:
            return f"could serve too, with priority {candidate.priority} below {winner.priority}"
        return f"could serve too, with the same priority; {winner.plugin} comes first"


@dataclass(frozen=True)
class GroupOfKV:
    """Layers that share block tables, and who keeps their books."""

    layer_names: tuple[str, ...]
    spec: KVCacheSpec
    pool: int
    """The pool of blocks that it shares with the other groups of this number."""
    manager: str | None
    """None when nobody knows how to keep the spec; `reason` says so."""
    reason: str | None = None


@dataclass(frozen=True)
class Explanation:
    device: DeviceDescriptor
    config: EngineConfig
    settings: list[Setting]
    choices: list[Choice]
    kv_groups: list[GroupOfKV]
    implementation: str
    """``"module:Class"`` that runs the model."""

    @property
    def is_complete(self) -> bool:
        """Whether somebody serves everything."""
        return all(each.decision.winner for each in self.choices) and all(
            group.manager for group in self.kv_groups
        )


def explain(args: EngineArgs, plugins: PluginSet) -> Explanation:
    """Raises what `resolve` and building the model raise, but not for parts that nobody can serve: those are told."""
    resolution = resolve_in_full(args, plugins, progress=False, needs_weights=False)
    config, device = resolution.config, resolution.device
    dtype = getattr(torch, config.model.dtype)
    ops = plugins.op_decisions(device, dtype)
    recorder = _Recorder(plugins, config, device, dtype)
    context = BuildContext(
        config=config,
        ops=make_op_table(ops),
        comm=_FirstOf(config.parallel.world_size),
        device=torch.device("meta"),
        dtype=dtype,
        choose_linear=recorder.choose_linear,
        choose_attention=recorder.choose_attention,
        quantization=make_format(config, plugins.quant_formats()),
        choose_quantized=recorder.choose_quantized,
        choose_experts=recorder.choose_experts,
    )
    model = build_model(context, plugins.models())
    slots = [slot for layer in walk_layers(model) for slot in layer.weight_slots() if slot.is_required]
    with torch.inference_mode():
        model.load_weights((slot.name, _stand_in(slot)) for slot in slots)
    by_op = [Choice("op", (each.subject.removeprefix("op "),), config.model.dtype, each) for each in ops]
    specs = {layer.name: layer.spec for layer in model.kv_layers()}
    groups = group_layers(specs, config.model.max_model_len, config.scheduler.max_num_batched_tokens)
    return Explanation(
        device=device,
        config=config,
        settings=resolution.settings,
        choices=[*by_op, *recorder.choices()],
        kv_groups=[_explain_group(group, plugins) for group in groups],
        implementation=find_target(config.model.architecture, plugins.models()),
    )


def _stand_in(slot: WeightSlot) -> torch.Tensor:
    shape = [1 if size is None else size for size in slot.shape]
    return torch.empty(shape, dtype=slot.dtypes[0], device="meta")


class _Recorder:
    """Answers a model's questions with stand-ins and keeps the decisions, alike ones together."""

    def __init__(
        self, plugins: PluginSet, config: EngineConfig, device: DeviceDescriptor, dtype: torch.dtype
    ) -> None:
        self._plugins = plugins
        self._name = config.device.attention_backend
        self._dequantizes = config.model.quantization == DEQUANTIZE
        self._device = device
        self._dtype = dtype
        self._found: dict[tuple[Any, ...], tuple[list[str], Decision]] = {}

    def choose_attention(self, layer: AttentionLayer) -> AttentionBackend:
        kv_dtype = stored_type(layer.spec, self._dtype)
        query = AttentionQuery(layer=layer, dtype=self._dtype, kv_dtype=kv_dtype, device=self._device)
        decision = self._plugins.attention_decision(query, self._name)
        extras = [f"soft cap {layer.soft_cap:g}"] if layer.soft_cap is not None else []
        extras += ["sinks"] if layer.has_sinks else []
        extras += [_prompts_over_latents(layer, decision)] if layer.latent_heads is not None else []
        heads = f"{layer.num_heads} query and {layer.num_kv_heads} KV heads of {layer.head_dim}"
        detail = ", ".join([heads, str(layer.spec), *extras])
        self._note("attention", layer.name, detail, decision)
        winner = decision.winner
        return winner.implementation() if winner is not None else ReferenceAttention()

    def choose_linear(self, shape: LinearShape) -> type[LinearKernel]:
        bias = ", with bias" if shape.has_bias else ""
        dtype = str(shape.dtype).removeprefix("torch.")
        detail = f"{shape.in_features} → {shape.out_features}, {dtype}{bias}"
        self._note("linear", shape.name, detail, self._plugins.linear_decision(shape, self._device))
        return _NeverCalled

    def choose_quantized(self, shape: LinearShape) -> type[QuantizedLinearKernel] | None:
        bias = ", with bias" if shape.has_bias else ""
        detail = f"{shape.in_features} → {shape.out_features}, {shape.scheme}{bias}"
        decision = self._plugins.quantized_decision(shape, self._device, dequantizes=self._dequantizes)
        self._note("quantized", shape.name, detail, decision)
        winner = decision.winner
        return None if winner is None or winner.implementation is None else _NeverUnpacked

    def choose_experts(self, shape: ExpertsShape) -> type[QuantizedExpertsKernel] | None:
        sizes = f"{shape.num_experts} experts of {shape.hidden_size} × {shape.intermediate_size}"
        schemes = str(shape.gate_up) if shape.gate_up == shape.down else f"{shape.gate_up}; {shape.down}"
        bias = ", with bias" if shape.has_bias else ""
        decision = self._plugins.experts_decision(shape, self._device, dequantizes=self._dequantizes)
        self._note("experts", shape.name, f"{sizes}, {schemes}{bias}", decision)
        winner = decision.winner
        return None if winner is None or winner.implementation is None else _NeverRouted

    def _note(self, kind: str, name: str, detail: str, decision: Decision) -> None:
        key = (kind, detail, decision.candidates)
        self._found.setdefault(key, ([], decision))[0].append(name)

    def choices(self) -> list[Choice]:
        found = self._found.items()
        return [
            Choice(kind, tuple(names), detail, decision) for (kind, detail, _), (names, decision) in found
        ]


def _prompts_over_latents(layer: AttentionLayer, decision: Decision) -> str:
    winner = decision.winner
    if winner is None or not winner.implementation.keeps_latent_rows:
        return "prompts absorbed, because the backend keeps no rows of latents"
    assert layer.latent_heads is not None and isinstance(layer.spec, MLAAttentionSpec)
    sizes = layer.latent_heads
    return (
        f"long prompts as heads of {sizes.nope_dim + layer.spec.rope_dim} and values of {sizes.value_dim} "
        "by the op causal_attention"
    )


class _Explained(RowProduct):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("this model was built to be explained, not to run")

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        return self(index)


_EXPLAINED = _Explained()


class _NeverUnpacked(QuantizedLinearKernel):
    """As `_NeverCalled`, of a quantized weight."""

    name = "explained"

    @classmethod
    def unsupported_reason(cls, shape: LinearShape, device: DeviceDescriptor) -> str | None:
        return None

    @classmethod
    def prepare(cls, weight: QuantizedWeight, bias: torch.Tensor | None) -> Multiply:
        return _EXPLAINED


class _NeverRouted(QuantizedExpertsKernel):
    """As `_NeverCalled`, of a layer's quantized experts."""

    name = "explained"

    @classmethod
    def unsupported_reason(cls, shape: ExpertsShape, device: DeviceDescriptor) -> str | None:
        return None

    @classmethod
    def prepare(
        cls,
        shape: ExpertsShape,
        gate_up: QuantizedWeight,
        down: QuantizedWeight,
        gate_up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
    ) -> MultiplyExperts:
        return lambda x, topk_weights, topk_ids: _EXPLAINED(x)


class _NeverCalled(LinearKernel):
    """In place of whichever kernel won: the weights on the meta device have nothing to pack."""

    name = "explained"

    @classmethod
    def unsupported_reason(cls, shape: LinearShape, device: DeviceDescriptor) -> str | None:
        return None

    @classmethod
    def prepare(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> Multiply:
        return _EXPLAINED


class _FirstOf(SoloCommunicator):
    """Rank 0 of a group that is not there: it tells layers what share of a weight they keep."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size


def _explain_group(group: KVCacheGroup, plugins: PluginSet) -> GroupOfKV:
    try:
        manager, reason = manager_class_for(group.spec, plugins.kv_cache_specs()).__name__, None
    except LookupError as error:
        manager, reason = None, str(error)
    return GroupOfKV(group.layer_names, group.spec, group.pool, manager, reason)
