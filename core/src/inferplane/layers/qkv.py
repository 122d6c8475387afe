"""The projection to queries, keys and values, however a checkpoint lays out its rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from inferplane.api.model import BuildContext
from inferplane.layers.linear import Linear
from inferplane.layers.parallel import Rows, Share, even_share, kv_head_share, whole


@dataclass(frozen=True)
class Heads:
    """Of one attention layer, over all ranks."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class SeparateQKV:
    """Three matrices."""

    q: str = "q_proj"
    k: str = "k_proj"
    v: str = "v_proj"


@dataclass(frozen=True)
class FusedQKV:
    """One matrix: all of q, then k, then v or, grouped, each KV head behind the query heads that it serves."""

    name: str = "qkv_proj"
    is_grouped: bool = False


class QKVParallelLinear(Linear):
    """q, k and v in one product, split by heads.

    The output is ``[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]`` with the attributes ``num_heads`` and
    ``num_kv_heads``, which count this rank's. With fewer KV heads than ranks each is kept by several.

    With ``has_gate`` the checkpoint has behind each head of q as many rows again, a gate; all gates come first here.

    Checkpoints that turn neighbouring dimensions as a pair say so with ``interleaved_dim``, the number of leading
    dimensions that are turned: rows of q and k are put in the order of the other convention, where a pair is half of
    these dimensions apart. A product of q and k does not depend on the order.
    """

    def __init__(
        self,
        ctx: BuildContext,
        prefix: str,
        in_features: int,
        heads: Heads,
        *,
        tensors: SeparateQKV | FusedQKV = SeparateQKV(),
        bias: bool = False,
        interleaved_dim: int = 0,
        is_transposed: bool = False,
        has_gate: bool = False,
    ) -> None:
        q_heads = even_share(heads.num_heads, ctx.comm, f"{prefix}: number of attention heads")
        kv_heads = kv_head_share(heads.num_kv_heads, ctx.comm, f"{prefix}: number of KV heads")
        outputs: Mapping[str, Share | Rows]
        if isinstance(tensors, FusedQKV):
            if has_gate:
                raise ValueError(f"{prefix}: gates are known of separate matrices only")
            rows = _fused_rows(heads, q_heads, kv_heads, tensors.is_grouped, interleaved_dim)
            outputs = {f"{prefix}.{tensors.name}": rows}
        else:
            outputs = {
                f"{prefix}.{tensors.q}": _gated_rows(q_heads, heads.head_dim, interleaved_dim)
                if has_gate
                else _separate_rows(q_heads, heads.head_dim, interleaved_dim),
                f"{prefix}.{tensors.k}": _separate_rows(kv_heads, heads.head_dim, interleaved_dim),
                f"{prefix}.{tensors.v}": _separate_rows(kv_heads, heads.head_dim, 0),
            }
        super().__init__(ctx, outputs, whole(in_features), bias=bias, is_transposed=is_transposed)
        self.num_heads = q_heads.size
        self.num_kv_heads = kv_heads.size


def _separate_rows(share: Share, head_dim: int, interleaved_dim: int) -> Share | Rows:
    if not interleaved_dim:
        return share.scaled(head_dim)
    places = torch.arange(share.start, share.start + share.size)
    return Rows(share.total * head_dim, _rows_of_heads(places, head_dim, interleaved_dim))


def _gated_rows(share: Share, head_dim: int, interleaved_dim: int) -> Rows:
    """The gates and then the queries of a matrix that has each head's query and gate one below the other."""
    places = 2 * torch.arange(share.start, share.start + share.size)
    queries = _rows_of_heads(places, head_dim, interleaved_dim)
    return Rows(2 * share.total * head_dim, torch.cat([_rows_of_heads(places + 1, head_dim, 0), queries]))


def _fused_rows(
    heads: Heads, q_heads: Share, kv_heads: Share, is_grouped: bool, interleaved_dim: int
) -> Rows:
    q = torch.arange(q_heads.start, q_heads.start + q_heads.size)
    kv = torch.arange(kv_heads.start, kv_heads.start + kv_heads.size)
    if is_grouped:
        group_size = heads.num_heads // heads.num_kv_heads
        places = (
            q // group_size * (group_size + 2) + q % group_size,
            kv * (group_size + 2) + group_size,
            kv * (group_size + 2) + group_size + 1,
        )
    else:
        places = (q, heads.num_heads + kv, heads.num_heads + heads.num_kv_heads + kv)
    dims = (interleaved_dim, interleaved_dim, 0)
    rows = [_rows_of_heads(place, heads.head_dim, dim) for place, dim in zip(places, dims)]
    return Rows((heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim, torch.cat(rows))


def _rows_of_heads(places: torch.Tensor, head_dim: int, interleaved_dim: int) -> torch.Tensor:
    """All rows of the heads at ``places`` of a matrix that has one head below another."""
    return (places.unsqueeze(1) * head_dim + half_split_order(head_dim, interleaved_dim)).flatten()


def half_split_order(head_dim: int, interleaved_dim: int) -> torch.Tensor:
    """``[head_dim]``: which dimension of a head whose pairs are neighbours stands where when they are apart."""
    pairs = torch.arange(interleaved_dim).view(-1, 2)
    return torch.cat([pairs.T.flatten(), torch.arange(interleaved_dim, head_dim)])
