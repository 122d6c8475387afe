"""`EngineArgs`: every engine setting once, with the text and group that the command line shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from inferplane.api.kv import QUANTIZED_KV


def option(default: Any, group: str, help: str, **cli: Any) -> Any:
    """A field that is also a command-line option; of one that is on by default, the option and the help turn it off.

    ``cli`` goes to the option as is (``choices``, ``metavar``, …)."""
    return field(default=default, metadata={"group": group, "help": help, **cli})


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """What a user may set, flat; ``LLM(**kwargs)`` and the command line both fill it. None means "decide for me"."""

    model: str | None = None
    """A folder, a GGUF file, a Hugging Face id, or None for the demo model. The command line takes it as MODEL."""
    revision: str | None = option(None, "Model", "Branch, tag or commit of a Hugging Face id.")
    dtype: str = option(
        "auto",
        "Model",
        "Type of weights and activations.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str | None = option(
        None,
        "Model",
        "Quantize a plain checkpoint while it is loaded: fp8, int8, int4 or mxfp4, or a plugin's way; or dequantize "
        "a quantized one. Default: as it is stored.",
    )
    task: str = option(
        "auto",
        "Model",
        "What the model is for: generate text, embed texts, or classify them. Default: what its files say.",
        choices=("auto", "generate", "embed", "classify"),
    )
    max_model_len: int | None = option(
        None, "Model", "Most tokens of prompt and output together. Default: what the model was trained for."
    )
    load_format: str = option(
        "auto",
        "Model",
        "auto reads the checkpoint; safetensors and gguf insist on that kind; dummy draws random weights for a folder "
        "that needs no more than a config.json; a plugin may bring others.",
    )
    skip_tokenizer_init: bool = option(
        False, "Model", "Read no tokenizer: prompts are token ids and outputs have no text."
    )
    device: str | None = option(
        None,
        "Device",
        "Platform to run on, as `plugins list` names it, with an optional index: NAME or NAME:1.",
    )
    attention_backend: str | None = option(
        None, "Device", "Attention backend by name. Default: the best that fits."
    )
    num_threads: int | None = option(
        None, "Device", "Host threads of each worker. Default: the platform decides."
    )
    tensor_parallel_size: int = option(1, "Device", "Ranks that each layer is split over.")
    executor: str = option(
        "auto",
        "Device",
        "local runs one rank, in the engine's process; multiprocess gives each further one its own; a plugin may bring "
        "others. auto: by number.",
    )
    block_size: int | None = option(None, "KV cache", "Tokens per KV block. Default: the platform decides.")
    kv_cache_bytes: int | None = option(
        None,
        "KV cache",
        "Memory for the KV cache: bytes, or a number with KiB, MiB, GiB. Default: from available memory.",
        type="bytes",
    )
    memory_share: float | None = option(
        None,
        "KV cache",
        "Part of the device's memory that weights, KV cache and the largest step may take together; where it is the "
        "machine's own memory, the part of what is free that the KV cache may take. Default: 0.9, or 0.4 there.",
    )
    kv_cache_dtype: str = option(
        "auto",
        "KV cache",
        "How keys and values are stored. auto: as activations are, or as the platform decides; float16 halves those of "
        "float32; the others are quantized.",
        choices=("auto", "float16", *QUANTIZED_KV),
    )
    enable_prefix_caching: bool = option(True, "KV cache", "Do not reuse the KV of prompts that begin alike.")
    prefix_cache_bytes: int | None = option(
        None,
        "KV cache",
        "Size up to which the KV cache grows in order to keep what finished requests computed, at least one sequence "
        "of max_model_len; requests that run may take more of it. Default: the platform decides where kv_cache_bytes "
        "and memory_share are left open too; else the whole cache.",
        type="bytes",
    )
    max_num_seqs: int | None = option(None, "Scheduler", "Most requests in one step.")
    max_num_batched_tokens: int | None = option(None, "Scheduler", "Token budget of one step.")
    max_num_mixed_prompt_tokens: int | None = option(
        None,
        "Scheduler",
        "Most tokens of prompts in a step in which requests decode: all of these wait for it with their next token. It "
        "does not hold for up to four steps in a row while they are at most an eighth of max_num_seqs and fewer than "
        "those with a prompt. "
        "Default: the platform decides for a server; no limit offline, where nobody waits between tokens.",
    )
    scheduler_policy: str = option(
        "fcfs", "Scheduler", "Order of waiting requests: fcfs, priority, or one from a plugin."
    )
    max_num_waiting: int | None = option(
        None, "Scheduler", "Requests that may wait before new ones are answered with 503. Default: no limit."
    )
    async_scheduling: bool | None = option(
        None,
        "Scheduler",
        "Plan and start a step while the device computes the one before. Default: the platform decides.",
    )
    enable_graphs: bool = option(
        True,
        "Scheduler",
        "Launch each kernel of a decode step, where the platform could replay a recorded graph.",
    )
    graph_batch_sizes: str | None = option(
        None,
        "Scheduler",
        "Batch sizes to record graphs of decode steps for, with commas. Default: a ladder up to max_num_seqs. On a "
        "CPU every size up to the largest is recorded by itself.",
    )
    count_expert_tokens: bool = option(
        False,
        "Scheduler",
        "Count the tokens that each expert of a mixture gets, for /metrics and LLM.stats. Decode steps run without "
        "recorded graphs then.",
    )
    seed: int = option(0, "Sampling", "Seed of the engine, from which requests without one draw theirs.")
    generation_config: str = option(
        "auto",
        "Sampling",
        "auto takes sampling defaults from the model's generation_config.json; none goes without.",
        choices=("auto", "none"),
    )
    health_timeout_s: int = option(
        10, "Engine", "Seconds without a sign of life after which the engine process counts as dead."
    )
    step_timeout_s: int = option(
        600, "Engine", "Seconds that one step may take before the engine counts as hung."
    )
    plugin_options: Mapping[str, Any] = field(default_factory=dict)
    """Settings that plugins declare through ``engine_options``, by name; on the command line each is its own option."""
