"""Mixtures over ranks: each rank has a part of every expert, or some experts whole, and the sum is the same."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import pytest
import torch

from inferplane.api.comm import Communicator
from inferplane.api.device import DeviceDescriptor
from inferplane.api.ops import fused_experts
from inferplane.api.quant import (
    Granularity,
    QuantFormat,
    QuantizedWeight,
    QuantScheme,
    StoredMatrix,
    StoredTensor,
)
from inferplane.api.quantized_experts import ExpertsShape, QuantizedExpertsKernel
from inferplane.layers import Experts, SeparateExperts, StackedExperts
from inferplane.layers.stored_experts import joined, owned, scheme_of_all
from inferplane.models.weights import load_weights
from inferplane.quantization.online import PlainMatrix
from inferplane.quantization.rounding import FP8_CHANNEL, INT4_GROUPS, INT8_CHANNEL, with_columns
from model_harness import make_context, run_ranks

NUM, HIDDEN, INNER = 6, 20, 12
CONFIG = {"architectures": ["X"], "vocab_size": 8}


def stacked_tensors(bias: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {"a.in": torch.randn(NUM, 2 * INNER, HIDDEN), "a.out": torch.randn(NUM, HIDDEN, INNER)}
    if bias:
        tensors |= {"a.in_bias": torch.randn(NUM, 2 * INNER), "a.out_bias": torch.randn(NUM, HIDDEN)}
    return tensors


@pytest.mark.parametrize("is_expert_parallel", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_add_up(is_expert_parallel: bool, bias: bool, num_ranks: int):
    x, ids = torch.randn(30, HIDDEN), torch.stack([torch.randperm(NUM)[:2] for _ in range(30)]).int()
    weights, tensors = torch.rand(30, 2), stacked_tensors(bias)

    def work(comm: Communicator) -> torch.Tensor:
        experts = Experts(
            make_context(CONFIG, comm=comm),
            StackedExperts("a.in", "a.out"),
            NUM,
            HIDDEN,
            INNER,
            bias=bias,
            is_expert_parallel=is_expert_parallel,
        )
        load_weights([experts], tensors.items())
        return experts(x, weights, ids)

    [alone] = run_ranks(1, work)
    for rank in run_ranks(num_ranks, work):
        torch.testing.assert_close(rank, alone, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("is_transposed", "is_interleaved"), [(False, False), (True, False), (True, True)])
def test_however_the_checkpoint_lays_them_out(is_transposed: bool, is_interleaved: bool):
    stacked = stacked_tensors(bias=False)
    gate, up = stacked["a.in"].chunk(2, dim=1)
    separate = {f"b.{i}.g.weight": gate[i] for i in range(NUM)}
    separate |= {f"b.{i}.u.weight": up[i] for i in range(NUM)}
    separate |= {f"b.{i}.d.weight": stacked["a.out"][i] for i in range(NUM)}
    if is_interleaved:
        stacked["a.in"] = torch.stack([gate, up], dim=2).flatten(1, 2)
    if is_transposed:
        stacked = {name: tensor.transpose(1, 2) for name, tensor in stacked.items()}
    x, ids, weights = torch.randn(9, HIDDEN), torch.randint(NUM, (9, 1)).int(), torch.rand(9, 1)
    answers = []
    for tensors, held in (
        (StackedExperts("a.in", "a.out", is_transposed, is_interleaved), stacked),
        (SeparateExperts("b", "g", "u", "d"), separate),
    ):
        experts = Experts(make_context(CONFIG), tensors, NUM, HIDDEN, INNER)
        load_weights([experts], held.items())
        answers.append(experts(x, weights, ids))
    assert torch.equal(*answers)


class ToyFormat(QuantFormat):
    """Rounds while it loads, to one scheme; experts in one tensor as they come."""

    def __init__(self, config: dict[str, object], scheme: QuantScheme = FP8_CHANNEL) -> None:
        self.scheme = scheme

    def matrix(self, name: str, out_features: int, in_features: int) -> StoredMatrix | None:
        return PlainMatrix(name, out_features, in_features, self.scheme)

    def stacked(self, name: str, num: int, out_features: int, in_features: int) -> StoredMatrix | None:
        return StackedMatrix(name, num, out_features, in_features, self.scheme)


class StackedMatrix(PlainMatrix):
    """``{name}_all: [num, out, in]``."""

    def __init__(self, name: str, num: int, rows: int, columns: int, scheme: QuantScheme) -> None:
        super().__init__(name, num * rows, columns, scheme)
        self._stacked_shape = (num, rows, columns)

    def tensors(self) -> list[StoredTensor]:
        return [StoredTensor("_all", self._stacked_shape, (torch.float32,))]

    def read(self, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        return super().read({"weight": tensors["_all"].flatten(0, 1)})


class ToyExperts(QuantizedExpertsKernel):
    """Multiplies by the op's reference, and notes what it was asked about."""

    name = "toy"
    shapes: ClassVar[list[ExpertsShape]] = []

    @classmethod
    def unsupported_reason(cls, shape: ExpertsShape, device: DeviceDescriptor) -> str | None:
        return None

    @classmethod
    def prepare(cls, shape, gate_up, down, gate_up_bias, down_bias):  # type: ignore[no-untyped-def]
        cls.shapes.append(shape)
        assert (gate_up.scheme, down.scheme) == (shape.gate_up, shape.down)
        w13 = gate_up.dequantize(shape.dtype).unflatten(0, (shape.num_experts, 2 * shape.intermediate_size))
        w2 = down.dequantize(shape.dtype).unflatten(0, (shape.num_experts, shape.hidden_size))
        return partial(
            _fused, w13=w13, w2=w2, w13_bias=gate_up_bias, w2_bias=down_bias, activation=shape.activation,
            first_expert=shape.first_expert, swiglu_alpha=shape.swiglu_alpha, swiglu_limit=shape.swiglu_limit,
        )  # fmt: skip


