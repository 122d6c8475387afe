"""Rounding a model's matrices with error feedback, by what each of them is multiplied with on a text.

The text runs through the model once, in one batch. Each product rounds its matrix when it is called, by the inputs that
it gets then, and answers with the rounded one; so later layers learn to live with what earlier ones lost, and no more
than one matrix of moments exists at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources

import torch

from inferplane.api.attention import AttentionInputs, AttentionLayer
from inferplane.api.linear import LinearKernel, LinearShape, Multiply
from inferplane.api.model import BuildContext, ForwardBatch, Model
from inferplane.api.quantized_weight import QuantizedWeight, QuantScheme
from inferplane.api.state import StateLayer, allocate_states, state_rounds
from inferplane.layers import walk_layers
from inferplane.layers.linear import Linear
from inferplane.layers.parallel import Rows
from inferplane.quantization.error_feedback import round_with_feedback
from inferplane.reference.attention import ReferenceAttention

SEQUENCE_TOKENS = 512


def default_text() -> str:
    """Some paragraphs in the public domain, code and questions with their answers."""
    return resources.files("inferplane.quantization").joinpath("calibration.txt").read_text(encoding="utf-8")


class Calibration:
    """Builds a model through `context`, is filled by `run`, and then has the rounded matrices by name."""

    def __init__(self, scheme: QuantScheme, names: Mapping[str, tuple[int, int]]) -> None:
        self.rounded: dict[str, QuantizedWeight] = {}
        self._scheme = scheme
        self._names = names
        self._linears: dict[str, Linear] = {}

    def context(self, plain: BuildContext) -> BuildContext:
        return replace(plain, choose_linear=self._choose, choose_attention=lambda layer: ReferenceAttention())

    @torch.inference_mode()
    def run(self, model: Model, token_ids: Sequence[int], block_size: int) -> None:
        """``model`` is of `context`, with its weights."""
        self._linears = {layer.name: layer for layer in walk_layers(model) if isinstance(layer, Linear)}
        model(text_batch(model, token_ids, block_size))

    def _choose(self, shape: LinearShape) -> type[LinearKernel]:
        calibration = self

        class Calibrated(LinearKernel):
            name = "calibrated"

            @classmethod
            def unsupported_reason(cls, shape: LinearShape, device: object) -> str | None:
                return None

            @classmethod
            def prepare(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> Multiply:
                return lambda x: calibration._multiply(shape, x, weight, bias)

        return Calibrated

    def _multiply(
        self, shape: LinearShape, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        parts = shape.name.split("+")
        if all(part in self._names for part in parts) and shape.name in self._linears:
            inputs = x.flatten(0, -2).float()
            rounded = round_with_feedback(weight, self._scheme, inputs.T @ inputs)
            weight = rounded.dequantize(x.dtype)
            self._keep(shape.name, rounded)
        return torch.nn.functional.linear(x, weight, bias)

    def _keep(self, name: str, rounded: QuantizedWeight) -> None:
        """Each of a product's matrices, with its rows in the checkpoint's order."""
        start = 0
        for part, share in self._linears[name].outputs.items():
            rows = torch.arange(start, start + share.size)
            start += share.size
            if isinstance(share, Rows):
                rows = rows[share.span.argsort()]
            self.rounded[part] = rounded.rows(rows)


def text_batch(model: Model, token_ids: Sequence[int], block_size: int) -> ForwardBatch:
    """Sequences of equal length, each in blocks of its own."""
    length = min(SEQUENCE_TOKENS, len(token_ids))
    num_reqs = len(token_ids) // length
    num_blocks = -(-length // block_size)
    table = torch.arange(num_reqs * num_blocks, dtype=torch.int32).view(num_reqs, num_blocks)
    positions = torch.arange(length)
    slots = table.long().repeat_interleave(block_size, 1)[:, :length] * block_size + positions % block_size
    inputs = AttentionInputs(
        num_reqs=num_reqs,
        num_tokens=num_reqs * length,
        query_lens_host=[length] * num_reqs,
        seq_lens_host=[length] * num_reqs,
        query_start=torch.arange(num_reqs + 1, dtype=torch.int32) * length,
        seq_lens=torch.full((num_reqs,), length, dtype=torch.int32),
        block_table=table,
        slot_mapping=slots.flatten(),
        block_size=block_size,
    )
    layers = model.kv_layers()
    rounds = state_rounds(inputs) if model.state_layers() else ()
    return ForwardBatch(
        token_ids=torch.tensor(token_ids[: inputs.num_tokens]),
        positions=positions.repeat(num_reqs),
        logits_rows=torch.tensor([0]),
        kv={layer.name: _allocate(layer, table.numel()) for layer in layers},
        metadata={layer.name: rounds if isinstance(layer, StateLayer) else inputs for layer in layers},
    )


def _allocate(layer: AttentionLayer | StateLayer, num_blocks: int) -> torch.Tensor:
    device = torch.device("cpu")
    if isinstance(layer, StateLayer):
        return allocate_states(layer.spec, num_blocks, device)
    dtype = getattr(torch, layer.spec.dtype)  # type: ignore[attr-defined]
    return ReferenceAttention.allocate_kv(layer, num_blocks, dtype, device)
