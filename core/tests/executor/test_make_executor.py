"""Which executor a configuration gets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inferplane.config import ConfigError, ParallelConfig
from inferplane.executor import make_executor
from inferplane.executor.local import LocalExecutor
from inferplane.executor.multiprocess import MultiprocessExecutor
from inferplane.plugins import load_plugins


@pytest.mark.parametrize(
    ("executor", "world_size", "expected"),
    [
        ("auto", 1, LocalExecutor),
        ("local", 1, LocalExecutor),
        ("multiprocess", 1, LocalExecutor),
        ("auto", 2, MultiprocessExecutor),
        ("multiprocess", 2, MultiprocessExecutor),
    ],
)
def test_by_name_and_world_size(socket_config, executor: str, world_size: int, expected: type):
    config = replace(socket_config(1), parallel=ParallelConfig(world_size, executor))
    assert type(make_executor(config, load_plugins(quiet=True))) is expected


@pytest.mark.parametrize(
    ("executor", "world_size", "message"), [("local", 2, "one rank"), ("ray", 1, "'ray'")]
)
def test_what_cannot_be_is_refused(socket_config, executor: str, world_size: int, message: str):
    config = replace(socket_config(1), parallel=ParallelConfig(world_size, executor))
    with pytest.raises(ConfigError, match=message) as caught:
        make_executor(config, load_plugins(quiet=True))
    assert caught.value.option == "executor"
