"""From what the user wrote to what the engine runs: `resolve` fills every open setting once, or says what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from inferplane.config.args import EngineArgs
from inferplane.config.defaults import Setting, fill, without_streams
from inferplane.config.engine import (
    DTYPES,
    CacheConfig,
    ConfigError,
    DeviceConfig,
    EngineConfig,
    GraphConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from inferplane.config.environment import environment
from inferplane.config.plugin_options import plugin_options
from inferplane.request import MAX_SEED

if TYPE_CHECKING:
    from inferplane.api.device import DeviceDescriptor
    from inferplane.api.platform import Platform
    from inferplane.plugins import PluginSet


@dataclass(frozen=True)
class Resolution:
    """A configuration, the device that it is for, and who set what in it."""

    config: EngineConfig
    device: DeviceDescriptor
    settings: list[Setting]


def resolve(
    args: EngineArgs, plugins: PluginSet, *, progress: bool = True, serves_streams: bool = True
) -> EngineConfig:
    """The configuration that ``args`` asks for on this machine. Imports no torch and loads no weights.

    Without ``serves_streams`` a platform's defaults for streams' sake (`STREAM_SETTINGS`) are left out.

    Raises `ConfigError` (a setting), `ModelLoadError` (the checkpoint) or `PluginError` (the device).
    """
    return resolve_in_full(args, plugins, progress=progress, serves_streams=serves_streams).config


def resolve_in_full(
    args: EngineArgs,
    plugins: PluginSet,
    *,
    progress: bool = True,
    needs_weights: bool = True,
    serves_streams: bool = True,
) -> Resolution:
    """As `resolve`. Without ``needs_weights`` a folder that holds ``config.json`` alone is a model too."""
    from inferplane.models.fallback import has_fallback
    from inferplane.models.hf_config import usual_form
    from inferplane.models.loader import LOAD_FORMATS, open_checkpoint
    from inferplane.models.registry import known_architectures
    from inferplane.models.remote_code import refuse_unknown_code
    from inferplane.models.source import resolve_model

    _check_values(args)
    _check_names(args, plugins)
    device = plugins.select_device(args.device)
    platform = plugins.platform(device)
    sources = plugins.model_sources()
    source = resolve_model(args.model, revision=args.revision, progress=progress, fetchers=sources)
    reads_weights = needs_weights and args.load_format in LOAD_FORMATS
    checkpoint = open_checkpoint(source, args.load_format if reads_weights else "dummy")
    hf_config = usual_form(checkpoint.hf_config)
    if source.kind == "folder":
        known = known_architectures(plugins.models())
        refuse_unknown_code(source.path, hf_config, lambda name: name in known or has_fallback(name))
    dtype = _checkpoint_dtype(hf_config)
    if hf_config.get("quantization_config"):
        defaults = platform.quantized_defaults(args, device, dtype, hf_config)
    else:
        defaults = platform.config_defaults(args, device, dtype)
    if not serves_streams:
        defaults = without_streams(defaults)
    asked = args
    args, settings = fill(args, defaults, device.platform)
    _check_defaults(args, device.platform)
    model = _model_config(args, str(source.path), hf_config, plugins)
    config = EngineConfig(
        model=model,
        device=DeviceConfig(device.platform, device.index, args.num_threads, args.attention_backend),
        load=LoadConfig(args.load_format, progress),
        cache=CacheConfig(
            args.block_size or 16,
            args.kv_cache_bytes,
            args.enable_prefix_caching and _can_share_prefixes(model),
            args.prefix_cache_bytes,
            args.memory_share,
            None if args.kv_cache_dtype == "auto" else args.kv_cache_dtype,
        ),
        scheduler=SchedulerConfig(
            args.max_num_seqs or 256,
            _step_tokens(args, asked.max_num_batched_tokens, model),
            args.scheduler_policy,
            args.max_num_waiting,
            bool(args.async_scheduling),
            args.max_num_mixed_prompt_tokens,
        ),
        parallel=ParallelConfig(args.tensor_parallel_size, args.executor),
        graphs=_graph_config(args),
        count_expert_tokens=args.count_expert_tokens,
        seed=args.seed,
        plugin_options=plugin_options(args.plugin_options, plugins.engine_options()),
    )
    _check_combination(config, plugins)
    _check_devices(config, device, platform, plugins)
    platform.validate_config(config, device)
    plugins.validate_config(config, device)
    return Resolution(config, device, [_as_resolved(setting, config, device) for setting in settings])


def _as_resolved(setting: Setting, config: EngineConfig, device: DeviceDescriptor) -> Setting:
    """What the checkpoint and the plugins decided, for those that stand open in `EngineArgs`."""
    if setting.name == "device" and setting.value is None:
        source = "INFERPLANE_DEVICE" if environment("INFERPLANE_DEVICE") else "inferplane"
        return Setting("device", f"{device.platform}:{device.index}", source)
    if setting.name == "max_model_len" and setting.value is None:
        return Setting("max_model_len", config.model.max_model_len, "model", "what it was trained for")
    if setting.name == "task" and setting.value == "auto":
        pooler = config.model.pooler
        return Setting("task", "generate" if pooler is None else pooler.tasks[0], "model")
    if setting.name == "max_num_batched_tokens" and setting.value not in (
        None,
        budget := config.scheduler.max_num_batched_tokens,
    ):
        return Setting(setting.name, budget, "model", "reads a prompt in one step")
    if setting.name == "plugin_options":
        return replace(setting, value=config.plugin_options)
    return setting


def _can_share_prefixes(model: ModelConfig) -> bool:
    """What the prefix cache holds of a token is no hidden state, which pooling may need of every token."""
    return model.pooler is None or model.pooler.kind == "last"


def _step_tokens(args: EngineArgs, asked: int | None, model: ModelConfig) -> int:
    """An encoder reads a prompt in one step, so that its longest one should fit in."""
    from inferplane.models.catalog import is_encoder

    budget = args.max_num_batched_tokens or 2048
    return max(budget, model.max_model_len) if asked is None and is_encoder(model.architecture) else budget


def _model_config(args: EngineArgs, path: str, hf_config: dict[str, Any], plugins: PluginSet) -> ModelConfig:
    from inferplane.models.catalog import is_encoder
    from inferplane.models.hf_fields import whole_number
    from inferplane.models.pooler_config import read_pooler, sentence_length
    from inferplane.models.registry import known_architectures, resolve_architecture
    from inferplane.models.task import choose_task

    architecture = resolve_architecture(hf_config, plugins.models())
    known = known_architectures(plugins.models())
    task, architecture = choose_task(args.task, Path(path), architecture, known)
    pooler, sentence_len = None, None
    if task != "generate":
        pooler = read_pooler(Path(path), hf_config, task, is_encoder=is_encoder(architecture))
        sentence_len = sentence_length(Path(path))
    return ModelConfig(
        model=args.model or "demo",
        path=path,
        hf_config=hf_config,
        architecture=architecture,
        dtype=args.dtype,
        max_model_len=_max_model_len(args.max_model_len, hf_config, sentence_len),
        vocab_size=whole_number(hf_config, "vocab_size"),
        is_max_model_len_explicit=args.max_model_len is not None,
        quantization=_quantization(args.quantization, hf_config, plugins),
        pooler=pooler,
    )


def _quantization(asked: str | None, hf_config: Mapping[str, Any], plugins: PluginSet) -> str | None:
    """What the user asked for. A checkpoint's own method is checked as well, before any weight is read."""
    from inferplane.models.errors import ModelLoadError
    from inferplane.quantization.registry import format_target, quantization_method

    method, formats = quantization_method(hf_config), plugins.quant_formats()
    format_target(method, None, formats)
    try:
        format_target(method, asked, formats)
    except ModelLoadError as error:
        raise ConfigError("quantization", str(error)) from error
    return asked


