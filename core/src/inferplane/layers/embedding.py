"""The vocabulary at both ends of a model: token ids to vectors, and hidden states to logits.

Both split the vocabulary over the ranks in the same way, so that a tied head multiplies by the embedding's own rows.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from inferplane.api.linear import LinearShape, Multiply, RowProduct
from inferplane.api.model import BuildContext
from inferplane.api.quantized_weight import QuantizedWeight
from inferplane.layers.layer import Layer, WeightSlot
from inferplane.layers.parallel import padded_share
from inferplane.layers.stored import WeightFilling, stored_vocabulary

logger = logging.getLogger(__name__)


class _VocabWeight(Layer):
    """``[num_rows, size]``: this rank's rows of a ``[vocab_size, size]`` matrix, then zeros up to an equal share.

    Quantized rows stay so where a kernel takes them; over several ranks they are dequantized.
    """

    def __init__(
        self,
        ctx: BuildContext,
        prefix: str,
        vocab_size: int,
        size: int,
        *,
        needs_rows: bool,
        is_required: bool,
    ) -> None:
        self._ctx = ctx
        self._prefix = prefix
        self._name = f"{prefix}.weight"
        self._vocab_size = vocab_size
        self._size = size
        self._needs_rows = needs_rows
        self._is_required = is_required
        self._rows, self._num_rows = padded_share(vocab_size, ctx.comm)
        stored = stored_vocabulary(ctx, prefix, vocab_size, size)
        self._stored = None if stored is None else WeightFilling(ctx, stored, self._keep)
        self.weight: torch.Tensor | None = None
        self.product: Multiply | None = None
        """By the quantized weight; then there is no plain one."""

    def weight_slots(self) -> Sequence[WeightSlot]:
        if self._stored is not None:
            return self._stored.slots()
        return [WeightSlot(self._name, (self._vocab_size, self._size), self._copy, self._is_required)]

    @property
    def _shape(self) -> LinearShape:
        return LinearShape(self._prefix, self._size, self._num_rows, self._ctx.dtype, False)

    def _keep(self, weight: QuantizedWeight) -> None:
        kernel = None
        if self._ctx.comm.world_size == 1:
            shape = replace(self._shape, scheme=weight.scheme, needs_rows=self._needs_rows)
            kernel = self._ctx.choose_quantized(shape)
        if kernel is None:
            self._copy(weight.dequantize(self._ctx.dtype))
        else:
            self.product = kernel.prepare(weight, None)

    def _copy(self, tensor: torch.Tensor) -> None:
        ctx, rows = self._ctx, self._rows
        if self.weight is None:
            self.weight = torch.empty(self._num_rows, self._size, dtype=ctx.dtype, device=ctx.device)
        self.weight[: rows.size].copy_(tensor[rows.span])
        self.weight[rows.size :].zero_()


class VocabParallelEmbedding(_VocabWeight):
    """A vector for each token id."""

    def __init__(self, ctx: BuildContext, prefix: str, vocab_size: int, size: int) -> None:
        super().__init__(ctx, prefix, vocab_size, size, needs_rows=True, is_required=True)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """``[num_tokens] int64 -> [num_tokens, size]``"""
        if isinstance(self.product, RowProduct):
            return self.product.rows(token_ids)
        assert self.weight is not None, self._name
        if self._ctx.comm.world_size == 1:
            return torch.nn.functional.embedding(token_ids, self.weight)
        local = token_ids - self._rows.start
        is_foreign = (local < 0) | (local >= self._rows.size)
        vectors = torch.nn.functional.embedding(local.masked_fill_(is_foreign, 0), self.weight)
        vectors.masked_fill_(is_foreign.unsqueeze(-1), 0)
        return self._ctx.comm.all_reduce(vectors)


class ParallelLMHead(_VocabWeight):
    """Logits over the whole vocabulary, on every rank.

    With ``tied_to`` the embedding's matrix is the head's as well. A checkpoint may still have a tensor of the head's
    name: one that equals the embedding is dropped, and one that differs is used, with a warning, because such a
    model was trained untied whatever its configuration says.
    """

    def __init__(
        self,
        ctx: BuildContext,
        prefix: str,
        vocab_size: int,
        size: int,
        tied_to: VocabParallelEmbedding | None = None,
    ) -> None:
        super().__init__(ctx, prefix, vocab_size, size, needs_rows=False, is_required=tied_to is None)
        self._tied_to = tied_to
        self._multiply: Multiply | None = None

    def finish_loading(self) -> None:
        tied = self._tied_to
        if self.product is not None:
            self._multiply = self.product
        elif tied is not None and tied.product is not None and self.weight is None:
            self._multiply = tied.product
        else:
            self._multiply = self._ctx.choose_linear(self._shape).prepare(self._final_weight(), None)
            self.weight = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[n, size] -> [n, vocab_size]``"""
        assert self._multiply is not None, self._name
        logits = self._multiply(hidden)
        if self._ctx.comm.world_size == 1:
            return logits
        return self._ctx.comm.all_gather(logits, dim=-1)[:, : self._vocab_size]

    def _final_weight(self) -> torch.Tensor:
        if self._tied_to is None:
            assert self.weight is not None, self._name
            return self.weight
        tied = self._tied_to.weight
        if self.weight is None or (tied is not None and torch.equal(self.weight, tied)):
            assert tied is not None, self._name
            return tied
        logger.warning(
            "tie_word_embeddings is true, but %s differs from the embedding; the checkpoint's own tensor is used",
            self._name,
        )
        return self.weight


class PositionEmbedding(Layer):
    """A learned vector for each of a few numbers, as positions and types of tokens are, on every rank."""

    def __init__(self, ctx: BuildContext, prefix: str, num_positions: int, size: int) -> None:
        self._name = f"{prefix}.weight"
        self._weight = torch.empty(num_positions, size, dtype=ctx.dtype, device=ctx.device)

    def weight_slots(self) -> Sequence[WeightSlot]:
        return [WeightSlot(self._name, tuple(self._weight.shape), self._weight.copy_)]

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        """``[num_tokens] int64 -> [num_tokens, size]``"""
        return torch.nn.functional.embedding(positions, self._weight)
