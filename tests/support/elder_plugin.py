"""A whole platform as it was written for plugin API 1.0. Never brought up to date: that it still serves is the test."""

from __future__ import annotations

from inferplane.api import (
    DeviceDescriptor,
    DeviceRuntime,
    MemoryInfo,
    Platform,
    PluginManifest,
    Supported,
    hookimpl,
)

MANIFEST = PluginManifest(name="elder", api=(1, 0), provides=("platform",))


@hookimpl
def probe_devices():
    return Supported("elder", 1, (DeviceDescriptor("elder", 0, "an elder device", 1 << 30),))


@hookimpl
def create_platform(device):
    return ElderPlatform() if device.platform == "elder" else None


@hookimpl
def attention_backends(device):
    if device.platform != "elder":
        return []
    from inferplane.api.attention import AttentionBackend

    class ElderAttention(AttentionBackend):
        """Keys and values of a token lie side by side: [num_blocks * block_size, 2, num_kv_heads, head_dim]."""

        name = "elder"
        priority = 50

        @classmethod
        def unsupported_reason(cls, layer, dtype):
            if type(layer.spec).__name__ != "FullAttentionSpec":
                return f"full attention only, not {type(layer.spec).__name__}"
            return None if dtype == "float32" else f"float32 only, not {dtype}"

        @classmethod
        def allocate_kv(cls, layer, num_blocks, dtype, device):
            import torch

            slots = num_blocks * layer.spec.block_size
            return torch.empty((slots, 2, layer.num_kv_heads, layer.head_dim), dtype=dtype, device=device)

        def forward(self, layer, q, k, v, kv, metadata):
            import torch

            kv[metadata.slot_mapping, 0] = k
            kv[metadata.slot_mapping, 1] = v
            outs, start = [], 0
            offsets = torch.arange(metadata.block_size)
            for index, (num_new, length) in enumerate(zip(metadata.query_lens_host, metadata.seq_lens_host)):
                slots = (
                    metadata.block_table[index].long()[:, None] * metadata.block_size + offsets
                ).flatten()[:length]
                keys, values = kv[slots].unbind(1)
                repeat = layer.num_heads // layer.num_kv_heads
                mask = torch.ones(num_new, length, dtype=torch.bool).tril(length - num_new)
                outs.append(
                    torch.nn.functional.scaled_dot_product_attention(
                        q[start : start + num_new].transpose(0, 1),
                        keys.transpose(0, 1).repeat_interleave(repeat, 0),
                        values.transpose(0, 1).repeat_interleave(repeat, 0),
                        attn_mask=mask,
                        scale=layer.scale,
                    ).transpose(0, 1)
                )
                start += num_new
            return torch.cat(outs)

    return [ElderAttention]


@hookimpl
def linear_kernels(device):
    if device.platform != "elder":
        return []
    from inferplane.api.linear import LinearKernel

    class ElderLinear(LinearKernel):
        name = "elder"
        priority = 50

        @classmethod
        def unsupported_reason(cls, shape, device):
            return None if shape.in_features % 2 == 0 else "an odd number of inputs"

        @classmethod
        def prepare(cls, weight, bias):
            packed = weight.t().contiguous()
            return lambda x: x @ packed if bias is None else x @ packed + bias

    return [ElderLinear]


@hookimpl
def op_implementations(device):
    if device.platform != "elder":
        return []
    import torch

    from inferplane.api.ops import OpImpl

    def silu_and_mul(gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return gate * torch.sigmoid(gate) * up

    return [OpImpl("silu_and_mul", silu_and_mul, "elder")]


class ElderPlatform(Platform):
    name = "elder"

    def config_defaults(self, args, device, checkpoint_dtype):
        return {"dtype": "float32", "block_size": 8, "max_num_seqs": 4, "max_num_batched_tokens": 32}

    def device_runtime(self, device):
        return ElderRuntime(device)

    def worker_class(self):
        from inferplane.api.worker import ModelWorker

        return ModelWorker

    def communicator(self, group, runtime):
        raise NotImplementedError("one rank only")


class ElderRuntime(DeviceRuntime):
    def __init__(self, descriptor):
        import torch

        self.descriptor = descriptor
        self.torch_device = torch.device("cpu")

    def set_up(self, config, rank):
        return

    def memory(self):
        return MemoryInfo(1 << 30, 1 << 30)
