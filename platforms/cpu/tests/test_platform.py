"""The CPU platform through the plugin seam, on this machine and on made-up ones."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from inferplane.api import CapabilitySet, DeviceDescriptor, Health
from inferplane.api.attention import AttentionLayer, AttentionQuery
from inferplane.api.config import EngineArgs, EngineConfig
from inferplane.api.kv import FullAttentionSpec
from inferplane.api.linear import LinearShape
from inferplane.config import DeviceConfig, ModelConfig, ParallelConfig
from inferplane.plugins import load_plugins
from inferplane_cpu import plugin
from inferplane_cpu import runtime as runtime_module
from inferplane_cpu.cores import allowed_cores, usable_cores
from inferplane_cpu.linear import CpuNativeLinear
from inferplane_cpu.ops import OP_IMPLEMENTATIONS
from inferplane_cpu.platform import CpuPlatform
from inferplane_cpu.processor import read_processor
from inferplane_cpu.runtime import CpuRuntime
from inferplane_kernels_cpu import native

MODEL = ModelConfig("m", "/m", {}, "A", "float32", 128, 100)


def device(*capabilities: str) -> DeviceDescriptor:
    return DeviceDescriptor("cpu", 0, "a processor", 1 << 30, CapabilitySet(capabilities))


def config(num_threads: int | None = None, world_size: int = 1) -> EngineConfig:
    return EngineConfig(
        MODEL,
        DeviceConfig("cpu", num_threads=num_threads),
        parallel=ParallelConfig(tensor_parallel_size=world_size),
    )


@pytest.fixture
def kept_settings():
    """What `set_up` changes in this process, put back afterwards."""
    threads = torch.get_num_threads()
    bind = getattr(os, "sched_setaffinity", None)  # a test may replace it
    cores = allowed_cores()
    yield
    torch.set_num_threads(threads)
    if bind is not None:
        bind(0, cores)


def test_it_is_found_and_beats_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INFERPLANE_DEVICE", raising=False)
    plugins = load_plugins()
    found = plugins.select_device("cpu")
    assert found.platform == "cpu"
    assert found.total_memory_bytes > 0
    record = next(record for record in plugins.records if record.name == "cpu")
    assert (record.distribution, record.score, record.status) == ("inferplane-cpu", 10, "available")
    assert plugins.platform(found).name == "cpu"
    assert {"processor", "vector path", "usable cores"} <= plugins.collect_env()["cpu"].keys()


@pytest.mark.skipif(native.unavailable_reason() is not None, reason="no native kernels here")
def test_a_plain_weight_moves_into_huge_pages() -> None:
    """The tensor itself, of which the model holds no copy, with its numbers."""
    weight = torch.randn(64, 48)
    expected, before = weight.clone(), weight.data_ptr()
    CpuNativeLinear.prepare(weight, None)
    assert weight.data_ptr() != before
    assert torch.equal(weight, expected)


def test_probing_imports_no_torch() -> None:
    script = (
        "import sys; from inferplane.plugins import load_plugins; p = load_plugins();"
        "d = p.select_device('cpu'); p.platform(d); p.collect_env(); print('torch' in sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert out.stdout.strip() == "False"


def test_its_ops_kernels_and_attention_win_on_its_device() -> None:
    plugins = load_plugins(quiet=True)
    found = plugins.select_device("cpu")
    ops = {
        decision.subject.removeprefix("op "): decision
        for decision in plugins.op_decisions(found, torch.float32)
    }
    assert {impl.op for impl in OP_IMPLEMENTATIONS} == {op for op in ops if ops[op].chosen.plugin == "cpu"}
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_dim=64, dtype="float32")
    layer = AttentionLayer(name="l", num_heads=4, num_kv_heads=2, head_dim=64, scale=0.1, spec=spec)
    query = AttentionQuery(layer=layer, dtype=torch.float32, kv_dtype=torch.float32, device=found)
    has_native = native.unavailable_reason() is None
    assert plugins.choose_attention(query).name == ("cpu_native" if has_native else "cpu_paged")
    shape = LinearShape("w", 64, 64, torch.float32, has_bias=False)
    best = "cpu_packed" if native.unavailable_reason() else "cpu_native"
    assert plugins.choose_linear(shape, found).name == best
    reference = plugins.select_device("reference")
    assert all(d.chosen.plugin == "reference" for d in plugins.op_decisions(reference, torch.float32))
    assert plugins.choose_linear(shape, reference).name == "reference"


def test_a_server_computes_fewer_prompt_tokens_beside_streams() -> None:
    defaults = CpuPlatform().config_defaults(EngineArgs(), device(), "float32")
    assert defaults["max_num_mixed_prompt_tokens"] == 256
    assert "offline" in defaults.reasons["max_num_mixed_prompt_tokens"]


@pytest.mark.parametrize(
    ("checkpoint", "capabilities", "dtype"),
    [
        ("float32", ("bf16_matmul", "fp16_matmul"), "float32"),
        ("bfloat16", (), "float32"),
        ("bfloat16", ("fp16_matmul",), "float32"),
        ("bfloat16", ("bf16_matmul",), "bfloat16"),
        ("float16", ("bf16_matmul",), "float32"),
        ("float16", ("fp16_matmul",), "float16"),
        ("float64", (), "float32"),
    ],
)
def test_the_dtype_that_auto_means(checkpoint: str, capabilities: tuple[str, ...], dtype: str) -> None:
    defaults = CpuPlatform().config_defaults(EngineArgs(), device(*capabilities), checkpoint)
    assert defaults["dtype"] == dtype
    assert ("dtype" in defaults.reasons) == (dtype != checkpoint and checkpoint != "float32")


@pytest.mark.parametrize(
    ("capabilities", "dtype", "num_tokens"),
    [
        (("bf16_matmul",), "auto", 2048),
        (("bf16_matmul",), "bfloat16", 2048),
        (("bf16_matmul",), "float32", 1024),
        ((), "auto", 1024),
        ((), "bfloat16", 1024),
    ],
)
def test_steps_are_longer_where_products_are_native(
    capabilities: tuple[str, ...], dtype: str, num_tokens: int
) -> None:
    args = EngineArgs(dtype=dtype)
    defaults = CpuPlatform().config_defaults(args, device(*capabilities), "bfloat16")
    assert defaults["max_num_batched_tokens"] == num_tokens


def test_the_prefix_cache_is_bounded_unless_the_user_sized_the_cache() -> None:
    def default(**asked: object) -> object:
        defaults = CpuPlatform().config_defaults(EngineArgs(**asked), device(), "float32")
        return defaults.get("prefix_cache_bytes")

    assert default() == 256 << 20
    assert default(kv_cache_bytes=1 << 30) is None
    assert default(memory_share=0.9) is None


@pytest.mark.parametrize(
    ("cpuinfo", "name", "capabilities", "path"),
    [
        (
            "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu avx2\n\nprocessor\t: 1\n",
            "Some CPU",
            (),
            "AVX2",
        ),
        ("\nmodel name : X\nflags : avx512f avx512_bf16\n", "X", ("bf16_matmul",), "AVX-512"),
        (
            "model name : X\nflags : avx512f amx_tile amx_bf16 avx512_fp16\n",
            "X",
            ("bf16_matmul", "fp16_matmul"),
            "AMX",
        ),
        ("processor : 0\nFeatures : fp asimd bf16\n", None, ("bf16_matmul",), "NEON"),
        ("processor : 0\nFeatures : fp asimd asimdhp sve\n", None, ("fp16_matmul",), "SVE"),
        ("", None, (), "baseline instructions"),
    ],
)
def test_reading_the_processor(
    tmp_path: Path, cpuinfo: str, name: str | None, capabilities: tuple[str, ...], path: str
) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(cpuinfo)
    processor = read_processor(file)
    assert processor.capabilities == capabilities
    assert processor.vector_path == path
    assert processor.name == name or (name is None and processor.name)


def test_a_system_without_cpuinfo(tmp_path: Path) -> None:
    processor = read_processor(tmp_path / "absent")
    assert processor.name
    assert processor.capabilities == ()


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 64),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "300000 100000\n"}, 3),
        (
            "4:cpu,cpuacct:/j\n",
            {"cpu/j/cpu.cfs_quota_us": "400000\n", "cpu/j/cpu.cfs_period_us": "100000\n"},
            4,
        ),
        ("4:cpu,cpuacct:/j\n", {"cpu/j/cpu.cfs_quota_us": "-1\n", "cpu/j/cpu.cfs_period_us": "100000\n"}, 64),
        ("", {}, 64),
    ],
)
def test_cores_within_a_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, membership: str, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr("inferplane_cpu.cores.allowed_cores", lambda: list(range(64)))
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(membership)
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert usable_cores(tmp_path) == cores


def test_affinity_that_may_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(pid: int) -> set[int]:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_getaffinity", forbidden, raising=False)
    assert len(allowed_cores()) == (os.cpu_count() or 1)


def test_binding_that_is_forbidden_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kept_settings: None
) -> None:
    def forbidden(pid: int, cores: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", forbidden, raising=False)
    monkeypatch.setattr(runtime_module, "allowed_cores", lambda: [0, 1])
    CpuRuntime(device()).set_up(config(world_size=2), rank=1)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "rank 1" in warnings[0]
    assert "Operation not permitted" in warnings[0]
    assert "runs unbound" in warnings[0]


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch, kept_settings: None) -> None:
    bound: list[list[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: bound.append(list(cores)), raising=False)
    monkeypatch.setattr(runtime_module, "allowed_cores", lambda: [2, 3, 5, 7, 11])
    monkeypatch.setattr(runtime_module, "usable_cores", lambda: 5)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for rank in range(2):
        CpuRuntime(device()).set_up(config(world_size=2), rank)
        assert torch.get_num_threads() == 2
    assert bound == [[2, 3], [5, 7]]
    bound.clear()
    CpuRuntime(device()).set_up(config(num_threads=1), rank=0)
    assert torch.get_num_threads() == 1
    assert bound == []


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not bind threads")
@pytest.mark.parametrize("by_another_thread", [False, True])
def test_tear_down_puts_threads_and_cores_back(kept_settings: None, by_another_thread: bool) -> None:
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    if len(cores) < 2:
        pytest.skip("one core cannot be divided")
    runtime = CpuRuntime(device())
    runtime.set_up(config(num_threads=threads + 1, world_size=2), rank=1)
    assert len(os.sched_getaffinity(0)) == len(cores) // 2
    assert torch.get_num_threads() == threads + 1
    if by_another_thread:  # than the one that loaded the model
        closing = threading.Thread(target=runtime.tear_down)
        closing.start()
        closing.join()
    else:
        runtime.tear_down()
        assert torch.get_num_threads() == threads  # which is a setting of each thread
    assert os.sched_getaffinity(0) == cores
    runtime.tear_down()  # has nothing left to put back


@pytest.mark.parametrize(
    ("asked", "num_threads", "expected"),
    [("1", None, 1), ("2,1", None, 2), ("1", 2, 2), ("", None, 3), ("many", None, 3), ("0", None, 3)],
)
def test_the_openmp_variable_is_respected(
    monkeypatch: pytest.MonkeyPatch, kept_settings: None, asked: str, num_threads: int | None, expected: int
) -> None:
    monkeypatch.setattr(runtime_module, "usable_cores", lambda: 3)
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    CpuRuntime(device()).set_up(config(num_threads=num_threads), rank=0)
    assert torch.get_num_threads() == expected


def test_more_ranks_than_cores(monkeypatch: pytest.MonkeyPatch, kept_settings: None) -> None:
    monkeypatch.setattr(runtime_module, "allowed_cores", lambda: [0])
    monkeypatch.setattr(runtime_module, "usable_cores", lambda: 1)
    CpuRuntime(device()).set_up(config(world_size=4), rank=3)
    assert torch.get_num_threads() == 1


def test_memory_is_what_may_be_taken() -> None:
    memory = CpuRuntime(device()).memory()
    assert 0 < memory.available_bytes <= memory.total_bytes


def test_torch_serves_where_there_is_no_native_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "unavailable_reason", lambda: "it was not built")
    plugins = load_plugins(quiet=True)
    plain = LinearShape("w", 64, 64, torch.float32, has_bias=False)
    assert plugins.choose_linear(plain, device()).name == "cpu_packed"
    shape = LinearShape("w", 64, 64, torch.bfloat16, has_bias=False)
    assert plugins.choose_linear(shape, device()).name == "cpu_widened"
    decision = plugins.linear_decision(shape, device())
    reasons = {candidate.name: candidate.reason for candidate in decision.candidates}
    assert reasons["cpu_packed"] == "the processor has no bf16_matmul"
    assert reasons["cpu_native"] == "it was not built"
    assert plugins.collect_env()["cpu"]["native kernels"] == "it was not built"
    (found,) = plugin.diagnose()
    assert (found.check, found.health) == ("native kernels", Health.WARNING)
    assert "it was not built" in found.found


def test_what_is_missing_is_said_at_the_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kept_settings: None
) -> None:
    monkeypatch.setattr(native, "unavailable_reason", lambda: "it was not built")
    CpuRuntime(device()).set_up(config(num_threads=1), rank=0)
    assert "no native kernels, torch's operators serve: it was not built" in caplog.text


@pytest.mark.skipif(native.unavailable_reason() is not None, reason=str(native.unavailable_reason()))
def test_native_kernels_have_as_many_threads(kept_settings: None) -> None:
    CpuRuntime(device()).set_up(config(num_threads=3), rank=0)
    assert native.num_threads() == 3
    (found,) = plugin.diagnose()
    assert (found.health, found.mend) == (Health.OK, None)
