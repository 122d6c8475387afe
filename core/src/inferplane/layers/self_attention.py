"""Self-attention with its projections: what stands between two norms of a decoder block."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inferplane.api.model import BuildContext, ForwardBatch
from inferplane.layers.attention import Attention, QKNorm
from inferplane.layers.encoder_attention import EncoderAttention
from inferplane.layers.layer import Layer, WeightSlot
from inferplane.layers.linear import RowParallelLinear
from inferplane.layers.norm import Norm, RMSNorm
from inferplane.layers.parallel import even_share
from inferplane.layers.qkv import FusedQKV, Heads, QKVParallelLinear, SeparateQKV
from inferplane.layers.rope import RotaryEmbedding


class SelfAttention(Layer):
    """Projections to q, k and v, norms on q and k, rotary embedding, attention, projection back.

    ``rope`` is None where positions do not turn queries and keys. ``q_norm`` and ``k_norm`` take
    ``[num_tokens, heads, head_dim]``, before the rotation. ``output`` names the last projection below ``prefix``.
    With ``has_sinks`` each head has a learned logit, ``prefix.sinks``, that takes its share of the attention. With
    ``has_output_gate`` the projection to q has as many outputs again, whose sigmoid multiplies what attention gives.
    """

    def __init__(
        self,
        ctx: BuildContext,
        prefix: str,
        hidden_size: int,
        heads: Heads,
        *,
        rope: RotaryEmbedding | None,
        tensors: SeparateQKV | FusedQKV = SeparateQKV(),  # noqa: B008
        output: str = "o_proj",
        qkv_bias: bool = False,
        output_bias: bool = False,
        is_transposed: bool = False,
        q_norm: Layer | None = None,
        k_norm: Layer | None = None,
        scale: float | None = None,
        window: int | None = None,
        chunk: int | None = None,
        soft_cap: float | None = None,
        has_sinks: bool = False,
        has_output_gate: bool = False,
        is_encoder: bool = False,
    ) -> None:
        """``scale``, ``window``, ``chunk`` and ``soft_cap`` as in `Attention`; with ``is_encoder`` the first two as in
        `EncoderAttention`, and the others have no meaning."""
        head_dim = heads.head_dim
        self.qkv_proj = QKVParallelLinear(
            ctx,
            prefix,
            hidden_size,
            heads,
            tensors=tensors,
            bias=qkv_bias,
            interleaved_dim=0 if rope is None else rope.interleaved_dim,
            is_transposed=is_transposed,
            has_gate=has_output_gate,
        )
        num_heads, num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self._split = (num_heads, num_kv_heads, num_kv_heads)
        self._head_shape = (-1, sum(self._split), head_dim)
        self._gate_size = num_heads * head_dim if has_output_gate else 0
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.rope = rope
        self.sinks = Sinks(ctx, f"{prefix}.sinks", heads.num_heads) if has_sinks else None
        self.attention: Attention | EncoderAttention
        if is_encoder:
            self.attention = EncoderAttention(ctx, prefix, head_dim=head_dim, scale=scale, window=window)
        else:
            self.attention = Attention(
                ctx,
                prefix,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                scale=scale,
                window=window,
                chunk=chunk,
                soft_cap=soft_cap,
                sinks=None if self.sinks is None else self.sinks.logits,
            )
        norms = (self.q_norm, self.k_norm)
        is_plain = norms == (None, None) or all(isinstance(norm, RMSNorm) for norm in norms)
        # a backend that rotates does what `place` of this class does, and knows nothing of another
        is_plain = is_plain and type(self).place is SelfAttention.place
        self._rotary = None
        if rope is not None and is_plain and isinstance(self.attention, Attention):
            self._rotary = self.attention.rotary if self.attention.backend.fuses_rotary else None
        self.o_proj = RowParallelLinear(
            ctx,
            f"{prefix}.{output}",
            heads.num_heads * head_dim,
            hidden_size,
            bias=output_bias,
            is_transposed=is_transposed,
        )

    def __call__(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """``[num_tokens, hidden_size]`` to the same."""
        return self.o_proj(self._attend(self.qkv_proj(hidden), batch))

    def after_norm(
        self,
        norm: Norm,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        batch: ForwardBatch,
        *,
        rows: torch.Tensor | None = None,
        is_bare: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The block applied to ``norm(hidden + residual)``, and that sum, of all tokens or of ``rows`` alone; with
        ``is_bare``, where nothing else is done to the block's result, also both in one and None."""
        qkv, residual = self.qkv_proj.after_norm(norm, hidden, residual)
        mixed = self._attend(qkv, batch)
        if rows is not None:
            mixed, residual = mixed.index_select(0, rows), residual.index_select(0, rows)
        return self.o_proj.beside(residual, mixed) if is_bare else (self.o_proj(mixed), residual)

    def _attend(self, qkv: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """``[num_tokens, num_heads * head_dim]``, gated where there is a gate."""
        if not self._gate_size:
            return self._mixed(qkv, batch)
        gate, qkv = qkv[:, : self._gate_size], qkv[:, self._gate_size :].contiguous()
        return self._mixed(qkv, batch) * gate.sigmoid()

    def _mixed(self, qkv: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """``[num_tokens, num_heads * head_dim]``"""
        if self._rotary is not None and self.rope is not None:
            return self._rotary(qkv, batch, self.rope.table(), self._qk_norm()).flatten(1)
        q, k, v = qkv.view(self._head_shape).split_with_sizes(self._split, 1)
        q, k = self.place(q, k, batch.positions)
        return self.attention(q, k, v, batch).flatten(1)

    def _qk_norm(self) -> QKNorm | None:
        """Both norms together, where each is of one head."""
        if isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm):
            return self.q_norm.weight, self.k_norm.weight, self.q_norm.eps
        return None

    def place(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Norms and rotation of ``[num_tokens, heads, head_dim]``."""
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.k_norm is not None:
            k = self.k_norm(k)
        return (q, k) if self.rope is None else self.rope(q, k, positions)


class Sinks(Layer):
    """``logits: [num_heads]`` float32 of this rank's heads."""

    def __init__(self, ctx: BuildContext, name: str, num_heads: int) -> None:
        self._name = name
        self._heads = even_share(num_heads, ctx.comm, f"{name}: number of attention heads")
        self.logits = torch.empty(self._heads.size, dtype=torch.float32, device=ctx.device)

    def weight_slots(self) -> Sequence[WeightSlot]:
        return [WeightSlot(self._name, (self._heads.total,), self._copy)]

    def _copy(self, tensor: torch.Tensor) -> None:
        self.logits.copy_(tensor[self._heads.span])
