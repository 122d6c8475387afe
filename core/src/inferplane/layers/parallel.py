"""How sizes are split over the ranks of a model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from inferplane.api.comm import Communicator
from inferplane.config import ConfigError


@dataclass(frozen=True)
class Share:
    """The elements ``start`` to ``start + size`` of a dimension of ``total``, which are this rank's."""

    total: int
    start: int
    size: int

    @property
    def span(self) -> slice:
        return slice(self.start, self.start + self.size)

    def scaled(self, factor: int) -> Share:
        """The same share counted in elements of which each of ours has ``factor``: heads to features."""
        return Share(self.total * factor, self.start * factor, self.size * factor)


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a matrix of ``total`` that are this rank's, one by one, in the order in which it keeps them."""

    total: int
    span: torch.Tensor
    """[size] int64"""

    @property
    def size(self) -> int:
        return len(self.span)


def stacked_rows(shares: Iterable[Share]) -> Rows:
    """Shares of matrices that lie one below another in one."""
    total, parts = 0, []
    for share in shares:
        parts.append(torch.arange(total + share.start, total + share.start + share.size))
        total += share.total
    return Rows(total, torch.cat(parts))


def stacked_parts(shares: Iterable[Share], comm: Communicator) -> Share | Rows:
    """As `stacked_rows`; a matrix that only one rank has stays as it is."""
    shares = list(shares)
    return whole(sum(share.total for share in shares)) if comm.world_size == 1 else stacked_rows(shares)


def whole(total: int) -> Share:
    """All of it on every rank."""
    return Share(total, 0, total)


def even_share(total: int, comm: Communicator, what: str) -> Share:
    """An equal part for each rank. Raises `ConfigError` naming ``what`` and the numbers when that is impossible."""
    if total % comm.world_size:
        raise ConfigError(
            "tensor_parallel_size", f"{what} {total} cannot be split over {comm.world_size} ranks evenly"
        )
    size = total // comm.world_size
    return Share(total, comm.rank * size, size)


def kv_head_share(num_kv_heads: int, comm: Communicator, what: str) -> Share:
    """KV heads of this rank: an equal part, or one head that neighbouring ranks share when there are too few.

    Query heads are split in order, so the ranks that hold the queries of one KV head are neighbours.
    """
    if num_kv_heads >= comm.world_size:
        return even_share(num_kv_heads, comm, what)
    if comm.world_size % num_kv_heads:
        raise ConfigError(
            "tensor_parallel_size",
            f"{what} {num_kv_heads} is neither a multiple nor a divisor of {comm.world_size} ranks",
        )
    ranks_per_head = comm.world_size // num_kv_heads
    return Share(num_kv_heads, comm.rank // ranks_per_head, 1)


def padded_share(total: int, comm: Communicator) -> tuple[Share, int]:
    """``(share, size)``: every rank has room for ``size`` elements, of which ``share.size`` are real.

    The last ranks may hold fewer real ones, or none; equal room is what lets a gather work.
    """
    size = -(-total // comm.world_size)
    start = min(comm.rank * size, total)
    return Share(total, start, min(size, total - start)), size
