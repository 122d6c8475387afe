"""Resolving what runs on a device: ops, linear kernels, attention backends. Imports torch.

``offers`` throughout is what `PluginSet.collect` returns: (plugin name, what its hook returned).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from inferplane.api.attention import AttentionBackend, AttentionQuery
from inferplane.api.device import DeviceDescriptor
from inferplane.api.kv import QUANTIZED_KV
from inferplane.api.linear import LinearKernel, LinearShape
from inferplane.api.ops import OPS, OpImpl, OpQuery, OpTable
from inferplane.api.quant import QuantizedLinearKernel
from inferplane.api.quantized_experts import ExpertsShape, QuantizedExpertsKernel
from inferplane.plugins.decision import Candidate, Decision, ask, decide
from inferplane.plugins.record import PluginError

Offers = Sequence[tuple[str, Sequence[Any]]]

REFERENCE_PRIORITY = -1000
"""Below any priority that a provider would give itself."""


def decide_ops(offers: Offers, device: DeviceDescriptor, dtype: torch.dtype) -> list[Decision]:
    """One decision for each declared op. Raises `PluginError` for an implementation of an op that is not declared."""
    query = OpQuery(device, dtype)
    candidates: dict[str, list[Candidate]] = {
        name: [Candidate("reference", "reference", REFERENCE_PRIORITY, None, op.reference)]
        for name, op in OPS.items()
    }
    for plugin, implementations in offers:
        for impl in implementations:
            if not isinstance(impl, OpImpl) or impl.op not in OPS:
                raise PluginError(f"plugin {plugin!r} implements {impl!r}; declared ops are {', '.join(OPS)}")
            reason = ask(impl.unsupported_reason, query)
            candidates[impl.op].append(Candidate(impl.provider, plugin, impl.priority, reason, impl.fn))
    return [decide(f"op {name}", found, device.platform) for name, found in candidates.items()]


def make_op_table(decisions: Sequence[Decision]) -> OpTable:
    return OpTable({each.subject.removeprefix("op "): each.chosen.implementation for each in decisions})


def decide_linear(offers: Offers, shape: LinearShape, device: DeviceDescriptor) -> Decision:
    candidates = [
        Candidate(kernel.name, plugin, kernel.priority, ask(kernel.unsupported_reason, shape, device), kernel)
        for plugin, kernel in _classes(offers, LinearKernel)
    ]
    dtype = str(shape.dtype).removeprefix("torch.")
    subject = f"linear layer {shape.name} ({shape.in_features} → {shape.out_features}, {dtype})"
    return decide(subject, candidates, device.platform)


_PLAIN_IS_ASKED = "--quantization dequantize asks for plain weights"
_DEQUANTIZE = Candidate("dequantize", "reference", REFERENCE_PRIORITY, None, None)


def decide_quantized(
    offers: Offers, shape: LinearShape, device: DeviceDescriptor, *, dequantizes: bool = False
) -> Decision:
    """The last candidate, with no kernel, is to dequantize the weight while it is loaded; with ``dequantizes``, which
    is what the user asked for, the only one that may serve."""

    def reason(kernel: type[QuantizedLinearKernel]) -> str | None:
        if dequantizes:
            return _PLAIN_IS_ASKED
        if shape.needs_rows and not kernel.gives_rows:
            return "gives out no rows of its weight, which an embedding needs"
        return ask(kernel.unsupported_reason, shape, device)

    candidates = [
        Candidate(kernel.name, plugin, kernel.priority, reason(kernel), kernel)
        for plugin, kernel in _classes(offers, QuantizedLinearKernel)
    ]
    subject = f"linear layer {shape.name} ({shape.in_features} → {shape.out_features}, {shape.scheme})"
    return decide(subject, [*candidates, _DEQUANTIZE], device.platform)


def decide_experts(
    offers: Offers, shape: ExpertsShape, device: DeviceDescriptor, *, dequantizes: bool = False
) -> Decision:
    """As `decide_quantized`, of the quantized experts of a layer."""

    def reason(kernel: type[QuantizedExpertsKernel]) -> str | None:
        return _PLAIN_IS_ASKED if dequantizes else ask(kernel.unsupported_reason, shape, device)

    candidates = [
        Candidate(kernel.name, plugin, kernel.priority, reason(kernel), kernel)
        for plugin, kernel in _classes(offers, QuantizedExpertsKernel)
    ]
    sizes = f"{shape.num_experts} of {shape.hidden_size} × {shape.intermediate_size}"
    subject = f"experts {shape.name} ({sizes}, {shape.gate_up}; {shape.down})"
    return decide(subject, [*candidates, _DEQUANTIZE], device.platform)


def decide_attention(offers: Offers, query: AttentionQuery, name: str | None) -> Decision:
    """With ``name`` only the backend of that name is considered. Raises `PluginError` when there is none."""
    backends = _classes(offers, AttentionBackend)
    known = ", ".join(sorted(backend.name for _, backend in backends))
    if name is not None:
        backends = [(plugin, backend) for plugin, backend in backends if backend.name == name]
        if not backends:
            raise PluginError(
                f"attention backend {name!r} (--attention-backend) is not installed for platform "
                f"{query.device.platform!r}; there are: {known}"
            )
    candidates = [
        Candidate(backend.name, plugin, backend.priority, _attention_reason(backend, query), backend)
        for plugin, backend in backends
    ]
    dtype = str(query.dtype).removeprefix("torch.")
    return decide(f"attention layer {query.layer.name} ({dtype})", candidates, query.device.platform)


def _attention_reason(backend: type[AttentionBackend], query: AttentionQuery) -> str | None:
    kv_dtype = getattr(query.layer.spec, "dtype", None)
    if kv_dtype in QUANTIZED_KV and kv_dtype not in backend.quantized_kv:
        return f"stores keys and values as they are, not as {kv_dtype}"
    return ask(backend.unsupported_reason, query)


def _classes(offers: Offers, base: type) -> list[tuple[str, Any]]:
    found = [(plugin, each) for plugin, classes in offers for each in classes]
    for plugin, each in found:
        if not (isinstance(each, type) and issubclass(each, base)):
            raise PluginError(f"plugin {plugin!r} offers {each!r}, which is no subclass of {base.__name__}")
    return found
