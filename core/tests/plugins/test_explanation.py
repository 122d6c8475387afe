"""`plugins explain`: who runs each part of a model, why not another, and who set what. No weights are there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from inferplane import LLM
from inferplane.cli.plugins import plugins as plugins_command
from inferplane.config import EngineArgs
from inferplane.plugins import load_plugins
from inferplane.plugins.explanation import Explanation, explain
from toy_plugins import ToyIndex

TOY = """
from inferplane.api import *
MANIFEST = PluginManifest(name="toy", api=API_VERSION, provides=("kernels",))
@hookimpl
def op_implementations(device):
    from inferplane.api.ops import OPS, OpImpl
    norm = OPS["rms_norm"].reference
    return [
        OpImpl("rms_norm", norm, "toy-slow", priority=1),
        OpImpl("rms_norm", norm, "toy-fast", priority=5),
        OpImpl("rms_norm", norm, "toy-other", lambda query: "another device is needed", priority=9),
    ]
@hookimpl
def linear_kernels(device):
    from inferplane.reference.linear import ReferenceLinear
    class Small(ReferenceLinear):
        name, priority = "toy-small", 7
        @classmethod
        def unsupported_reason(cls, shape, device):
            return None if shape.out_features < 1000 else "too many outputs"
    return [Small]
"""


@pytest.fixture
def bare(tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    folder = tmp_path / "bare"
    folder.mkdir()
    shutil.copy(tiny_model("llama") / "config.json", folder)
    return folder


def explained(folder: Path, **settings: Any) -> Explanation:
    return explain(EngineArgs(model=str(folder), device="reference", **settings), load_plugins(quiet=True))


def winners(explanation: Explanation, kind: str) -> dict[str, str | None]:
    return {
        name: choice.decision.winner.name if choice.decision.winner else None
        for choice in explanation.choices
        if choice.kind == kind
        for name in choice.subjects
    }


def test_who_won_and_why_the_others_did_not(toys: ToyIndex, bare: Path) -> None:
    toys.install("toy", TOY)
    found = explained(bare)
    assert found.is_complete
    norm = next(choice for choice in found.choices if choice.subjects == ("rms_norm",))
    reasons = {each.name: norm.losing_reason(i) for i, each in enumerate(norm.decision.candidates) if i != 1}
    assert reasons == {
        "toy-other": "another device is needed",
        "toy-slow": "could serve too, with priority 1 below 5",
        "reference": "could serve too, with priority -1000 below 5",
    }
    linear = winners(found, "linear")
    assert linear["lm_head"] == "reference"  # its 1024 outputs are too many
    assert linear["model.layers.1.mlp.down_proj"] == "toy-small"
    assert set(winners(found, "attention").values()) == {"reference"}
    assert [group.manager for group in found.kv_groups] == ["FullAttentionManager"]


def test_it_says_what_a_worker_then_does(toys: ToyIndex, tiny_model: Callable[[str], Path]) -> None:
    toys.install("toy", TOY)
    folder = tiny_model("qwen3")
    with LLM(str(folder), device="reference", kv_cache_bytes=4 << 20) as llm:
        worker = llm._client.core._executor.worker  # type: ignore[attr-defined]
        layers = {layer.name for layer in worker.model.attention_layers()}
        chosen = set(worker._attention.names)
        ops = worker.build_context().ops
    found = explained(folder)
    assert set(winners(found, "attention")) == layers
    assert set(winners(found, "attention").values()) == chosen
    for choice in found.choices:
        if choice.kind == "op":
            assert choice.decision.winner is not None
            assert getattr(ops, choice.subjects[0]) is choice.decision.winner.implementation


def test_ranks_get_their_share(bare: Path) -> None:
    whole = next(choice for choice in explained(bare).choices if choice.kind == "linear")
    half = next(
        choice for choice in explained(bare, tensor_parallel_size=2).choices if choice.kind == "linear"
    )
    assert (whole.detail, half.detail) == ("64 → 128, float32", "64 → 64, float32")


def test_what_nobody_can_serve_is_told(toys: ToyIndex, bare: Path) -> None:
    toys.install(
        "toy",
        TOY.replace("@hookimpl\ndef linear", "@hookimpl\ndef attention_backends(device):\n"
        "    from inferplane.reference.attention import ReferenceAttention\n"
        "    class Picky(ReferenceAttention):\n"
        "        name = 'picky'\n"
        "        @classmethod\n"
        "        def unsupported_reason(cls, query): return 'never on a Monday'\n"
        "    return [Picky]\n"
        "@hookimpl\ndef linear"),
    )  # fmt: skip
    found = explained(bare, attention_backend="picky")
    assert not found.is_complete
    assert set(winners(found, "attention").values()) == {None}
    result = CliRunner().invoke(
        plugins_command, ["explain", str(bare), "--device", "reference", "--attention-backend", "picky"]
    )
    assert result.exit_code == 1
    assert "NOBODY\n    not picky (plugin toy): never on a Monday" in result.output


def test_who_set_what(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = explained(bare, max_num_batched_tokens=32, block_size=8)
    settings = {each.name: (each.value, each.set_by) for each in found.settings}
    assert settings["block_size"] == (8, "user")
    assert settings["dtype"] == ("float32", "reference")
    assert settings["max_model_len"] == (1024, "model")
    assert settings["max_num_seqs"] == (32, "inferplane")  # follows from the budget, which the user set
    assert settings["scheduler_policy"] == ("fcfs", "inferplane")
    monkeypatch.setenv("INFERPLANE_DEVICE", "reference:0")
    device = next(
        each
        for each in explain(EngineArgs(model=str(bare)), load_plugins(quiet=True)).settings
        if each.name == "device"
    )
    assert (device.value, device.set_by) == ("reference:0", "INFERPLANE_DEVICE")


def test_the_command(bare: Path) -> None:
    run = CliRunner().invoke
    text = run(plugins_command, ["explain", "--model", str(bare), "--device", "reference"])
    assert text.exit_code == 0
    for line in (
        "  dtype = float32, set by reference",
        "  rms_norm (float32): reference (plugin reference, priority -1000)",
        "kept by FullAttentionManager",
    ):
        assert line in text.output
    made = run(plugins_command, ["explain", str(bare), "--device", "reference", "--json"])
    found = json.loads(made.output)
    assert found["architecture"] == "LlamaForCausalLM"
    assert found["kv_groups"][0]["spec"]["class"] == "FullAttentionSpec"
    assert {each["kind"] for each in found["choices"]} == {"op", "attention", "linear"}
    assert all(each["chosen"]["name"] for each in found["choices"])
    both = run(plugins_command, ["explain", str(bare), "--model", str(bare)])
    assert both.exit_code == 2
