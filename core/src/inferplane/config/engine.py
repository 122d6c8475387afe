"""The resolved configuration. Built once by `inferplane.config.resolve.resolve`, then read-only everywhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

DTYPES = ("float32", "bfloat16", "float16")


class ConfigError(ValueError):
    """A setting that cannot be honoured. ``option`` is the name of the argument at fault."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(message)
        self.option = option


@dataclass(frozen=True)
class PoolerConfig:
    """How a model makes one vector of a prompt. Read from the model's files by `inferplane.models.pooler_config`."""

    kind: str
    """Which hidden states count: ``cls`` the first token's, ``last`` the last one's, ``mean`` the mean of all."""
    tasks: tuple[str, ...]
    """Of `inferplane.request.PoolingTask`, those that it can do."""
    normalize: bool = False
    """Whether embeddings have length 1 unless a request says otherwise."""
    labels: tuple[str, ...] = ()
    """Names of the classes; none for embeddings."""
    activation: str = "none"
    """What makes probabilities of class logits: ``softmax``, ``sigmoid``, or ``none``."""
    max_dimensions: int = 0
    """Numbers of an embedding; 0 for classes."""
    dimensions: tuple[int, ...] | None = ()
    """Shorter embeddings that a request may ask for: these, or any where it is None."""
    prompts: dict[str, str] = field(default_factory=dict)
    """Texts that are put before a text, by name."""
    default_prompt: str = ""
    """The text that is put before one for which no name is given."""
    source: str = "the model's configuration"
    """Where this was read."""


@dataclass(frozen=True)
class ModelConfig:
    model: str
    """As the user wrote it."""
    path: str
    """The folder or file on this machine."""
    hf_config: dict[str, Any]
    architecture: str
    dtype: str
    """One of `DTYPES`: weights, activations and KV unless something says otherwise."""
    max_model_len: int
    """Most tokens of prompt and output together."""
    vocab_size: int
    is_max_model_len_explicit: bool = False
    """Whether the user asked for this length (then not fitting is an error) or it came from the model."""
    quantization: str | None = None
    """How plain weights are quantized while they are loaded; None leaves them as they are stored."""
    pooler: PoolerConfig | None = None
    """Of a model that makes vectors of prompts; None for one that generates."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """``generate``, or what its pooler can do."""
        return ("generate",) if self.pooler is None else self.pooler.tasks


@dataclass(frozen=True)
class LoadConfig:
    load_format: str = "auto"
    """``auto`` reads the checkpoint; ``safetensors`` and ``gguf`` insist on a kind; ``dummy`` draws random weights;
    others are plugins'."""
    progress: bool = True


@dataclass(frozen=True)
class CacheConfig:
    block_size: int = 16
    """Tokens per KV block."""
    kv_cache_bytes: int | None = None
    """None: sized from the memory that is really available."""
    enable_prefix_caching: bool = True
    prefix_cache_bytes: int | None = None
    """The size up to which the KV cache grows before cached prefixes are evicted; None: all of it."""
    memory_share: float | None = None
    """Part of the device's memory to use, or of the machine's free memory where that is the device's; None: default."""
    kv_dtype: str | None = None
    """float16 or one of `inferplane.api.kv.QUANTIZED_KV`; None: keys and values are of the activations' type."""


@dataclass(frozen=True)
class SchedulerConfig:
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    """Token budget of one step."""
    policy: str = "fcfs"
    max_num_waiting: int | None = None
    """Requests that may wait before new ones are turned away; None for no limit."""
    async_scheduling: bool = False
    """Whether a step is planned and started while the one before still runs."""
    max_num_mixed_prompt_tokens: int | None = None
    """Most tokens of prompts in a step in which requests decode, but for a few steps in a row if these are few and
    fewer than those with a prompt; None for as many as the budget leaves."""


@dataclass(frozen=True)
class GraphConfig:
    """Decode steps that are recorded once and replayed, where the platform can."""

    is_enabled: bool = True
    batch_sizes: tuple[int, ...] = ()
    """Ascending. A step is run with the next larger one; a batch above the last runs without a graph."""


@dataclass(frozen=True)
class ParallelConfig:
    tensor_parallel_size: int = 1
    executor: str = "auto"
    """Rank 0 lives in the engine's process. ``local`` allows no other; ``multiprocess`` gives each other one a process
    of its own; ``auto`` picks by the world size."""

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size


@dataclass(frozen=True)
class DeviceConfig:
    platform: str
    """Name of the platform plugin that serves the device."""
    index: int = 0
    num_threads: int | None = None
    """Host threads of each worker; None lets the platform decide."""
    attention_backend: str | None = None
    """None: the best that supports the model."""


@dataclass(frozen=True)
class EngineConfig:
    model: ModelConfig
    device: DeviceConfig
    load: LoadConfig = field(default_factory=LoadConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    graphs: GraphConfig = field(default_factory=GraphConfig)
    count_expert_tokens: bool = False
    """Whether routers count the tokens of each expert."""
    seed: int = 0
    plugin_options: dict[str, str | int | float | bool | None] = field(default_factory=dict)
    """Every setting that an installed plugin declares, by name: as the user set it, or its default."""

    @property
    def kv_dtype(self) -> str:
        """How keys and values are stored."""
        return self.cache.kv_dtype or self.model.dtype
