"""`ModelWorker`: a worker made of the core's runner, for any platform that has a device runtime."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from inferplane.api.attention import AttentionBackend, AttentionLayer, AttentionQuery
from inferplane.api.comm import Communicator, SoloCommunicator
from inferplane.api.kv import KVCacheConfig, KVCacheSpec
from inferplane.api.kv_dtype import stored_type
from inferplane.api.model import BuildContext, Model
from inferplane.api.worker import PendingStep, Worker, WorkerContext
from inferplane.engine.kv_grouping import group_layers
from inferplane.layers import Attention, RotaryEmbedding, Router, walk_layers
from inferplane.plan import StepPlan
from inferplane.quantization.registry import DEQUANTIZE, make_format
from inferplane.runner.batch import Batch
from inferplane.runner.device_runtime import device_memory, make_runtime
from inferplane.runner.kv_groups import AttentionChooser, allocate, make_groups
from inferplane.runner.memory import check_kv_cache_bytes, kv_budget_bytes, longest_sequence
from inferplane.runner.pooling_runner import PoolingRunner
from inferplane.runner.runner import Runner
from inferplane.runner.sampler import Sampler
from inferplane.runner.warm_up import largest_plan, warm_up_plans

if TYPE_CHECKING:
    from inferplane.api.device import GraphBackend

logger = logging.getLogger("inferplane.worker")


def limit_positions(model: Model, num_positions: int) -> None:
    """Keeps tables by position as short as the sequences that there is memory for."""
    for layer in walk_layers(model):
        if isinstance(layer, RotaryEmbedding):
            layer.limit_positions(num_positions)


def _warn_of_missing_scales(model: Model, kv_dtype: str) -> None:
    scales = [layer.kv_scales for layer in walk_layers(model) if isinstance(layer, Attention)]
    if missing := [each.prefix for each in scales if each is not None and not each.is_given]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        logger.warning(
            "the checkpoint has no scales of keys and values for %s%s: stored as %s they are divided by 1",
            missing[0],
            more,
            kv_dtype,
        )


class ModelWorker(Worker):
    """Rank 0 samples; the others run the same plans and get its tokens."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self.config = context.config
        self.is_sampling = context.group.rank == 0
        self.runtime = make_runtime(context.platform, context.device)
        self.comm: Communicator = SoloCommunicator()
        self._attention = AttentionChooser(self._choose_attention)
        self._model: Model | None = None
        self._runner: Runner | None = None
        self._kv_config: KVCacheConfig | None = None
        self._max_len = self.config.model.max_model_len
        """Of any sequence, once the size of the pool is known."""

    def set_up(self) -> None:
        self.runtime.set_up(self.config, self.context.group.rank)

    def join_group(self) -> None:
        group = self.context.group
        if group.world_size > 1:
            self.comm = self.context.platform.communicator(group, self.runtime)

    def load_model(self) -> None:
        from inferplane.models.registry import load_model

        started = time.perf_counter()
        ctx = self.build_context()
        with torch.inference_mode():
            self._model = load_model(ctx, self._open_tensors, self.context.plugins.models()).eval()
        if self.is_sampling:
            names = ", ".join(self._attention.names) or "the op encoder_attention"
            seconds = time.perf_counter() - started
            logger.info(
                "model loaded in %.1f s: %s, attention by %s", seconds, self.config.model.dtype, names
            )
            _warn_of_missing_scales(self._model, self.config.kv_dtype)

    def _open_tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        """The stored weights, read by the plugin that ``load_format`` names, or as the checkpoint they are."""
        from inferplane.models.loader import LOAD_FORMATS, open_checkpoint
        from inferplane.models.source import resolve_model

        load, path = self.config.load, self.config.model.path
        if load.load_format not in LOAD_FORMATS:
            return self.context.plugins.weight_loader(load.load_format)(Path(path))
        checkpoint = open_checkpoint(resolve_model(path, progress=False), load.load_format)
        return checkpoint.tensors(progress=load.progress and self.is_sampling)

    def build_context(self) -> BuildContext:
        """The choices that a model is built with; a platform's worker may make others."""
        plugins, device, config = self.context.plugins, self.context.device, self.config
        dtype = getattr(torch, config.model.dtype)
        dequantizes = config.model.quantization == DEQUANTIZE
        return BuildContext(
            config=config,
            ops=plugins.resolve_ops(device, dtype),
            comm=self.comm,
            device=self.runtime.torch_device,
            dtype=dtype,
            choose_linear=lambda shape: plugins.choose_linear(shape, device),
            choose_attention=self._attention,
            quantization=make_format(config, plugins.quant_formats()),
            choose_quantized=lambda shape: None if dequantizes else plugins.choose_quantized(shape, device),
            choose_experts=lambda shape: None if dequantizes else plugins.choose_experts(shape, device),
        )

    def _choose_attention(self, layer: AttentionLayer) -> type[AttentionBackend]:
        dtype = getattr(torch, self.config.model.dtype)
        kv_dtype = stored_type(layer.spec, dtype)
        query = AttentionQuery(layer=layer, dtype=dtype, kv_dtype=kv_dtype, device=self.context.device)
        backend = self.context.plugins.choose_attention(query, self.config.device.attention_backend)
        backend.start_compiling(query)
        return backend

    @property
    def model(self) -> Model:
        if self._model is None:
            raise RuntimeError("the worker has no model yet: call load_model first")
        return self._model

    @property
    def runner(self) -> Runner:
        if self._runner is None:
            raise RuntimeError("the worker has no KV cache yet: call init_kv_cache first")
        return self._runner

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        return {
            layer.name: replace(layer.spec, layout=self._attention.keeper(layer).name)
            for layer in self.model.kv_layers()
        } | {layer.name: layer.spec for layer in self.model.encoder_layers()}

    def available_kv_bytes(self) -> int:
        runtime, config = self.runtime, self.config
        if (asked := config.cache.kv_cache_bytes) is not None:
            check_kv_cache_bytes(asked, device_memory(runtime, self.context.device))
            return asked
        step_bytes = None if runtime.is_host_memory else runtime.measure_peak_bytes(self._run_largest_step)
        specs = self.kv_cache_specs()
        memory = device_memory(runtime, self.context.device)
        return kv_budget_bytes(memory, runtime.is_host_memory, config, specs, step_bytes)

    def _run_largest_step(self) -> None:
        config = self.config
        max_step_tokens = config.scheduler.max_num_batched_tokens
        groups = group_layers(self.kv_cache_specs(), config.model.max_model_len, max_step_tokens)
        more_pools = (1,) * (len({group.pool for group in groups}) - 1)
        kv_config = KVCacheConfig(1, groups, more_pools)
        longest = min(config.model.max_model_len, config.scheduler.max_num_batched_tokens)
        limit_positions(self.model, longest)
        runner = self._make_runner(kv_config, longest)
        plan = largest_plan(config, [group.spec.block_size for group in kv_config.groups])
        self._run(runner, plan)

    def init_kv_cache(self, kv_config: KVCacheConfig) -> None:
        self._kv_config = kv_config
        self._max_len = longest_sequence(kv_config, self.config.model.max_model_len)
        limit_positions(self.model, self._max_len)
        # one block more than the scheduler knows of, for rows of a recorded step that no request fills
        first, *more = [num + 1 for num in kv_config.pool_blocks] or [1]
        with_scratch = replace(kv_config, num_blocks=first, more_pools=tuple(more))
        self._runner = self._make_runner(with_scratch, self._max_len)

    def _make_runner(self, kv_config: KVCacheConfig, max_len: int) -> Runner:
        config, layers, runtime = self.config, self.model.kv_layers(), self.runtime
        dtype = getattr(torch, config.model.dtype)
        max_num_seqs, vocab_size = config.scheduler.max_num_seqs, config.model.vocab_size
        kv = allocate(kv_config, layers, self._attention.keeper, dtype, runtime.torch_device)
        groups = make_groups(kv_config, layers, self._attention.keeper)
        batch = Batch(max_num_seqs, max_len, [group.spec.block_size for group in kv_config.groups])
        if (pooler := config.model.pooler) is not None:
            return PoolingRunner(self.model, runtime, kv, groups, batch, pooler, vocab_size)
        sampler = None
        if self.is_sampling:
            plugins = self.context.plugins
            ops = plugins.resolve_ops(self.context.device, dtype)
            sampler = Sampler(
                max_num_seqs,
                vocab_size,
                runtime,
                plugins.logits_processors,
                best_token=ops.best_token,
                draw_token=ops.draw_token,
            )
        return Runner(self.model, runtime, kv, groups, batch, sampler, vocab_size, self.comm)

    def warm_up(self) -> None:
        if self._kv_config is None:
            raise RuntimeError("the worker has no KV cache yet: call init_kv_cache first")
        for plan in warm_up_plans(self._kv_config, self._max_len):
            self._run(self.runner, plan)
        with torch.inference_mode():
            for _, counts in self._expert_counts():
                counts.zero_()
        generates = self.config.model.pooler is None
        if generates and self.config.graphs.is_enabled and (backend := self.runtime.graphs()) is not None:
            self._record_graphs(backend, self._kv_config)
        self.runtime.synchronize()

    def _run(self, runner: Runner, plan: StepPlan) -> None:
        """One step from its plan to its result."""
        runner.execute(plan)
        if self.is_sampling:
            runner.sample().result()
        else:
            runner.accept()

    def _expert_counts(self) -> list[tuple[str, torch.Tensor]]:
        """Of each router that counts, ``[num_experts]``."""
        routers = [layer for layer in walk_layers(self.model) if isinstance(layer, Router)]
        return [(each.name, each.num_tokens) for each in routers if each.num_tokens is not None]

    def expert_tokens(self) -> dict[str, list[int]]:
        counts = self._expert_counts()
        if not counts:
            return {}
        # one copy from the device
        at_host = torch.cat([each for _, each in counts]).cpu().split([len(each) for _, each in counts])
        return {name: each.tolist() for (name, _), each in zip(counts, at_host)}

    def _record_graphs(self, backend: GraphBackend, kv_config: KVCacheConfig) -> None:
        """Where something in the way makes that impossible, steps run without, which is slower and no less right."""
        runner, sizes = self.runner, self.config.graphs.batch_sizes
        unsafe = sorted({name for group in runner.groups for name in group.unsafe_backends})
        if not self.comm.graph_safe:
            unsafe.append(type(self.comm).__name__)
        # what records in passing launches cheaply, too, and little is lost without
        level = logging.INFO if backend.records_on_demand else logging.WARNING
        if unsafe or not sizes:
            why = f"{', '.join(unsafe)} cannot be recorded" if unsafe else "no batch sizes are given"
            logger.log(level, "decode steps run without graphs: %s", why)
            return
        scratch_blocks = [kv_config.pool_blocks[group.pool] for group in kv_config.groups]
        try:
            seconds = runner.record(backend, sizes, self._max_len, scratch_blocks)
        except RuntimeError as error:
            logger.log(level, "decode steps run without graphs: recording them failed: %s", error)
            return
        if self.is_sampling and not backend.records_on_demand:
            logger.info("recorded %d graphs for decode steps in %.1f s", len(sizes), seconds)

    def execute(self, plan: StepPlan) -> None:
        self.runner.execute(plan)

    def sample(self) -> PendingStep:
        return self.runner.sample()

    def accept(self) -> None:
        self.runner.accept()

    def profile(self, run: Callable[[], object]) -> str | None:
        return self.runtime.profile(run)

    def close(self) -> None:
        self._runner = None
        self._model = None
        self.comm.close()
        self.runtime.tear_down()