def _fused(x, topk_weights, topk_ids, *, w13, w2, **options):  # type: ignore[no-untyped-def]
    return fused_experts(x, topk_weights, topk_ids, w13, w2, **options)


Held = tuple[SeparateExperts | StackedExperts, dict[str, torch.Tensor]]


def held_by(layout: str) -> Held:
    """A checkpoint that has its experts apart, in one tensor, or in one with gate and up by turns."""
    stacked = stacked_tensors(bias=True)
    if layout == "separate":
        gate, up = stacked["a.in"].chunk(2, dim=1)
        parts = {"g": gate, "u": up, "d": stacked["a.out"]}
        held = {f"b.{i}.{name}.weight": parts[name][i] for name in parts for i in range(NUM)}
        return SeparateExperts("b", "g", "u", "d"), held
    names = {"a.in": "a.in_all", "a.out": "a.out_all"}
    held = {names.get(name, name): tensor for name, tensor in stacked.items()}
    return StackedExperts("a.in", "a.out", is_interleaved=layout == "interleaved"), held


def quantized_experts(
    held: Held,
    scheme: QuantScheme,
    comm: Communicator,
    chosen: dict[str, Any],
    *,
    is_expert_parallel: bool = False,
) -> Experts:
    context = make_context(CONFIG, comm=comm, quantization=ToyFormat({}, scheme), **chosen)
    bias = isinstance(held[0], StackedExperts)
    experts = Experts(context, held[0], NUM, HIDDEN, INNER, bias=bias, is_expert_parallel=is_expert_parallel)
    load_weights([experts], held[1].items())
    return experts


SCHEMES = {
    "fp8": FP8_CHANNEL,
    "int4": with_columns(INT4_GROUPS, 4),
    "int8": INT8_CHANNEL,
}


