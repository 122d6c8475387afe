"""Graphs of a CPU: a step's native ops recorded once and run again by one call."""

from __future__ import annotations

import ctypes
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from inferplane.api import Graph, GraphBackend
from inferplane_kernels_cpu.native import int64, kernel, pointer
from inferplane_kernels_cpu.program import Program

aten = torch.ops.aten

ALIGNMENT_BYTES = 64


class Arena:
    """Memory for what recorded steps make along the way. It is never given back, and used again as soon as no tensor
    of Python's lies in it: whatever a step does later comes later in each of its replays. Pieces are powers of two, so
    that programs for different numbers of rows find each other's."""

    def __init__(self) -> None:
        self._owned: list[torch.Tensor] = []
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        """Addresses by size in bytes."""

    @property
    def num_bytes(self) -> int:
        return sum(memory.nbytes for memory in self._owned)

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised and contiguous."""
        num_elements = shape.numel()
        if num_elements == 0:
            return torch.empty(shape, dtype=dtype)
        num_bytes = max(ALIGNMENT_BYTES, 1 << (num_elements * dtype.itemsize - 1).bit_length())
        free = self._free[num_bytes]
        address = free.pop() if free else self._allocate(num_bytes)
        # the tensor and its views own this object, and nobody else does
        memory = (ctypes.c_char * num_bytes).from_address(address)
        weakref.finalize(memory, free.append, address).atexit = False
        return torch.frombuffer(memory, dtype=dtype, count=num_elements).view(shape)

    def _allocate(self, num_bytes: int) -> int:
        memory = torch.empty(num_bytes, dtype=torch.uint8)  # aligned by torch
        self._owned.append(memory)
        return memory.data_ptr()


class CpuGraphs(GraphBackend):
    """Records what native ops are called with. What torch would allocate comes from memory that all graphs share.

    Operators of torch's that compute would be missing in a replay, so they cannot be recorded, but for those that only
    move rows.
    """

    records_on_demand: ClassVar[bool] = True

    def __init__(self) -> None:
        self._arena = Arena()

    def capture(self, run: Callable[[], None]) -> Graph:
        program = Program()
        with program.recording(), _Watch(self._arena):
            run()
        return RecordedProgram(program, self._arena)


class RecordedProgram(Graph):
    def __init__(self, program: Program, arena: Arena) -> None:
        self._program = program
        self._arena = arena  # the program knows addresses only

    def replay(self) -> None:
        self._program.run()


class _Watch(TorchDispatchMode):
    """Sees every operator of torch's: lets views pass, hands out memory, and refuses what computes."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self._arena = arena

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing compiles a step that is recorded. True, torch's default, imports its compiler at the first operator:
        130 MB and two seconds."""
        return False

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ALLOCATIONS:
            made = func(*args, **kwargs)
            return self._arena.empty(made.shape, made.dtype) if made.is_contiguous() else made
        with self:  # what is made of other operators is judged by those
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        if _is_view(func):
            return func(*args, **kwargs)
        native = _NATIVE.get(func)
        result = None if native is None or kwargs else native(self._arena, *args)
        if result is None:
            raise RuntimeError(f"{func} of torch's takes part in the step, which only native ops may")
        return result


_ALLOCATIONS = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}


def _is_view(func: torch._ops.OpOverload) -> bool:
    """Whether the results lie in the memory of the arguments, and none of that is written."""
    results, arguments = func._schema.returns, func._schema.arguments
    return (
        bool(results)
        and all(result.alias_info is not None for result in results)
        and not any(
            each.alias_info is not None and each.alias_info.is_write for each in (*results, *arguments)
        )
    )


# Native forms of operators; None for arguments that they do not serve.


def _embedding(arena: Arena, weight: torch.Tensor, ids: torch.Tensor, *more: Any) -> torch.Tensor | None:
    return _take_rows(arena, weight, ids)


def _index_select(arena: Arena, table: torch.Tensor, dim: int, ids: torch.Tensor) -> torch.Tensor | None:
    return _take_rows(arena, table, ids) if dim == 0 else None


def _take_rows(arena: Arena, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor | None:
    is_plain = table.is_contiguous() and ids.is_contiguous() and ids.dim() == 1 and ids.dtype == torch.int64
    if table.dim() < 2 or not is_plain:
        return None
    out = arena.empty(torch.Size((len(ids), *table.shape[1:])), table.dtype)
    take_rows = kernel("take_rows", pointer, pointer, pointer, int64, int64)
    take_rows(out.data_ptr(), table.data_ptr(), ids.data_ptr(), len(ids), table.stride(0) * table.itemsize)
    return out


def _copy(arena: Arena, out: torch.Tensor, source: torch.Tensor, *more: Any) -> torch.Tensor | None:
    is_plain = out.is_contiguous() and source.is_contiguous() and out.shape == source.shape
    if out.dtype != source.dtype or not is_plain:
        return None
    kernel("copy_bytes", pointer, pointer, int64)(out.data_ptr(), source.data_ptr(), out.nbytes)
    return out


_NATIVE: Mapping[torch._ops.OpOverload, Callable[..., torch.Tensor | None]] = {
    aten.embedding.default: _embedding,
    aten.index_select.default: _index_select,
    aten.copy_.default: _copy,
}
