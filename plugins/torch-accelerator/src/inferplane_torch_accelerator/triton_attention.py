"""Attention by the Triton kernels: any mix of prompts and single tokens, in one KV layout."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from inferplane.api.attention import AttentionBackend, AttentionInputs, AttentionLayer, AttentionQuery
from inferplane.api.kv import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec
from inferplane_torch_accelerator.kv_layout import allocate, numbers_and_scales
from inferplane_torch_accelerator.launch import Config, Launch

if TYPE_CHECKING:
    from inferplane_kernels_triton.decode_attention import DecodeWorkspace

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
FP8 = frozenset({"fp8_e4m3", "fp8_e5m2"})
INT8 = "int8_per_token_head"
MIN_BLOCK_SIZE = 16
MAX_HEAD_DIM = 256
MAX_MEASURED_HEAD_DIM = 128
MAX_LATENT_RANK = 512
MAX_ROPE_DIM = 64
USUAL_LENGTH = 1024
"""Of a sequence, where a graph has to hold for any: it decides how a kernel is launched, not what it computes."""


@dataclass
class StepPart:
    """Requests of a step that lie one after another and go to one kernel."""

    num_reqs: int
    query_start: torch.Tensor
    """[num_reqs + 1] int32: their rows of the step's q, which need not begin with its first."""
    seq_lens: torch.Tensor
    """[num_reqs] int32"""
    block_table: torch.Tensor
    """[num_reqs, max_num_blocks] int32"""
    query_lens: list[int]
    """Tokens of this step that each request has."""
    longest: int
    """Tokens of the longest sequence, or an upper bound."""
    num_splits: dict[int, int] = field(default_factory=dict)
    """Into how many parts a sequence is cut, by the number of KV heads."""
    configs: dict[tuple[int, int], Any] = field(default_factory=dict)
    """How the kernel is launched, by the number of KV heads and head size, once a layer has asked."""

    @property
    def longest_query(self) -> int:
        """Tokens of this step that the request with most of them has."""
        return max(self.query_lens)

    @classmethod
    def of(cls, inputs: AttentionInputs, first: int, end: int) -> StepPart | None:
        """The requests from ``first`` up to ``end``, as views; None where these are none."""
        if first == end:
            return None
        return cls(
            num_reqs=end - first,
            query_start=inputs.query_start[first : end + 1],
            seq_lens=inputs.seq_lens[first:end],
            block_table=inputs.block_table[first:end],
            query_lens=inputs.query_lens_host[first:end],
            longest=max(inputs.seq_lens_host[first:end]),
        )


@dataclass
class StepMetadata:
    """One step, or every step that a graph is replayed for."""

    inputs: AttentionInputs
    decodes: StepPart | None
    """The requests at the step's beginning that have one token each; the scheduler puts decoding ones there."""
    prompts: StepPart | None
    """All others."""

    _rows: torch.Tensor | None = None
    _whole: StepPart | None = None

    def whole(self) -> StepPart:
        """All requests of the step, for a kernel that takes any."""
        if self._whole is None:
            self._whole = StepPart.of(self.inputs, 0, self.inputs.num_reqs)
            assert self._whole is not None, "a step has at least one request"
        return self._whole

    def rows(self) -> torch.Tensor:
        """``[num_tokens]`` int64: each token's place in the step. Made once; a graph keeps it."""
        slots = self.inputs.slot_mapping
        if self._rows is None:
            self._rows = torch.arange(len(slots), device=slots.device)
        return self._rows

    @classmethod
    def of(cls, inputs: AttentionInputs) -> StepMetadata:
        lens = inputs.query_lens_host
        num_decodes = next((index for index, length in enumerate(lens) if length != 1), len(lens))
        decodes, prompts = (
            StepPart.of(inputs, *span) for span in ((0, num_decodes), (num_decodes, len(lens)))
        )
        return cls(inputs, decodes, prompts)


