"""`ModelWorker`: a worker made of the core's runner, for any platform that has a device runtime."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from inferplane.api.attention import AttentionBackend, AttentionLayer, AttentionQuery
from inferplane.api.comm import Communicator, SoloCommunicator
from inferplane.api.kv import KVCacheConfig, KVCacheSpec
from inferplane.api.model import BuildContext, Model
from inferplane.api.worker import Worker, WorkerContext
from inferplane.plan import StepPlan, StepResult
from inferplane.runner.batch import Batch
from inferplane.runner.kv_groups import AttentionChooser, allocate, make_groups
from inferplane.runner.memory import check_kv_cache_bytes, kv_budget_bytes
from inferplane.runner.runner import Runner
from inferplane.runner.sampler import Sampler
from inferplane.runner.warm_up import warm_up_plans

logger = logging.getLogger("inferplane.worker")


class ModelWorker(Worker):
    """Rank 0 samples; the others run the same plans and are told its tokens."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self.config = context.config
        self.is_sampling = context.group.rank == 0
        self.runtime = context.platform.device_runtime(context.device)
        self.comm: Communicator = SoloCommunicator()
        self._attention = AttentionChooser(self._choose_attention)
        self._model: Model | None = None
        self._runner: Runner | None = None
        self._kv_config: KVCacheConfig | None = None

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
            names = ", ".join(self._attention.names)
            seconds = time.perf_counter() - started
            logger.info(
                "model loaded in %.1f s: %s, attention by %s", seconds, self.config.model.dtype, names
            )

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
        return BuildContext(
            config=config,
            ops=plugins.resolve_ops(device, dtype),
            comm=self.comm,
            device=self.runtime.torch_device,
            dtype=dtype,
            choose_linear=lambda shape: plugins.choose_linear(shape, device),
            choose_attention=self._attention,
        )

    def _choose_attention(self, layer: AttentionLayer) -> type[AttentionBackend]:
        dtype = getattr(torch, self.config.model.dtype)
        query = AttentionQuery(layer=layer, dtype=dtype, kv_dtype=dtype, device=self.context.device)
        return self.context.plugins.choose_attention(query, self.config.device.attention_backend)

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
        return {layer.name: layer.spec for layer in self.model.attention_layers()}

    def available_kv_bytes(self) -> int:
        memory, is_host_memory = self.runtime.memory(), self.runtime.is_host_memory
        if (asked := self.config.cache.kv_cache_bytes) is not None:
            check_kv_cache_bytes(asked, memory)
            return asked
        return kv_budget_bytes(memory, is_host_memory, self.config, self.kv_cache_specs())

    def init_kv_cache(self, kv_config: KVCacheConfig) -> None:
        config, layers = self.config, self.model.attention_layers()
        kv = allocate(
            kv_config, layers, self._attention, getattr(torch, config.model.dtype), self.runtime.torch_device
        )
        max_num_seqs, vocab_size = config.scheduler.max_num_seqs, config.model.vocab_size
        block_sizes = [group.spec.block_size for group in kv_config.groups]
        sampler = None
        if self.is_sampling:
            sampler = Sampler(max_num_seqs, vocab_size, self.runtime, self.context.plugins.logits_processors)
        self._runner = Runner(
            model=self.model,
            runtime=self.runtime,
            kv=kv,
            groups=make_groups(kv_config, layers, self._attention),
            batch=Batch(max_num_seqs, config.model.max_model_len, block_sizes),
            sampler=sampler,
            vocab_size=vocab_size,
        )
        self._kv_config = kv_config

    def warm_up(self) -> None:
        if self._kv_config is None:
            raise RuntimeError("the worker has no KV cache yet: call init_kv_cache first")
        for plan in warm_up_plans(self._kv_config, self.config.model.max_model_len):
            self.execute(plan)
            if self.is_sampling and plan.num_scheduled_tokens:
                self.runner.sample()
        self.runtime.synchronize()

    def execute(self, plan: StepPlan) -> None:
        self.runner.execute(plan)

    def sample(self) -> StepResult:
        return self.runner.sample()

    def accept(self, sampled_token_ids: Mapping[str, Sequence[int]]) -> None:
        self.runner.accept(sampled_token_ids)

    def close(self) -> None:
        self._runner = None
        self._model = None
        self.comm.close()