@pytest.mark.parametrize("layout", ["separate", "stacked", "interleaved"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("num_ranks", "is_expert_parallel"), [(1, False), (3, False), (3, True)])
def test_quantized_experts_go_to_their_kernel(
    layout: str, scheme: str, num_ranks: int, is_expert_parallel: bool
):
    """The same numbers as where they are dequantized, whatever the layout and this rank's part."""
    x, ids = torch.randn(30, HIDDEN), torch.stack([torch.randperm(NUM)[:2] for _ in range(30)]).int()
    weights, held = torch.rand(30, 2), held_by(layout)

    def work(chosen: dict[str, Any], comm: Communicator) -> torch.Tensor:
        experts = quantized_experts(
            held, SCHEMES[scheme], comm, chosen, is_expert_parallel=is_expert_parallel
        )
        return experts(x, weights, ids)

    ToyExperts.shapes.clear()
    [plain] = run_ranks(1, partial(work, {}))
    assert not ToyExperts.shapes
    for packed in run_ranks(num_ranks, partial(work, {"choose_experts": lambda shape: ToyExperts})):
        torch.testing.assert_close(packed, plain, rtol=1e-5, atol=1e-4)
    assert len(ToyExperts.shapes) == num_ranks
    shape = ToyExperts.shapes[0]
    assert shape.num_experts * shape.intermediate_size == NUM * INNER // num_ranks
    assert shape.gate_up == SCHEMES[scheme]


def test_experts_of_which_a_rank_would_cut_a_group_are_dequantized():
    """12 columns over 2 ranks, in groups of 4."""
    ToyExperts.shapes.clear()
    chosen = {"choose_experts": lambda shape: ToyExperts}
    x, ids, weights = torch.randn(3, HIDDEN), torch.randint(NUM, (3, 1)).int(), torch.rand(3, 1)
    held = held_by("separate")

    def work(comm: Communicator) -> torch.Tensor:
        return quantized_experts(held, SCHEMES["int4"], comm, chosen)(x, weights, ids)

    [alone] = run_ranks(1, work)
    assert len(ToyExperts.shapes) == 1
    for rank in run_ranks(2, work):
        torch.testing.assert_close(rank, alone, rtol=1e-5, atol=1e-4)
    assert len(ToyExperts.shapes) == 1


def drawn_weight(granularity: Granularity, out_features: int, **changes: Any) -> QuantizedWeight:
    scheme = replace(FP8_CHANNEL, granularity=granularity, **changes)
    codes = torch.randn(out_features, 8).to(torch.float8_e4m3fn)
    return QuantizedWeight(
        scheme, out_features, 8, codes, torch.rand(granularity.scale_shape(out_features, 8))
    )


@pytest.mark.parametrize(
    ("granularity", "want"),
    [
        (Granularity(None, None), Granularity(1, None)),
        (Granularity(4, 4), Granularity(4, 4)),
        (Granularity(8, 4), Granularity(1, 4)),
        (Granularity(1, 4), Granularity(1, 4)),
    ],
    ids=str,
)
def test_blocks_end_with_their_matrix(granularity: Granularity, want: Granularity):
    weights = [drawn_weight(granularity, 12) for _ in range(3)]
    scheme = scheme_of_all(weights[0].scheme, 12)
    assert scheme is not None and scheme.granularity == want
    one = joined(weights, scheme, "w")
    assert one.scheme == scheme
    assert torch.equal(
        one.dequantize(torch.float32), torch.cat([w.dequantize(torch.float32) for w in weights])
    )


def test_what_is_no_one_product():
    assert scheme_of_all(drawn_weight(Granularity(1, None), 4, has_column_order=True).scheme, 4) is None


def test_a_part_does_not_keep_the_whole():
    whole = drawn_weight(Granularity(1, 4), 12)
    part = owned(whole.rows(slice(4, 8)))
    assert (
        part.codes.untyped_storage().nbytes() == 4 * 8 and part.scale.untyped_storage().nbytes() == 4 * 2 * 4
    )
    assert torch.equal(part.dequantize(torch.float32), whole.dequantize(torch.float32)[4:8])
    assert owned(whole).codes is whole.codes


class WatchedFormat(ToyFormat):
    """Experts apart, of which the last has a scheme of its own; knows how many whole matrices there are at a time."""

    def __init__(self, last: QuantScheme) -> None:
        super().__init__({})
        self._last = last
        self.alive: list[weakref.ref[torch.Tensor]] = []
        self.most = 0

    def matrix(self, name: str, out_features: int, in_features: int) -> StoredMatrix | None:
        scheme = self._last if f".{NUM - 1}." in name else self.scheme
        matrix = PlainMatrix(name, out_features, in_features, scheme)
        read = matrix.read

        def watched(tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
            weight = read(tensors)
            self.alive = [each for each in (*self.alive, weakref.ref(weight.codes)) if each() is not None]
            self.most = max(self.most, len(self.alive))
            return weight

        matrix.read = watched  # type: ignore[method-assign]
        return matrix


@pytest.mark.parametrize("last", [FP8_CHANNEL, INT8_CHANNEL], ids=str)
@pytest.mark.parametrize("has_kernel", [False, True])
def test_whole_matrices_are_read_one_after_another(last: QuantScheme, has_kernel: bool):
    """The first of both kinds are read to choose a kernel, and one more at a time."""
    x, ids, weights = torch.randn(9, HIDDEN), torch.randint(NUM, (9, 1)).int(), torch.rand(9, 1)
    tensors, held = held_by("separate")
    watched = WatchedFormat(last)
    ToyExperts.shapes.clear()

    def work(form: QuantFormat, chosen: dict[str, Any], comm: Communicator) -> torch.Tensor:
        experts = Experts(
            make_context(CONFIG, comm=comm, quantization=form, **chosen), tensors, NUM, HIDDEN, INNER
        )
        load_weights([experts], held.items())
        return experts(x, weights, ids)

    chosen = {"choose_experts": lambda shape: ToyExperts} if has_kernel else {}
    [plain] = run_ranks(1, partial(work, WatchedFormat(last), {}))
    torch.testing.assert_close(run_ranks(2, partial(work, watched, chosen))[0], plain, rtol=1e-5, atol=1e-4)
    assert len(ToyExperts.shapes) == (2 if has_kernel and last == FP8_CHANNEL else 0)
    assert watched.most <= 2 * 3