@dataclass(frozen=True)
class Cache:
    """A layer's keys and values, as kernels take them."""

    k: torch.Tensor
    """[num_blocks, block_size, num_kv_heads, head_dim]"""
    v: torch.Tensor
    scales: tuple[torch.Tensor, torch.Tensor] | None
    """Of keys and values, by head or, of int8, by slot and head."""

    @classmethod
    def of(cls, kv: torch.Tensor, layer: AttentionLayer) -> Cache:
        if kv.dtype != torch.int8:
            return cls(kv[0], kv[-1], scales_of(layer))
        (k, k_scales), (v, v_scales) = (numbers_and_scales(half, layer) for half in kv)
        return cls(k, v, (k_scales, v_scales))


class TritonAttention(AttentionBackend):
    """Full attention, sliding windows and latents, soft caps and sinks. Single tokens and chunks of prompts in one step
    go to a kernel each. That of single tokens splits long sequences over the processors; into how many parts depends on
    the batch alone, so that a graph holds for any lengths. A platform gives it a name and says how kernels are
    launched."""

    launch: ClassVar[Launch]
    priority = 10
    quantized_kv = FP8 | {INT8}
    graph_safe = True
    keeps_latent_rows = True
    fuses_rotary = True

    def __init__(self) -> None:
        self._workspaces: dict[tuple[int, ...], DecodeWorkspace] = {}
        """Partial results of split sequences, by heads, KV heads and head size; one launch uses them at a time."""

    @classmethod
    def unsupported_reason(cls, query: AttentionQuery) -> str | None:
        layer, block_size = query.layer, query.layer.spec.block_size
        if type(layer.spec) not in (FullAttentionSpec, SlidingWindowSpec, MLAAttentionSpec):
            return f"computes full attention, sliding windows and attention to latents, not {type(layer.spec).__name__}"
        is_fp8 = query.kv_dtype in FP8_DTYPES
        is_int8 = query.kv_dtype == torch.int8
        if is_int8 and isinstance(layer.spec, MLAAttentionSpec):
            return "stores latents in the activations' type or fp8, not in int8"
        if query.dtype not in DTYPES or not (is_fp8 or is_int8 or query.kv_dtype == query.dtype):
            return f"computes in float32, bfloat16 and float16 throughout, not in {query.dtype} over {query.kv_dtype}"
        if is_fp8 and not query.device.capabilities.has("fp8_e4m3_matmul"):
            return f"{query.device.name} lacks fp8_e4m3_matmul, without which its compiler knows no fp8"
        if block_size < MIN_BLOCK_SIZE or block_size & (block_size - 1):
            return f"needs blocks of a power of two from {MIN_BLOCK_SIZE} tokens, not of {block_size}"
        if isinstance(layer.spec, MLAAttentionSpec):
            if layer.spec.latent_rank > MAX_LATENT_RANK or layer.spec.rope_dim > MAX_ROPE_DIM:
                return (
                    f"has tiles for latents of up to {MAX_LATENT_RANK} with {MAX_ROPE_DIM} rotated numbers, not of "
                    f"{layer.spec.latent_rank} with {layer.spec.rope_dim}"
                )
        elif layer.head_dim > MAX_HEAD_DIM:
            return f"has tiles for heads of up to {MAX_HEAD_DIM}, not of {layer.head_dim}"
        return cls.launch.why_not()

    @classmethod
    def allocate_kv(
        cls, layer: AttentionLayer, num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return allocate(layer, num_blocks, dtype, device)

    def build_metadata(self, inputs: AttentionInputs) -> StepMetadata:
        return StepMetadata.of(inputs)

    def forward(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv: torch.Tensor,
        metadata: StepMetadata,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        from inferplane_kernels_triton.kv_store import store_kv

        pdl = self.launch.pdl(k.device)
        is_latent = isinstance(layer.spec, MLAAttentionSpec)
        cache = Cache.of(kv, layer)
        slots = metadata.inputs.slot_mapping
        store_kv(k, k if is_latent else v, cache.k, cache.v, slots, kv_scales=cache.scales, pdl=pdl)
        if is_latent:
            return self._attend_to_latents(layer, q, kv, metadata.whole())
        return self._attend(layer, q, kv, metadata, sinks)

    def rotary_forward(
        self,
        layer: AttentionLayer,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        kv: torch.Tensor,
        metadata: StepMetadata,
        *,
        qk_norm: tuple[torch.Tensor, torch.Tensor, float] | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        from inferplane_kernels_triton.kv_store import store_kv
        from inferplane_kernels_triton.rope_and_store import rope_and_store

        cache, slots, pdl = Cache.of(kv, layer), metadata.inputs.slot_mapping, self.launch.pdl(qkv.device)
        is_int8 = cache.k.dtype == torch.int8
        # a row's scale is known once all of it is rotated: int8 is stored by a kernel of its own
        rotated = qkv.new_empty(2, 1, len(qkv), layer.num_kv_heads, layer.head_dim) if is_int8 else None
        q = rope_and_store(
            qkv,
            cache.k if rotated is None else rotated[0],
            cache.v if rotated is None else rotated[1],
            slots if rotated is None else metadata.rows(),
            positions,
            cos_sin,
            layer.num_heads,
            qk_norm=qk_norm,
            kv_scales=cache.scales if rotated is None else None,
            pdl=pdl,
        )
        if rotated is not None:
            store_kv(rotated[0, 0], rotated[1, 0], cache.k, cache.v, slots, kv_scales=cache.scales, pdl=pdl)
        return self._attend(layer, q, kv, metadata, sinks)

    def _attend(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        kv: torch.Tensor,
        metadata: StepMetadata,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        decodes, prompts = metadata.decodes, metadata.prompts
        if prompts is None:
            assert decodes is not None, "a step has at least one request"
            return self._decode(layer, q, kv, decodes, sinks)
        out = self._prefill(layer, q, kv, prompts, sinks)
        if decodes is not None:
            rows = slice(decodes.num_reqs)
            self._decode(layer, q[rows], kv, decodes, sinks, out[rows])
        return out

    def _attend_to_latents(
        self, layer: AttentionLayer, q: torch.Tensor, kv: torch.Tensor, part: StepPart
    ) -> torch.Tensor:
        """``[num_tokens, num_heads, latent_rank]``, of single tokens and chunks alike."""
        from inferplane_kernels_triton.decode_attention import choose_num_splits
        from inferplane_kernels_triton.latent_attention import LatentConfig, latent_attention

        assert isinstance(layer.spec, MLAAttentionSpec)
        cache, rank = Cache.of(kv, layer), layer.spec.latent_rank
        config = self._config(
            "latent_attention", part.num_reqs, LatentConfig.default(q.dtype), layer, q, part
        )
        num_programs = num_processors(q.device) * config.programs_per_processor
        num_splits = part.num_splits.get(layer.num_heads)
        if num_splits is None:
            num_tiles = config.num_tiles(part.query_lens, layer.num_heads)
            num_splits = choose_num_splits(num_tiles, 1, part.longest, num_programs)
            part.num_splits[layer.num_heads] = num_splits
        key = (layer.num_heads, config.rows, layer.head_dim, num_programs)
        if key not in self._workspaces:  # at the first call, which is never recorded: counters begin at zero
            self._workspaces[key] = config.workspace(rank, num_programs, q.device)
        return latent_attention(
            q,
            cache.k[:, :, 0],
            rank,
            part.block_table,
            part.query_start,
            part.seq_lens,
            layer.scale,
            longest_query=part.longest_query,
            num_splits=num_splits,
            workspace=self._workspaces[key],
            cache_scale=None if cache.scales is None else cache.scales[0],
            config=config,
            pdl=self.launch.pdl(q.device),
        )

    def _decode(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        kv: torch.Tensor,
        part: StepPart,
        sinks: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``q``: rows of this part alone, as is ``out``."""
        from inferplane_kernels_triton.decode_attention import (
            DecodeConfig,
            choose_num_splits,
            decode_attention,
        )

        cache, num_kv_heads = Cache.of(kv, layer), layer.num_kv_heads
        num_unsplit = part.num_reqs * num_kv_heads
        config = self._config("decode_attention", num_unsplit, DecodeConfig.default(q.dtype), layer, q, part)
        num_splits = part.num_splits.get(num_kv_heads)
        if num_splits is None:
            num_programs = num_processors(q.device) * config.programs_per_processor
            num_splits = choose_num_splits(part.num_reqs, num_kv_heads, part.longest, num_programs)
            part.num_splits[num_kv_heads] = num_splits
        return decode_attention(
            q,
            cache.k,
            cache.v,
            part.block_table,
            part.seq_lens,
            layer.scale,
            num_splits=num_splits,
            workspace=self._workspace(layer, q.device),
            window=window_of(layer),
            soft_cap=layer.soft_cap,
            sinks=sinks,
            kv_scales=cache.scales,
            out=out,
            config=config,
            pdl=self.launch.pdl(q.device),
        )

    def _prefill(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        kv: torch.Tensor,
        part: StepPart,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """``q``: all rows of the step. The result is as long, and has the part's rows filled in."""
        from inferplane_kernels_triton.prefill_attention import PrefillConfig, prefill_attention

        cache = Cache.of(kv, layer)
        config = self._config(
            "prefill_attention", part.num_reqs, PrefillConfig.default(q.dtype), layer, q, part
        )
        return prefill_attention(
            q,
            cache.k,
            cache.v,
            part.block_table,
            part.query_start,
            part.seq_lens,
            layer.scale,
            window=window_of(layer),
            soft_cap=layer.soft_cap,
            sinks=sinks,
            kv_scales=cache.scales,
            config=config,
            pdl=self.launch.pdl(q.device),
        )

    def _config(
        self,
        kernel: str,
        size: int,
        default: Config,
        layer: AttentionLayer,
        q: torch.Tensor,
        part: StepPart,
    ) -> Config:
        """As measured for ``size`` and the longest sequence, which was done with heads up to a size: tiles of larger
        ones may not fit on a processor."""
        if layer.head_dim > MAX_MEASURED_HEAD_DIM and not isinstance(layer.spec, MLAAttentionSpec):
            return default
        key = (layer.num_kv_heads, layer.head_dim)
        if key not in part.configs:
            shape = (size, min(part.longest, USUAL_LENGTH))
            part.configs[key] = self.launch.config(kernel, shape, default, q)
        config: Config = part.configs[key]
        return config

    def _workspace(self, layer: AttentionLayer, device: torch.device) -> DecodeWorkspace:
        """Large enough for any batch that is split at all."""
        from inferplane_kernels_triton.decode_attention import MAX_PROGRAMS_PER_PROCESSOR, DecodeWorkspace

        key = (layer.num_heads, layer.num_kv_heads, layer.head_dim)
        if key not in self._workspaces:
            parts = -(-MAX_PROGRAMS_PER_PROCESSOR * num_processors(device) // layer.num_kv_heads)
            self._workspaces[key] = DecodeWorkspace.allocate(parts, *key, 1, device)
        return self._workspaces[key]


def scales_of(layer: AttentionLayer) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Of keys and values in an fp8 cache, as kernels take them; latents are both, and are divided by the keys'."""
    if layer.kv_scales is None:
        return None
    scales = layer.kv_scales
    return scales.k, scales.k if isinstance(layer.spec, MLAAttentionSpec) else scales.v


def window_of(layer: AttentionLayer) -> int | None:
    """Tokens that a token sees, itself included; None for all earlier ones."""
    return layer.spec.window if isinstance(layer.spec, SlidingWindowSpec) else None


@cache
def num_processors(device: torch.device) -> int:
    """Processors of the device that run a program each; 1 on the host, where kernels are interpreted."""
    if device.type == "cpu":
        return 1
    properties: Any = torch.get_device_module(device).get_device_properties(device)
    return int(properties.gpu_subslice_count if device.type == "xpu" else properties.multi_processor_count)
