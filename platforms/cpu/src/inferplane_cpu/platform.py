"""The CPU platform."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inferplane.api import Communicator, DeviceDescriptor, DeviceRuntime, Platform, ProcessGroup
from inferplane.api.config import ConfigPatch
from inferplane_kernels_cpu import native

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inferplane.api.config import EngineArgs
    from inferplane.api.worker import Worker

PREFIX_CACHE_BYTES = 256 << 20
FLOAT32_STEP_TOKENS = 1024

_NATIVE_PRODUCT = {"bfloat16": "bf16_matmul", "float16": "fp16_matmul"}
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def holds_whole_numbers(quantization: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's method stores only what `CpuQuantizedLinear` multiplies by. Sees the configuration as it
    was written, which may be wrong: that is said where the format reads it."""
    match quantization:
        case {"quant_method": "gguf"}:  # codes of the IQ types name numbers of a table
            return not any(kind.startswith("IQ") for kind in quantization.get("tensor_types", {}).values())
        case {"quant_method": "gptq" | "awq"}:
            return True
        case {"quant_method": "compressed-tensors", "config_groups": {**groups}}:
            return bool(groups) and all(map(_has_whole_weights, groups.values()))
        case {"quant_method": "torchao", "quant_type": {"default": {"_type": str(kind)}}}:
            return kind.startswith("Int")
    return False


def _has_whole_weights(group: object) -> bool:
    match group:
        case {"weights": {"type": "int"}}:
            return True
    return False


class CpuPlatform(Platform):
    name = "cpu"
    ranks_share_device = True

    def config_defaults(
        self, args: EngineArgs, device: DeviceDescriptor, checkpoint_dtype: str
    ) -> ConfigPatch:
        """A half-precision checkpoint stays so only where the processor multiplies it natively.

        Elsewhere a product of many rows in half precision is several times slower than in float32, for half the memory.

        The step's budget of tokens costs next to no throughput (on 2 cores 1,024 is 1 % slower than 2,048, and 512 is
        3 % slower than that): while a prompt of that size is computed, nobody else gets a token. Where
        products are native, a step takes as many more tokens as prompts that come at once have, and their streams begin
        together instead of waiting for one another's prompts.

        What finished requests leave in the cache takes memory that other programs could use, so it is bounded, unless
        the user said how large the cache may be.
        """
        capability = _NATIVE_PRODUCT.get(checkpoint_dtype)
        keeps_dtype = capability is not None and device.capabilities.has(capability)
        computes_in_it = keeps_dtype and args.dtype in ("auto", checkpoint_dtype)
        values = {
            "dtype": checkpoint_dtype if keeps_dtype else "float32",
            "block_size": 32,
            "max_num_seqs": 128,
            "max_num_batched_tokens": 2048 if computes_in_it else FLOAT32_STEP_TOKENS,
            "max_num_mixed_prompt_tokens": 256,
        }
        reasons = {
            "max_num_batched_tokens": "a longer step would keep others waiting and gain next to nothing",
            "max_num_mixed_prompt_tokens": "every stream waits for the whole step with its next token; offline (LLM) "
            "there is no limit",
        }
        if args.kv_cache_bytes is None and args.memory_share is None:
            values["prefix_cache_bytes"] = PREFIX_CACHE_BYTES
            reasons["prefix_cache_bytes"] = "memory that requests no longer use is left to other programs"
        if not keeps_dtype and checkpoint_dtype != "float32":
            reasons["dtype"] = f"the processor has no native product of {checkpoint_dtype}"
        return ConfigPatch(values, reasons)

    def quantized_defaults(
        self,
        args: EngineArgs,
        device: DeviceDescriptor,
        checkpoint_dtype: str,
        hf_config: Mapping[str, Any],
    ) -> ConfigPatch:
        """Activations are float32 where the weights stay packed: their products are of whole numbers either way, so
        that nothing is gained by rounding. Keys and values lose little in float16. Experts do not stay packed, and in
        float32 would take twice the memory."""
        defaults = self.config_defaults(args, device, checkpoint_dtype)
        if (
            args.dtype != "auto"
            or args.quantization == "dequantize"
            or native.unavailable_reason() is not None
        ):
            return defaults
        if not holds_whole_numbers(hf_config["quantization_config"]) or any(
            map(hf_config.get, _EXPERT_COUNTS)
        ):
            return defaults
        values: dict[str, Any] = {"dtype": "float32", "max_num_batched_tokens": FLOAT32_STEP_TOKENS}
        reasons = {"dtype": "packed weights are multiplied by it as quickly as by bfloat16, and more exactly"}
        if args.attention_backend in (None, "cpu_native"):
            values["kv_cache_dtype"] = "float16"
            reasons["kv_cache_dtype"] = "half the memory of float32, and next to nothing lost"
        return ConfigPatch({**defaults, **values}, {**defaults.reasons, **reasons})

    def device_runtime(self, device: DeviceDescriptor) -> DeviceRuntime:
        from inferplane_cpu.runtime import CpuRuntime

        return CpuRuntime(device)

    def worker_class(self) -> type[Worker]:
        from inferplane.api.worker import ModelWorker

        return ModelWorker

    def communicator(self, group: ProcessGroup, runtime: DeviceRuntime) -> Communicator:
        from inferplane.api.torch_comm import TorchCommunicator

        return TorchCommunicator(group, "gloo")