def _checkpoint_dtype(hf_config: Mapping[str, Any]) -> str:
    stored = str(hf_config.get("dtype") or hf_config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return stored if stored in DTYPES else "bfloat16"


def _max_model_len(asked: int | None, hf_config: Mapping[str, Any], usual: int | None = None) -> int:
    """``usual`` is what the model's makers advise where it has positions for more."""
    from inferplane.models.rope_config import max_model_len

    trained = max_model_len(hf_config)
    if asked is not None and trained is not None and asked > trained:
        raise ConfigError(
            "max_model_len",
            f"max_model_len is {asked}, but the model has positions for {trained} tokens only",
        )
    return asked or min(trained or 2048, usual or trained or 2048)


def _graph_config(args: EngineArgs) -> GraphConfig:
    max_num_seqs = args.max_num_seqs or 256
    # a recorded step has rows of no request, whose tokens would be counted
    is_enabled = args.enable_graphs and not args.count_expert_tokens
    if args.graph_batch_sizes is None:
        return GraphConfig(is_enabled, default_batch_sizes(max_num_seqs))
    try:
        sizes = sorted({int(size) for size in args.graph_batch_sizes.split(",")})
    except ValueError:
        sizes = [0]
    if sizes[0] < 1 or sizes[-1] > max_num_seqs:
        raise ConfigError(
            "graph_batch_sizes",
            f"graph_batch_sizes are whole numbers from 1 to max_num_seqs ({max_num_seqs}) with commas between them, "
            f"got {args.graph_batch_sizes!r}",
        )
    return GraphConfig(is_enabled, tuple(sizes))


def default_batch_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then ever wider steps of at most half of what is there: recording each takes start-up time, and a
    product of few rows takes as long as one of some more."""
    sizes = [size for size in (1, 2, 4) if size < max_num_seqs]
    size = 8
    while size < max_num_seqs:
        sizes.append(size)
        size += 8 if size < 32 else 16 if size < 64 else 32 if size < 256 else size // 256 * 64
    return (*sizes, max_num_seqs)


_AT_MOST = {"num_threads": 1024, "max_num_seqs": 2**16, "max_num_batched_tokens": 2**24, "block_size": 2**16}
"""Beyond any machine: numbers from here on are slips, and the memory or the threads for them would fail obscurely."""

_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def _check_values(args: EngineArgs) -> None:
    kinds = get_type_hints(EngineArgs)
    for setting in fields(args):
        if setting.name == "plugin_options":  # judged by those who declare them
            continue
        name, value, kind = setting.name, getattr(args, setting.name), kinds[setting.name]
        kinds_of_value = (kind, int) if float in get_args(kind) else kind
        is_stray_bool = isinstance(value, bool) and bool not in (kind, *get_args(kind))
        if not isinstance(value, kinds_of_value) or is_stray_bool:
            wanted = " or ".join(_KINDS.get(each, "None") for each in get_args(kind) or (kind,))
            raise ConfigError(name, f"{name} must be {wanted}, got {value!r}")
        choices = setting.metadata.get("choices")
        if choices and value not in choices:
            raise ConfigError(name, f"{name} must be one of {', '.join(choices)}, got {value!r}")
    at_least_one = (
        "max_model_len",
        "num_threads",
        "tensor_parallel_size",
        "block_size",
        "kv_cache_bytes",
        "prefix_cache_bytes",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_num_mixed_prompt_tokens",
        "max_num_waiting",
        "health_timeout_s",
        "step_timeout_s",
    )
    for name in at_least_one:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(name, f"{name} must be at least 1, got {value}")
    for name, most in _AT_MOST.items():
        value = getattr(args, name)
        if value is not None and value > most:
            raise ConfigError(name, f"{name} must be at most {most}, got {value}")
    if args.memory_share is not None and not 0 < args.memory_share <= 1:
        raise ConfigError(
            "memory_share", f"memory_share must be above 0 and at most 1, got {args.memory_share}"
        )
    if not -MAX_SEED - 1 <= args.seed <= MAX_SEED:
        raise ConfigError("seed", f"seed must be from {-MAX_SEED - 1} to {MAX_SEED}, got {args.seed}")


def _check_defaults(args: EngineArgs, platform: str) -> None:
    """A platform's values are held to what is asked of a user's; the user has passed when this is called."""
    if args.dtype == "auto":
        raise ConfigError(
            "device", f"platform {platform!r} gave no default for dtype, which each platform must"
        )
    try:
        _check_values(args)
    except ConfigError as error:
        raise ConfigError("device", f"platform {platform!r} gave a wrong default: {error}") from error


def _check_names(args: EngineArgs, plugins: PluginSet) -> None:
    """Settings that name something that a plugin may have brought."""
    from inferplane.models.loader import LOAD_FORMATS

    for name, known in {
        "executor": {"auto", "local", "multiprocess", *plugins.executors()},
        "load_format": {*LOAD_FORMATS, *plugins.weight_loaders()},
        "scheduler_policy": {"fcfs", "priority", *plugins.scheduler_policies()},
    }.items():
        if (value := getattr(args, name)) not in known:
            there = ", ".join(sorted(known))
            raise ConfigError(name, f"{name} {value!r} is unknown; there are {there}")


def _check_devices(
    config: EngineConfig, device: DeviceDescriptor, platform: Platform, plugins: PluginSet
) -> None:
    ranks, num_devices = config.parallel.world_size, len(plugins.devices_from(device))
    if ranks > num_devices and not platform.ranks_share_device:
        raise ConfigError(
            "tensor_parallel_size",
            f"tensor_parallel_size {ranks} needs as many devices from {device.platform}:{device.index} on, and this "
            f"process sees {num_devices}: lower it, or choose an earlier device",
        )


def _check_combination(config: EngineConfig, plugins: PluginSet) -> None:
    from inferplane.models.registry import why_one_rank

    ranks = config.parallel.tensor_parallel_size
    if ranks > 1 and (reason := why_one_rank(config.model.architecture, plugins.models())):
        raise ConfigError(
            "tensor_parallel_size",
            f"{config.model.architecture} {reason}, which is for one rank, not {ranks}: leave tensor_parallel_size out",
        )
    num_heads = config.model.hf_config.get("num_attention_heads")
    if isinstance(num_heads, int) and num_heads % ranks:
        raise ConfigError(
            "tensor_parallel_size",
            f"the model's {num_heads} attention heads do not divide over {ranks} ranks; use a divisor of {num_heads}",
        )
    if config.parallel.executor == "local" and ranks > 1:
        raise ConfigError("executor", f"executor local runs one rank, but tensor_parallel_size is {ranks}")
    if config.cache.kv_dtype == "float16" and config.model.dtype != "float32":
        raise ConfigError(
            "kv_cache_dtype",
            f"kv_cache_dtype float16 is for float32 activations, but dtype is {config.model.dtype}: leave it out",
        )
    scheduler = config.scheduler
    if scheduler.max_num_batched_tokens < scheduler.max_num_seqs:
        raise ConfigError(
            "max_num_batched_tokens",
            f"max_num_batched_tokens ({scheduler.max_num_batched_tokens}) is below max_num_seqs "
            f"({scheduler.max_num_seqs}): not every running request would get a token in each step",
        )
