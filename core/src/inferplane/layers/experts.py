"""The experts of a mixture: stacked weights, and the checkpoint tensors that they are filled from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from inferplane.api.model import BuildContext
from inferplane.api.quantized_experts import ExpertsShape, MultiplyExperts
from inferplane.api.quantized_weight import QuantizedWeight, QuantScheme
from inferplane.layers.layer import Layer, WeightSlot
from inferplane.layers.parallel import even_share, whole
from inferplane.layers.stored import KeptMatrix, stored_experts, stored_matrix
from inferplane.layers.stored_experts import StoredPart, cuts_a_group, joined, owned, scheme_of_all


@dataclass(frozen=True)
class SeparateExperts:
    """Three matrices for each expert: ``{prefix}.{expert}.{gate}.weight`` and so on."""

    prefix: str
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True)
class StackedExperts:
    """Two tensors for all experts, ``[num_experts, out, in]`` with the gate's rows first.

    Biases, where there are, are called like the tensors with ``_bias`` behind.
    """

    gate_up: str
    down: str
    is_transposed: bool = False
    """Matrices are ``[in, out]``."""
    is_interleaved: bool = False
    """Outputs of gate and up come in turns."""


class Experts(Layer):
    """Gated feed-forward networks of one shape, of which each token sees its own few.

    Over ranks every expert is split as a `GatedMLP` is or, with ``is_expert_parallel``, each rank has some experts
    whole; both ways the results of the ranks add up.
    """

    def __init__(
        self,
        ctx: BuildContext,
        tensors: SeparateExperts | StackedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str = "silu",
        bias: bool = False,
        is_expert_parallel: bool = False,
        swiglu_alpha: float = 1.702,
        swiglu_limit: float = 7.0,
    ) -> None:
        """``activation`` is one of `inferplane.api.ops.EXPERT_ACTIVATIONS`."""
        self._ctx = ctx
        self._tensors = tensors
        self._hidden_size = hidden_size
        what = tensors.prefix if isinstance(tensors, SeparateExperts) else tensors.down
        self._name = what
        if is_expert_parallel:
            self._experts = even_share(num_experts, ctx.comm, f"{what}: number of experts")
            self._inner = whole(intermediate_size)
        else:
            self._experts = whole(num_experts)
            self._inner = even_share(intermediate_size, ctx.comm, f"{what}: intermediate_size")
        self._has_bias = bias
        # one rank adds the bias of a split product, or the sum would have it once for each
        self._adds_down_bias = bias and (is_expert_parallel or ctx.comm.rank == 0)
        self._w13: torch.Tensor | None = None
        self._w2: torch.Tensor | None = None
        self._w13_bias = self._empty(2 * self._inner.size) if bias else None
        self._w2_bias = self._empty(hidden_size) if self._adds_down_bias else None
        self._stored: list[StoredPart] = []
        self._has_plain = False
        self._multiply: MultiplyExperts | None = None
        """By quantized weights; then there are no plain ones."""
        self._fused_experts = ctx.ops.fused_experts
        self._options: dict[str, Any] = {
            "activation": activation,
            "first_expert": self._experts.start,
            "swiglu_alpha": swiglu_alpha,
            "swiglu_limit": swiglu_limit,
        }
        self._all_reduce = ctx.comm.all_reduce

    def __call__(
        self, hidden: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        """``[num_tokens, hidden_size]`` to the same, with a router's choice."""
        return self._all_reduce(self.partial_sum(hidden, topk_weights, topk_ids))

    def partial_sum(
        self, hidden: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        """What this rank contributes."""
        if self._multiply is not None:
            return self._multiply(hidden, topk_weights, topk_ids)
        return self._fused_experts(
            hidden,
            topk_weights,
            topk_ids,
            self._w13,
            self._w2,
            w13_bias=self._w13_bias,
            w2_bias=self._w2_bias,
            **self._options,
        )

    def weight_slots(self) -> Sequence[WeightSlot]:
        self._stored, self._has_plain = [], False
        if isinstance(self._tensors, StackedExperts):
            return self._stacked_slots(self._tensors)
        return self._separate_slots(self._tensors)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(self._experts.size, *shape, dtype=self._ctx.dtype, device=self._ctx.device)

    def _separate_slots(self, tensors: SeparateExperts) -> list[WeightSlot]:
        inner, hidden = self._inner.total, self._hidden_size
        slots: list[WeightSlot] = []
        for expert in range(self._experts.total):
            for name, shape, copy in (
                (tensors.gate, (inner, hidden), self._copy_gate),
                (tensors.up, (inner, hidden), self._copy_up),
                (tensors.down, (hidden, inner), self._copy_down),
            ):
                name = f"{tensors.prefix}.{expert}.{name}"
                is_down = copy == self._copy_down
                slots += self._slots_of(name, shape, partial(self._copy_one, copy, expert), expert, is_down)
        return slots

    def _slots_of(
        self,
        name: str,
        shape: tuple[int, int],
        copy: Callable[[torch.Tensor], None],
        expert: int,
        is_down: bool,
    ) -> Sequence[WeightSlot]:
        matrix = stored_matrix(self._ctx, name, *shape)
        if matrix is None:
            self._has_plain = True
            return [WeightSlot(f"{name}.weight", shape, copy)]
        kept = KeptMatrix(self._ctx, matrix)
        if 0 <= expert - self._experts.start < self._experts.size:
            take = self._columns_of_down if is_down else self._rows_of_one
            self._stored.append(StoredPart(kept, is_down, take, copy))
        return kept.slots()

    def finish_loading(self) -> None:
        """Hands quantized weights to the best kernel or, where there is none, dequantizes them. One after another, for
        a layer's whole matrices together may be many times this rank's part of them."""
        parts, self._stored = self._stored, []
        if not parts:
            return
        read = _Reader()
        self._multiply = None if self._has_plain else self._quantized(parts, read)
        if self._multiply is None:
            for part in parts:
                part.copy(read(part).dequantize(self._ctx.dtype))

    def _quantized(self, parts: Sequence[StoredPart], read: _Reader) -> MultiplyExperts | None:
        """None where they are not one product each, or nobody multiplies them."""
        products = [[part for part in parts if part.is_down == is_down] for is_down in (False, True)]
        stored = [read.scheme(product[0]) for product in products]
        gate_up = scheme_of_all(stored[0], self._inner.size)
        down = scheme_of_all(stored[1], self._hidden_size)
        if gate_up is None or down is None or cuts_a_group(down, self._inner):
            return None
        shape = ExpertsShape(
            name=self._name,
            num_experts=self._experts.size,
            hidden_size=self._hidden_size,
            intermediate_size=self._inner.size,
            dtype=self._ctx.dtype,
            has_bias=self._has_bias,
            gate_up=gate_up,
            down=down,
            **self._options,
        )
        kernel = self._ctx.choose_experts(shape)
        if kernel is None:
            return None
        w13 = self._joined(products[0], stored[0], gate_up, read)
        w2 = self._joined(products[1], stored[1], down, read)
        if w13 is None or w2 is None:
            return None
        return kernel.prepare(shape, w13, w2, self._w13_bias, self._w2_bias)

    def _joined(
        self, parts: Sequence[StoredPart], of_each: QuantScheme, of_all: QuantScheme, read: _Reader
    ) -> QuantizedWeight | None:
        """This rank's part of all, one below another; None where a scheme is another than ``of_each``."""
        taken = []
        for part in parts:
            weight = read(part)
            if weight.scheme != of_each:
                return None
            taken.append(owned(part.take(weight)))
        return joined(taken, of_all, self._name)

    def _rows_of_one(self, weight: QuantizedWeight) -> QuantizedWeight:
        return weight.rows(self._inner.span)

    def _columns_of_down(self, weight: QuantizedWeight) -> QuantizedWeight:
        return weight.columns(self._inner.start, self._inner.start + self._inner.size)

    def _rows_of_stacked(self, weight: QuantizedWeight) -> QuantizedWeight:
        """Gate and up of each of this rank's experts."""
        assert isinstance(self._tensors, StackedExperts)
        experts, inner = self._experts, self._inner
        if inner.size == inner.total and not self._tensors.is_interleaved:
            return weight.rows(experts.scaled(2 * inner.total).span)
        rows = torch.arange(2 * inner.total)
        halves = (rows[::2], rows[1::2]) if self._tensors.is_interleaved else rows.chunk(2)
        of_one = torch.cat([half[inner.span] for half in halves])
        starts = torch.arange(experts.total)[experts.span] * 2 * inner.total
        return weight.rows((starts.unsqueeze(1) + of_one).flatten())

    def _columns_of_stacked_down(self, weight: QuantizedWeight) -> QuantizedWeight:
        return self._columns_of_down(weight.rows(self._experts.scaled(self._hidden_size).span))

    def _copy_one(
        self, copy: Callable[[torch.Tensor, slice], None], expert: int, tensor: torch.Tensor
    ) -> None:
        index = expert - self._experts.start
        if 0 <= index < self._experts.size:
            copy(tensor.unsqueeze(0), slice(index, index + 1))

    def _stacked_slots(self, tensors: StackedExperts) -> list[WeightSlot]:
        num, inner, hidden = self._experts.total, self._inner.total, self._hidden_size

        def matrix(num_rows: int, num_columns: int) -> tuple[int, ...]:
            return (num, num_columns, num_rows) if tensors.is_transposed else (num, num_rows, num_columns)

        slots: list[WeightSlot] = []
        for name, (rows, columns), copy, take in (
            (tensors.gate_up, (2 * inner, hidden), self._copy_stacked_gate_up, self._rows_of_stacked),
            (tensors.down, (hidden, inner), self._copy_stacked_down, self._columns_of_stacked_down),
        ):
            stored = stored_experts(self._ctx, name, num, rows, columns)
            if stored is None:
                self._has_plain = True
                slots.append(WeightSlot(name, matrix(rows, columns), partial(self._copy_upright, copy)))
                continue
            # formats have experts upright, whatever the plain checkpoint does, one below another
            kept = KeptMatrix(self._ctx, stored, separator="")
            unstack = partial(self._copy_unstacked, copy, num)
            self._stored.append(StoredPart(kept, name == tensors.down, take, unstack))
            slots += kept.slots()
        if self._has_bias:
            slots += [
                WeightSlot(f"{tensors.gate_up}_bias", (num, 2 * inner), self._copy_gate_up_bias),
                WeightSlot(f"{tensors.down}_bias", (num, hidden), self._copy_down_bias),
            ]
        return slots

    def _copy_upright(self, copy: Callable[[torch.Tensor], None], tensor: torch.Tensor) -> None:
        assert isinstance(self._tensors, StackedExperts)
        copy(tensor.transpose(1, 2) if self._tensors.is_transposed else tensor)

    def _copy_unstacked(
        self, copy: Callable[[torch.Tensor], None], num_experts: int, tensor: torch.Tensor
    ) -> None:
        copy(tensor.unflatten(0, (num_experts, -1)))

    # ``tensor: [num_experts, out, in]`` of all experts

    def _copy_stacked_gate_up(self, tensor: torch.Tensor) -> None:
        gate, up = self._gate_and_up(tensor[self._experts.span])
        self._copy_gate(gate, slice(None))
        self._copy_up(up, slice(None))

    def _copy_stacked_down(self, tensor: torch.Tensor) -> None:
        self._copy_down(tensor[self._experts.span], slice(None))

    def _gate_and_up(self, stacked: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert isinstance(self._tensors, StackedExperts)
        if self._tensors.is_interleaved:
            return stacked[:, ::2], stacked[:, 1::2]
        gate, up = stacked.chunk(2, dim=1)
        return gate, up

    # ``tensor: [experts, out, in]`` of whole matrices, of which this rank's part goes to the experts ``index``

    def _copy_gate(self, tensor: torch.Tensor, index: slice) -> None:
        self._gate_up_weight()[index, : self._inner.size].copy_(tensor[:, self._inner.span])

    def _copy_up(self, tensor: torch.Tensor, index: slice) -> None:
        self._gate_up_weight()[index, self._inner.size :].copy_(tensor[:, self._inner.span])

    def _copy_down(self, tensor: torch.Tensor, index: slice) -> None:
        if self._w2 is None:
            self._w2 = self._empty(self._hidden_size, self._inner.size)
        self._w2[index].copy_(tensor[:, :, self._inner.span])

    def _gate_up_weight(self) -> torch.Tensor:
        if self._w13 is None:
            self._w13 = self._empty(2 * self._inner.size, self._hidden_size)
        return self._w13

    def _copy_gate_up_bias(self, tensor: torch.Tensor) -> None:
        assert self._w13_bias is not None
        gate, up = self._gate_and_up(tensor[self._experts.span])
        span = self._inner.span
        self._w13_bias.copy_(torch.cat([gate[:, span], up[:, span]], dim=1))

    def _copy_down_bias(self, tensor: torch.Tensor) -> None:
        if self._w2_bias is not None:
            self._w2_bias.copy_(tensor[self._experts.span])


class _Reader:
    """Reads each part when it is asked for; one whose scheme was asked for is held until then."""

    def __init__(self) -> None:
        self._held: dict[int, QuantizedWeight] = {}

    def scheme(self, part: StoredPart) -> QuantScheme:
        weight = self._held[id(part)] = part.kept.read()
        return weight.scheme

    def __call__(self, part: StoredPart) -> QuantizedWeight:
        held = self._held.pop(id(part), None)
        return part.kept.read() if held is None else held
