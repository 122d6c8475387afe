"""Options made from `EngineArgs`: each field arrives, sizes are read, mistakes are named."""

from __future__ import annotations

from dataclasses import fields, replace

import click
import pytest
from click.testing import CliRunner

from inferplane.cli.options import ByteSize, GroupedCommand, engine_options
from inferplane.config.args import EngineArgs


def without_plugins(args: EngineArgs) -> EngineArgs:
    """Any plugin that happens to be installed may bring options of its own."""
    return replace(args, plugin_options={})


@pytest.fixture
def command():
    seen = []

    @click.command(cls=GroupedCommand)
    @engine_options
    def show(engine_args):
        seen.append(engine_args)

    def run(*arguments):
        result = CliRunner().invoke(show, arguments)
        return result, (seen.pop() if seen else None)

    return run


def test_without_options_the_arguments_are_the_defaults(command):
    assert without_plugins(command()[1]) == EngineArgs()


def test_options_reach_their_fields(command):
    _, args = command(
        "some/model", "--dtype", "float32", "--max-model-len", "77", "--kv-cache-bytes", "1.5MiB",
        "--no-prefix-caching", "--tensor-parallel-size", "2", "--device", "x:1",
    )  # fmt: skip
    assert without_plugins(args) == EngineArgs(
        model="some/model",
        dtype="float32",
        max_model_len=77,
        kv_cache_bytes=3 * 2**19,
        enable_prefix_caching=False,
        tensor_parallel_size=2,
        device="x:1",
    )


def test_help_lists_every_setting_under_its_group(command):
    text = command("--help")[0].output
    for field in fields(EngineArgs):
        if field.name in ("model", "plugin_options"):
            continue
        flag = "--no-prefix-caching" if field.default is True else "--" + field.name.replace("_", "-")
        assert flag in text
        assert field.metadata["group"] + ":" in text


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("0", 0), ("1024", 1024), ("2KiB", 2048), ("1.5 GiB", 3 * 2**29), ("3gb", 3 * 10**9), ("7b", 7)],
)
def test_sizes(text, num_bytes):
    assert ByteSize().convert(text, None, None) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "1.2.3MiB", "-5", "5 miles", "1e9x"])
def test_what_is_no_size_is_refused_with_the_value(command, text):
    result, args = command("--kv-cache-bytes", text)
    assert result.exit_code == 2
    assert args is None
    assert repr(text) in result.output or text in result.output


def test_an_unknown_choice_is_refused_with_the_choices(command):
    result, _ = command("--dtype", "float8")
    assert result.exit_code == 2
    assert "bfloat16" in result.output
