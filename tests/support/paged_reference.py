"""A paged cache filled with random numbers, and attention over it in float64, one request at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernel_checks import poisoned


@dataclass(frozen=True)
class Paged:
    """A step: request i has ``query_lens[i]`` queries, the last of its ``seq_lens[i]`` tokens."""

    q: torch.Tensor
    kv: torch.Tensor
    """[num_blocks, 2, block_size, num_kv_heads, head_dim]; NaN in every slot that no request owns."""
    block_table: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor

    @property
    def k_cache(self) -> torch.Tensor:
        return self.kv[:, 0]

    @property
    def v_cache(self) -> torch.Tensor:
        return self.kv[:, 1]


def make_paged(
    query_lens: list[int],
    seq_lens: list[int],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: torch.dtype | None = None,
) -> Paged:
    """Blocks are dealt out in random order; what lies past a request's end is NaN, so that reading it shows."""
    counts = [-(-length // block_size) for length in seq_lens]
    order = torch.randperm(sum(counts) + 1)
    kv_dtype = kv_dtype or dtype
    kv = poisoned(len(order), 2, block_size, num_kv_heads, head_dim, dtype=torch.float32, device=device)
    table = torch.full((len(seq_lens), max(counts) + 1), int(order[-1]), dtype=torch.int32)
    first = 0
    for i, (count, length) in enumerate(zip(counts, seq_lens)):
        table[i, :count] = order[first : first + count]
        for j in range(count):
            filled = min(block_size, length - j * block_size)
            kv[order[first + j], :, :filled] = torch.randn(2, filled, num_kv_heads, head_dim, device=device)
        first += count
    starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32)
    # q is a view of a wider projection, as in a model
    q = torch.randn(sum(query_lens), num_heads + 2, head_dim, device=device).to(dtype)[:, :num_heads]
    return Paged(
        q, kv.to(kv_dtype), table.to(device), starts.to(device),
        torch.tensor(seq_lens, dtype=torch.int32, device=device),
    )  # fmt: skip


def attention_reference(
    step: Paged,
    scale: float,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """``[num_tokens, num_heads, head_dim]`` float64."""
    num_heads = step.q.shape[1]
    group = num_heads // step.kv.shape[3]
    out = torch.empty(step.q.shape, dtype=torch.float64, device=step.q.device)
    for i, seq_len in enumerate(step.seq_lens.tolist()):
        begin, end = step.query_start[i : i + 2].tolist()
        blocks = step.kv[step.block_table[i].long()].double()
        k, v = blocks.transpose(0, 1).flatten(1, 2)[:, :seq_len].repeat_interleave(group, dim=2)
        scores = torch.einsum("qhd,khd->hqk", step.q[begin:end].double(), k) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        rows = torch.arange(seq_len - (end - begin), seq_len, device=scores.device)[:, None]
        columns = torch.arange(seq_len, device=scores.device)
        hidden = columns > rows
        if window is not None:
            hidden = hidden | (columns <= rows - window)
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            extra = sinks.double()[:, None, None].expand(-1, end - begin, 1)
            scores = torch.cat([scores, extra], dim=-1)
        weights = scores.softmax(-1)[..., :seq_len]
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, v)
    return out
