"""A platform whose workers need no torch and whose collectives are bytes over sockets, installed for one test."""

from __future__ import annotations

import os
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from inferplane.config import DeviceConfig, EngineConfig, ModelConfig, ParallelConfig

# A plan's removed_request_ids carry orders to these workers: "raise@1" raises on rank 1 before its collective,
# "late@1" after it, "die@1" ends the process instead; "@all" is meant for every rank. "choke@0" and "interrupt@0" raise
# where rank 0 samples, when the others have their token.
PLUGIN = """
import os, socket, sys, time
from inferplane.api import API_VERSION, DeviceDescriptor, Platform, PluginManifest, Supported, hookimpl
from inferplane.api.kv import FullAttentionSpec
from inferplane.api.worker import Worker

MANIFEST = PluginManifest(name="sockets", api=API_VERSION, provides=("platform",))

@hookimpl
def probe_devices():
    return Supported("sockets", score=1, devices=(DeviceDescriptor("sockets", 0, "sockets", 1),))

@hookimpl
def create_platform(device):
    return SocketPlatform() if device.platform == "sockets" else None

class SocketPlatform(Platform):
    name = "sockets"
    def config_defaults(self, args, device, checkpoint_dtype): return {}
    def device_runtime(self, device): raise NotImplementedError
    def worker_class(self): return SocketWorker
    def communicator(self, group, runtime): raise NotImplementedError

class SocketWorker(Worker):
    def __init__(self, context):
        super().__init__(context)
        self.rank = context.group.rank
        self.total = 0
        self._fail_if_asked("init")

    def _fail_if_asked(self, where):
        if os.environ.get("FAIL_AT") == f"{where}@{self.rank}":
            raise RuntimeError(f"no {where} for rank {self.rank}")
        if os.environ.get("DIE_AT") == f"{where}@{self.rank}":
            os._exit(7)

    def set_up(self):
        self._fail_if_asked("set_up")

    def join_group(self):
        group = self.context.group
        path = group.init_method.removeprefix("file://")
        if group.world_size == 1:
            self.peers = []
        elif self.rank == 0:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(path + ".unfinished"); listener.listen()
                os.rename(path + ".unfinished", path)
                self.peers = [listener.accept()[0] for _ in range(group.world_size - 1)]
        else:
            while not os.path.exists(path):
                time.sleep(0.01)
            peer = socket.socket(socket.AF_UNIX); peer.connect(path)
            self.peers = [peer]

    def all_reduce(self, value):
        if self.rank == 0:
            value += sum(self._receive(peer) for peer in self.peers)
        for peer in self.peers:
            peer.sendall(value.to_bytes(8))
        return value if self.rank == 0 else self._receive(self.peers[0])

    def _receive(self, peer):
        data = peer.recv(8)
        if len(data) < 8:
            raise ConnectionError("peer is gone")
        return int.from_bytes(data)

    def load_model(self):
        # in one piece and at once: ranks share the stream, and a test reads it while they live
        sys.stdout.write(f"loading {self.rank}" + os.linesep)
        sys.stdout.flush()
        self._fail_if_asked("load_model")

    def kv_cache_specs(self):
        spec = FullAttentionSpec(block_size=16, num_kv_heads=1 + self.rank, head_dim=8, dtype="float32")
        return {"a": spec, "b": spec}

    def available_kv_bytes(self):
        return 1000 - self.rank

    def init_kv_cache(self, kv_config):
        (group,) = kv_config.groups
        assert group.spec == self.kv_cache_specs()["a"]
        self.total = kv_config.num_blocks

    def warm_up(self):
        self.total = self.all_reduce(self.total)

    def execute(self, plan):
        for order in plan.removed_request_ids:
            what, _, rank = order.partition("@")
            if rank in (str(self.rank), "all"):
                if what == "raise":
                    raise ValueError(f"order on rank {self.rank}")
                if what == "die":
                    os._exit(9)
        self.orders = plan.removed_request_ids
        self.total = self.all_reduce(self.total)
        if f"late@{self.rank}" in plan.removed_request_ids:
            raise ValueError(f"order on rank {self.rank}, after the collective")

    def sample(self):
        from inferplane.api.worker import DoneStep
        from inferplane.plan import StepResult
        for peer in self.peers:
            peer.sendall(self.total.to_bytes(8))
        if "choke@0" in self.orders:
            raise ValueError("rank 0 chose nothing")
        if "interrupt@0" in self.orders:
            raise KeyboardInterrupt
        return DoneStep(StepResult(step_id=0, sampled_token_ids={"a": [self.total]}))

    def accept(self):
        self.total = self._receive(self.peers[0]) + 10

    def close(self):
        for peer in getattr(self, "peers", []):
            peer.close()
"""


@pytest.fixture
def sockets_platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs the plugin for this process and those that it starts."""
    (tmp_path / "sockets_plugin.py").write_text(textwrap.dedent(PLUGIN))
    info = tmp_path / "sockets_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sockets-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[inferplane.plugins]\nsockets = sockets_plugin\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    )


@pytest.fixture
def socket_config() -> Callable[[int], EngineConfig]:
    def make(world_size: int) -> EngineConfig:
        return EngineConfig(
            model=ModelConfig(
                model="m", path="m", hf_config={"nested": {"x": [1, 2.5, None]}}, architecture="A",
                dtype="float32", max_model_len=64, vocab_size=8,
            ),
            device=DeviceConfig("sockets"),
            parallel=ParallelConfig(tensor_parallel_size=world_size, executor="multiprocess"),
        )  # fmt: skip

    return make


def is_alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture
def process_is_alive() -> Callable[[int], bool]:
    return is_alive


@pytest.fixture
def becomes_true() -> Callable[[Callable[[], bool], float], bool]:
    return wait_until
