"""A few ragged requests that live through several steps in shuffled blocks, as a scheduler would have them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from inferplane.api import DeviceRuntime
from inferplane.api.attention import AttentionInputs, AttentionLayer
from inferplane.api.kv import MLAAttentionSpec

SCHEDULE: Sequence[Sequence[int]] = (
    (1, 7, 33, 0, 16),
    (5, 1, 0, 40, 1),
    (1, 1, 20, 1, 0),
    (1, 1, 1, 1, 1),
    (30, 0, 1, 9, 1),
)
"""Tokens of each request in each step. A request that sits a step out must find its cache as it left it."""


@dataclass
class Request:
    """A whole sequence in host memory, of which ``num_done`` tokens are in the cache."""

    index: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    blocks: list[int] = field(default_factory=list)
    num_done: int = 0


@dataclass(frozen=True)
class Step:
    """What one call of a backend gets, and which rows of the result belong to whom."""

    inputs: AttentionInputs
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    members: list[tuple[Request, slice]]


class Requests:
    """Those of `SCHEDULE`, with random numbers of ``dtype`` that are the same for every block size."""

    def __init__(self, layer: AttentionLayer, dtype: torch.dtype, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        spec = layer.spec
        self.block_size = spec.block_size
        self.latent_rank = spec.latent_rank if isinstance(spec, MLAAttentionSpec) else None
        self.requests = [
            self._request(index, sum(lens), layer, dtype, generator)
            for index, lens in enumerate(zip(*SCHEDULE))
        ]
        counts = [spec.num_blocks_for(len(request.q)) for request in self.requests]
        self.num_blocks = sum(counts) + 3
        """A few stay without an owner, as in any pool."""
        ids = torch.randperm(self.num_blocks, generator=generator)
        for request, blocks in zip(self.requests, ids.split([*counts, 3])):
            request.blocks = blocks.tolist()

    def _request(
        self, index: int, length: int, layer: AttentionLayer, dtype: torch.dtype, generator: torch.Generator
    ) -> Request:
        def numbers(heads: int) -> torch.Tensor:
            return torch.randn(length, heads, layer.head_dim, generator=generator).to(dtype)

        kept = numbers
        if getattr(layer.spec, "dtype", None) == "int8_per_token_head":

            def kept(heads: int) -> torch.Tensor:
                """Multiples of the scale that they will have. Of others some lie just between two codes, and which of
                them it becomes is up to how a device divides."""
                codes = torch.randint(-127, 128, (length, heads, layer.head_dim), generator=generator)
                codes[..., 0], codes[..., -1] = 127, -127
                return (codes / 64).to(dtype)

        q, k = numbers(layer.num_heads), kept(layer.num_kv_heads)
        v = kept(layer.num_kv_heads) if self.latent_rank is None else k[..., : self.latent_rank]
        return Request(index=index, q=q, k=k, v=v)

    def steps(self, runtime: DeviceRuntime) -> Iterator[Step]:
        """Each step on the device; ``num_done`` counts its tokens from the moment that it is handed out."""
        for lens in SCHEDULE:
            yield self._step(lens, runtime)

    def _step(self, lens: Sequence[int], runtime: DeviceRuntime) -> Step:
        chosen = [(request, length) for request, length in zip(self.requests, lens) if length]
        members, parts, slots, start = [], [], [], 0
        for request, length in chosen:
            span = slice(request.num_done, request.num_done + length)
            parts.append((request.q[span], request.k[span], request.v[span]))
            slots += [self._slot(request, token) for token in range(span.start, span.stop)]
            members.append((request, slice(start, start + length)))
            request.num_done += length
            start += length
        q, k, v = (runtime.to_device(torch.cat(each)) for each in zip(*parts))
        if self.latent_rank is not None:  # as the contract has it: the values are a part of the keys
            v = k[..., : self.latent_rank]
        return Step(self._inputs(chosen, slots, runtime), q, k, v, members)

    def _inputs(
        self, chosen: Sequence[tuple[Request, int]], slots: list[int], runtime: DeviceRuntime
    ) -> AttentionInputs:
        query_lens, seq_lens = [length for _, length in chosen], [request.num_done for request, _ in chosen]
        width = max(-(-length // self.block_size) for length in seq_lens)
        # entries past a request's blocks are some valid ids
        table = [(request.blocks + [0] * width)[:width] for request, _ in chosen]
        starts = torch.tensor([0, *query_lens]).cumsum(0)
        return AttentionInputs(
            num_reqs=len(chosen),
            num_tokens=sum(query_lens),
            query_lens_host=query_lens,
            seq_lens_host=seq_lens,
            query_start=runtime.to_device(starts.int()),
            seq_lens=runtime.to_device(torch.tensor(seq_lens, dtype=torch.int32)),
            block_table=runtime.to_device(torch.tensor(table, dtype=torch.int32)),
            slot_mapping=runtime.to_device(torch.tensor(slots, dtype=torch.int64)),
            block_size=self.block_size,
        )

    def _slot(self, request: Request, token: int) -> int:
        return request.blocks[token // self.block_size] * self.block_size + token % self.block_size
