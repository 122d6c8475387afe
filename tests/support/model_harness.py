"""Models without an engine: a context on the reference ops, a KV cache of its own, and ranks as threads.

model = load_tiny(folder)
rows = PromptRun(model).logits([[5, 9, 2], [7]])   # one [num_tokens, vocab_size] for each prompt
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch

from inferplane.api.attention import AttentionBackend, AttentionInputs, AttentionLayer, AttentionQuery
from inferplane.api.comm import Communicator, SoloCommunicator
from inferplane.api.kv import ChunkedLocalSpec, KVCacheSpec, SlidingWindowSpec
from inferplane.api.linear import LinearKernel, LinearShape, Multiply
from inferplane.api.model import BuildContext, ForwardBatch, Model
from inferplane.api.ops import OPS, OpTable
from inferplane.api.quant import QuantFormat, QuantizedLinearKernel
from inferplane.api.quantized_experts import ExpertsShape, QuantizedExpertsKernel
from inferplane.api.state import StateLayer, allocate_states, state_rounds
from inferplane.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    LoadConfig,
    ModelConfig,
    PoolerConfig,
)
from inferplane.models.hf_config import usual_form
from inferplane.models.registry import build_model
from inferplane.quantization.registry import make_format

T = TypeVar("T")
BLOCK_SIZE = 4


class DenseLinear(LinearKernel):
    """Keeps the weight as it is."""

    name = "dense"

    @classmethod
    def unsupported_reason(cls, shape: LinearShape, device: Any) -> str | None:
        return None

    @classmethod
    def prepare(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> Multiply:
        return lambda x: torch.nn.functional.linear(x, weight, bias)


class GatherAttention(AttentionBackend):
    """Gathers a request's keys and values and attends with an explicit mask, one request after another.

    It keeps every token, and knows windows, chunks, soft caps and sinks.
    """

    name = "gather"

    @classmethod
    def unsupported_reason(cls, query: AttentionQuery) -> str | None:
        return None

    @classmethod
    def allocate_kv(
        cls, layer: AttentionLayer, num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        slots = num_blocks * layer.spec.block_size
        return torch.full(
            (2, slots, layer.num_kv_heads, layer.head_dim), torch.nan, dtype=dtype, device=device
        )

    def forward(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv: torch.Tensor,
        metadata: AttentionInputs,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        value_dim = v.shape[-1]
        kv[0, metadata.slot_mapping], kv[1, metadata.slot_mapping, :, :value_dim] = k, v
        out = torch.empty(*q.shape[:2], value_dim, dtype=q.dtype)
        start = 0
        for index, (num_new, length) in enumerate(zip(metadata.query_lens_host, metadata.seq_lens_host)):
            slots = _slots(metadata.block_table[index], metadata.block_size, length)
            keys, values = kv[:, slots].repeat_interleave(layer.num_heads // layer.num_kv_heads, dim=2)
            scores = torch.einsum("qhd,khd->hqk", q[start : start + num_new], keys) * layer.scale
            if layer.soft_cap is not None:
                scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
            scores = scores.masked_fill(_is_hidden(layer.spec, length, num_new), -torch.inf)
            total = scores.logsumexp(-1, keepdim=True)
            if sinks is not None:
                total = torch.logaddexp(total, sinks.view(-1, 1, 1))
            weights = (scores - total).exp().to(q.dtype)
            out[start : start + num_new] = torch.einsum("hqk,khd->qhd", weights, values[..., :value_dim])
            start += num_new
        return out


def _is_hidden(spec: KVCacheSpec, length: int, num_new: int) -> torch.Tensor:
    """``[num_new, length]``: which tokens the last ones do not see."""
    queries, keys = torch.arange(length - num_new, length).unsqueeze(1), torch.arange(length)
    is_hidden = keys > queries
    if isinstance(spec, SlidingWindowSpec):
        is_hidden |= queries - keys >= spec.window
    if isinstance(spec, ChunkedLocalSpec):
        is_hidden |= queries // spec.chunk != keys // spec.chunk
    return is_hidden


def _slots(block_table: torch.Tensor, block_size: int, length: int) -> torch.Tensor:
    positions = torch.arange(length)
    return block_table[positions // block_size].long() * block_size + positions % block_size


def make_context(
    hf_config: Mapping[str, Any],
    *,
    dtype: str = "float32",
    max_model_len: int = 256,
    comm: Communicator | None = None,
    choose_linear: Callable[[LinearShape], type[LinearKernel]] = lambda shape: DenseLinear,
    quantization: QuantFormat | None = None,
    choose_quantized: Callable[[LinearShape], type[QuantizedLinearKernel] | None] = lambda shape: None,
    choose_experts: Callable[[ExpertsShape], type[QuantizedExpertsKernel] | None] = lambda shape: None,
    load_format: str = "auto",
    kv_dtype: str | None = None,
    seed: int = 0,
    pooler: PoolerConfig | None = None,
    path: Path | str = "",
) -> BuildContext:
    """``quantization`` is by default what the configuration says."""
    attention = GatherAttention()
    model = ModelConfig(
        model="tiny",
        path=str(path),
        hf_config=dict(hf_config),
        architecture=hf_config["architectures"][0],
        dtype=dtype,
        max_model_len=max_model_len,
        vocab_size=hf_config["vocab_size"],
        pooler=pooler,
    )
    config = EngineConfig(
        model=model,
        device=DeviceConfig(platform="reference"),
        load=LoadConfig(load_format=load_format),
        cache=CacheConfig(block_size=BLOCK_SIZE, kv_dtype=kv_dtype),
        seed=seed,
    )
    return BuildContext(
        config=config,
        ops=OpTable({name: op.reference for name, op in OPS.items()}),
        comm=comm or SoloCommunicator(),
        device=torch.device("cpu"),
        dtype=getattr(torch, dtype),
        choose_linear=choose_linear,
        choose_attention=lambda layer: attention,
        quantization=quantization or make_format(config, {}),
        choose_quantized=choose_quantized,
        choose_experts=choose_experts,
    )


def read_config(folder: Path) -> dict[str, Any]:
    return usual_form(json.loads((folder / "config.json").read_text(encoding="utf-8")))


def read_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for file in sorted(folder.glob("*.safetensors")):
        yield from safetensors.torch.load_file(file).items()


def load_tiny(folder: Path, **context: Any) -> Model:
    """The model of a folder, built in the context of `make_context`."""
    model = build_model(make_context(read_config(folder), **context))
    model.load_weights(read_tensors(folder))
    return model


class PromptRun:
    """Prompts through one model, each request in scattered blocks of a cache of its own."""

    def __init__(self, model: Model) -> None:
        self.model = model

    @torch.inference_mode()
    def logits(
        self, prompts: Sequence[Sequence[int]], chunk: int | None = None, *, asks_for_last: bool = False
    ) -> list[torch.Tensor]:
        """``[len(prompt), vocab_size]`` for each; with ``chunk`` each step takes so many tokens of every prompt. With
        ``asks_for_last`` the model is told that only those of each step's last tokens are wanted: ``[steps, …]``."""
        layers = self.model.kv_layers()
        num_blocks = [-(-len(prompt) // BLOCK_SIZE) for prompt in prompts]
        ids = torch.randperm(sum(num_blocks), generator=torch.Generator().manual_seed(1)).int()
        tables = torch.nn.utils.rnn.pad_sequence(ids.split(num_blocks), batch_first=True)
        kv = {layer.name: _allocate(layer, len(ids)) for layer in layers}
        with_state = {layer.name for layer in self.model.state_layers()}
        parts: list[list[torch.Tensor]] = [[] for _ in prompts]
        size = chunk or max(map(len, prompts))
        for start in range(0, max(map(len, prompts)), size):
            members = [index for index, prompt in enumerate(prompts) if start < len(prompt)]
            pieces = [prompts[index][start : start + size] for index in members]
            batch = _batch(pieces, start, tables[members], kv, with_state)
            sizes = [len(piece) for piece in pieces]
            if asks_for_last:
                last = torch.tensor(sizes).cumsum(0) - 1
                hidden = self.model(replace(batch, logits_rows=last, output_rows=last))
                sizes = [1] * len(sizes)
                hidden = hidden if len(hidden) == len(last) else hidden[last]
            else:
                hidden = self.model(batch)
            for index, rows in zip(members, self.model.compute_logits(hidden).split(sizes)):
                parts[index].append(rows)
        return [torch.cat(rows) for rows in parts]


def _allocate(layer: AttentionLayer | StateLayer, num_blocks: int) -> torch.Tensor:
    """Not a number, so that what is read before it is written shows."""
    device = torch.device("cpu")
    if isinstance(layer, StateLayer):
        return allocate_states(layer.spec, num_blocks, device).fill_(255)
    return GatherAttention.allocate_kv(layer, num_blocks, getattr(torch, layer.spec.dtype), device)


def _batch(
    pieces: Sequence[Sequence[int]],
    start: int,
    tables: torch.Tensor,
    kv: Mapping[str, torch.Tensor],
    with_state: Collection[str],
) -> ForwardBatch:
    lens = [len(piece) for piece in pieces]
    ends = [start + num for num in lens]
    slots = [_slots(table, BLOCK_SIZE, end)[start:] for table, end in zip(tables, ends)]
    inputs = AttentionInputs(
        num_reqs=len(pieces),
        num_tokens=sum(lens),
        query_lens_host=lens,
        seq_lens_host=ends,
        query_start=torch.tensor([0, *lens]).cumsum(0).int(),
        seq_lens=torch.tensor(ends, dtype=torch.int32),
        block_table=tables,
        slot_mapping=torch.cat(slots),
        block_size=BLOCK_SIZE,
    )
    rounds = state_rounds(inputs)
    return ForwardBatch(
        token_ids=torch.tensor([token for piece in pieces for token in piece]),
        positions=torch.cat([torch.arange(start, end) for end in ends]),
        logits_rows=torch.arange(sum(lens)),
        kv=kv,
        metadata={name: rounds if name in with_state else inputs for name in kv},
        query_lens_host=lens,
        query_start=inputs.query_start,
    )


class ThreadCommunicator(Communicator):
    """One rank of several that are threads of this process."""

    def __init__(self, rank: int, parts: list[torch.Tensor | None], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.world_size = len(parts)
        self._parts = parts
        self._barrier = barrier

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(tensor)).sum(0)

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        parts = self._exchange(tensor)
        assert len({part.shape for part in parts}) == 1
        return torch.cat(parts, dim)

    def close(self) -> None:
        return

    def _exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._parts[self.rank] = tensor
        self._barrier.wait()
        parts = [part for part in self._parts if part is not None]
        self._barrier.wait()
        return parts


def run_ranks(world_size: int, work: Callable[[Communicator], T]) -> list[T]:
    """``work`` on every rank at once; results in rank order. The first rank's error ends the others' waiting."""
    parts: list[torch.Tensor | None] = [None] * world_size
    barrier = threading.Barrier(world_size, timeout=60)

    def run(rank: int) -> T:
        try:
            return work(ThreadCommunicator(rank, parts, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(world_size) as pool:
        return [future.result() for future in [pool.submit(run, rank) for rank in range(world_size)]]
