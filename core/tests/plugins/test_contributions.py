"""What a plugin may contribute besides a device: each hook is used by a toy plugin, to the end that it is there for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from inferplane import LLM, SamplingParams
from inferplane.cli.options import GroupedCommand, engine_options
from inferplane.config import ConfigError, EngineArgs
from inferplane.engine.kv_listening import make_kv_listener
from inferplane.engine.stat_logging import StatLogging, make_stat_loggers
from inferplane.engine.stats import EngineStats
from inferplane.models.errors import ModelLoadError
from inferplane.plugins import PluginError, PluginStatus, load_plugins
from toy_plugins import ToyIndex

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
HEAD = """
from inferplane.api import *
MANIFEST = PluginManifest(name="toy", api=API_VERSION, provides=())
"""


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama")


def generate(model: object, **settings: object) -> list[int]:
    settings = {"device": "reference", "kv_cache_bytes": 4 << 20, "max_num_seqs": 4, **settings}
    with LLM(str(model), **settings) as llm:  # type: ignore[arg-type]
        return (
            llm.generate([{"prompt_token_ids": [5, 6, 7, 8]}], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        )


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[int]:
    return generate(folder)


def test_an_executor(toys: ToyIndex, folder: Path, expected: list[int]) -> None:
    toys.install(
        "toy",
        HEAD
        + """
from inferplane.api.executor import start_worker
calls = []
class Solo:
    def __init__(self, config, progress): self.config = config
    def start(self):
        self.worker = start_worker(self.config, ProcessGroup(0, 1, ""))
        self.worker.set_up()
        self.worker.load_model()
    def __getattr__(self, name):
        calls.append(name)
        return getattr(self.worker, name)
    def check_health(self): pass
    def shutdown(self): self.worker.close()
@hookimpl
def executors(): return {"solo": __name__ + ":Solo"}
""",
    )
    assert generate(folder, executor="solo") == expected
    import toy_toy_module

    assert {"kv_cache_specs", "init_kv_cache", "execute", "sample"} <= set(toy_toy_module.calls)
    with pytest.raises(
        ConfigError, match="executor 'duo' is unknown; there are auto, local, multiprocess, solo"
    ):
        generate(folder, executor="duo")


def test_a_model_source(toys: ToyIndex, folder: Path, expected: list[int]) -> None:
    toys.install(
        "toy",
        HEAD
        + f"""
def fetch(uri, *, revision, progress):
    from pathlib import Path
    assert uri == "toy://tiny" and revision is None
    return Path({str(folder)!r})
def lose(uri, *, revision, progress): return None
@hookimpl
def model_sources(): return {{"toy": __name__ + ":fetch", "lost": __name__ + ":lose", "gone": "no_module:f"}}
""",
    )
    assert generate("toy://tiny") == expected
    with pytest.raises(
        ModelLoadError, match="no installed plugin fetches from s3://; installed schemes: gone, lost, toy"
    ):
        generate("s3://bucket/model")
    with pytest.raises(ModelLoadError, match="returned None"):
        generate("lost://model")
    with pytest.raises(
        PluginError, match=r"the fetcher of gone:// is no_module:f.*No module named 'no_module'"
    ):
        generate("gone://model")


def test_a_weight_loader(toys: ToyIndex, folder: Path, tmp_path: Path, expected: list[int]) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (bare / file.name).symlink_to(file)
    toys.install(
        "toy",
        HEAD
        + f"""
def read(path):
    from safetensors.torch import load_file
    assert path.name == "bare"
    yield from load_file({str(folder / "model.safetensors")!r}).items()
@hookimpl
def weight_loaders(): return {{"toy-stream": __name__ + ":read"}}
""",
    )
    assert generate(bare, load_format="toy-stream") == expected
    with pytest.raises(
        ConfigError,
        match="load_format 'tape' is unknown; there are auto, dummy, gguf, safetensors, toy-stream",
    ):
        generate(bare, load_format="tape")


def test_a_kind_of_kv_cache(toys: ToyIndex, folder: Path, expected: list[int]) -> None:
    """A model, its spec, the spec's manager and a backend, all from a plugin."""
    toys.install(
        "toy",
        HEAD
        + """
from dataclasses import dataclass, fields
from inferplane.api.kv import FullAttentionSpec
from inferplane.api.kv_manager import FullAttentionManager
@dataclass(frozen=True, kw_only=True)
class ToySpec(FullAttentionSpec): pass
asked = []
class ToyManager(FullAttentionManager):
    def num_missing_blocks(self, blocks, num_tokens):
        asked.append(num_tokens)
        return super().num_missing_blocks(blocks, num_tokens)
@hookimpl
def kv_cache_specs(): return {ToySpec: ToyManager}
@hookimpl
def models(): return {"LlamaForCausalLM": __name__ + ":ToyModel"}
@hookimpl
def attention_backends(device):
    from inferplane.reference.attention import ReferenceAttention
    class ToyAttention(ReferenceAttention):
        name = "toy"
        @classmethod
        def unsupported_reason(cls, *query): return None
    return [ToyAttention]
def __getattr__(name):
    if name != "ToyModel": raise AttributeError(name)
    from dataclasses import replace
    from inferplane.api.layers import Attention, walk_layers
    from inferplane.models.llama import LlamaForCausalLM
    class ToyModel(LlamaForCausalLM):
        def attention_layers(self):
            def changed(layer):
                spec = {f.name: getattr(layer.spec, f.name) for f in fields(layer.spec)}
                return replace(layer, spec=ToySpec(**spec))
            return [changed(layer) for layer in super().attention_layers()]
    return ToyModel
""",
    )
    assert generate(folder, attention_backend="toy") == expected
    import toy_toy_module

    assert toy_toy_module.asked


OPTIONS = (
    HEAD
    + """
@hookimpl
def engine_options():
    return [
        OptionSpec(name="toy_level", help="How toyish it gets.", kind=int, default=3),
        OptionSpec(name="toy_colour", help="What it looks like.", choices=("red", "blue")),
        OptionSpec(name="toy_is_loud", help="Whether it is heard.", kind=bool, default=False),
    ]
@hookimpl
def validate_config(config, device):
    from inferplane.api.config import ConfigError
    if config.plugin_options["toy_level"] > 9:
        raise ConfigError("toy_level", f"toy_level must be at most 9 on {device.platform}")
    if config.plugin_options["toy_colour"] == "blue":
        1 / 0
"""
)


def resolved(folder: Path, **settings: object):
    from inferplane.config.resolve import resolve

    return resolve(EngineArgs(model=str(folder), device="reference", **settings), load_plugins())  # type: ignore[arg-type]


def of_the_toy(options: Mapping[str, Any]) -> dict[str, Any]:
    """Without those of plugins that happen to be installed."""
    return {name: value for name, value in options.items() if name.startswith("toy_")}


def test_options_and_their_validation(toys: ToyIndex, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    toys.install("toy", OPTIONS)
    assert of_the_toy(resolved(folder).plugin_options) == {
        "toy_level": 3,
        "toy_colour": None,
        "toy_is_loud": False,
    }
    assert resolved(folder, plugin_options={"toy_level": 9}).plugin_options["toy_level"] == 9
    for name, value, message in (
        ("toy_level", 10, "at most 9 on reference"),
        ("toy_level", "much", "must be of type int, got 'much'"),
        ("toy_colour", "green", "must be one of red, blue, got 'green'"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            resolved(folder, plugin_options={name: value})
        assert caught.value.option == name
    with pytest.raises(ConfigError, match=r"'toy_size'; there are: toy_colour, toy_is_loud, toy_level"):
        resolved(folder, plugin_options={"toy_size": 1})
    assert resolved(
        folder, plugin_options={"toy_colour": "blue"}
    )  # its check is broken, which is its own fault
    assert any("its hook validate_config: ZeroDivisionError" in record.message for record in caplog.records)


def test_options_on_the_command_line(toys: ToyIndex) -> None:
    toys.install("toy", OPTIONS)
    seen: list[EngineArgs] = []

    @click.command(cls=GroupedCommand)
    @engine_options
    def command(engine_args: EngineArgs) -> None:
        seen.append(engine_args)

    run = CliRunner().invoke
    assert run(command, ["--toy-level", "4", "--toy-is-loud"]).exit_code == 0
    assert of_the_toy(seen[0].plugin_options) == {"toy_level": 4, "toy_colour": None, "toy_is_loud": True}
    assert "'green' is not one of 'red', 'blue'" in run(command, ["--toy-colour", "green"]).output
    assert "How toyish it gets." in run(command, ["--help"]).output


def test_an_option_under_another_name_is_refused(toys: ToyIndex) -> None:
    toys.install(
        "toy", HEAD + "@hookimpl\ndef engine_options(): return [OptionSpec(name='seed', help='Mine now.')]\n"
    )
    plugins = load_plugins(quiet=True)
    assert "seed" not in plugins.engine_options()
    record = next(record for record in plugins.records if record.name == "toy")
    assert record.status is PluginStatus.FAILED
    assert "'seed' must begin with 'toy_'" in (record.reason or "")


LOGGERS = (
    HEAD
    + """
from inferplane.api.stats import StatLogger
import threading
seen, closed, came = [], [], threading.Event()
class Toy(StatLogger):
    interval_s = 0.01
    def record(self, stats):
        seen.append((self.config, stats.num_steps))
        if len(seen) >= 2: came.set()
    def close(self): closed.append(True)
class Broken(StatLogger):
    interval_s = 0.01
    def record(self, stats): raise OSError("collector is gone")
@hookimpl
def stat_loggers(): return [__name__ + ":Toy", __name__ + ":Broken"]
"""
)


def test_stat_loggers(toys: ToyIndex, caplog: pytest.LogCaptureFixture) -> None:
    toys.install("toy", LOGGERS)
    config: object = object()
    steps = iter(range(10**6))
    lock = threading.Lock()

    def stats() -> EngineStats:
        import msgspec

        with lock:
            return msgspec.structs.replace(EngineStats.at_start(), num_steps=next(steps))

    logging = StatLogging(make_stat_loggers(load_plugins().stat_loggers(), config), stats)  # type: ignore[arg-type]
    logging.start()
    import toy_toy_module

    assert toy_toy_module.came.wait(10)
    logging.stop()
    logging.stop()
    numbers = [number for _, number in toy_toy_module.seen]
    assert numbers == sorted(numbers) and toy_toy_module.seen[0][0] is config
    assert toy_toy_module.closed == [True]
    assert sum("stat logger Broken raised" in record.message for record in caplog.records) == 1


def test_what_is_no_stat_logger_is_refused(toys: ToyIndex) -> None:
    toys.install("toy", HEAD + "@hookimpl\ndef stat_loggers(): return ['json:dumps']\n")
    with pytest.raises(PluginError, match="json:dumps is offered as a stat logger, but is no subclass"):
        make_stat_loggers(load_plugins().stat_loggers(), object())  # type: ignore[arg-type]


LISTENERS = (
    HEAD
    + """
found, cleared = {}, []
class Toy:
    def __init__(self, config): self.config = config
    def block_stored(self, key, parent, token_ids): found[key] = (parent, token_ids)
    def block_removed(self, key): del found[key]
    def cache_cleared(self): found.clear(); cleared.append(True)
class Broken(Toy):
    def block_stored(self, key, parent, token_ids): raise OSError("router is gone")
@hookimpl
def kv_cache_listeners(): return [__name__ + ":Broken", __name__ + ":Toy"]
"""
)


def test_kv_cache_listeners(toys: ToyIndex, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Told of what a generation leaves in the cache, though another listener raises."""
    toys.install("toy", LISTENERS)
    with LLM(str(folder), device="reference", block_size=4, kv_cache_bytes=4 << 20, max_num_seqs=4) as llm:
        [output] = llm.generate([{"prompt_token_ids": list(range(3, 13))}], GREEDY, use_tqdm=False)
        import toy_toy_module

        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        blocks = [token_ids for _, token_ids in toy_toy_module.found.values()]
        # the last token is not run, and the block that it would end is not full
        assert blocks == [tokens[0:4], tokens[4:8], tokens[8:12]]
        parents = [parent for parent, _ in toy_toy_module.found.values()]
        assert parents == [None, *list(toy_toy_module.found)[:2]]
    assert sum("KV cache listener Broken raised" in record.message for record in caplog.records) == 1


def test_what_is_no_kv_cache_listener_is_refused(toys: ToyIndex) -> None:
    toys.install("toy", HEAD + "@hookimpl\ndef kv_cache_listeners(): return ['json:dumps']\n")
    with pytest.raises(PluginError, match="json:dumps is offered as a KV cache listener, but has not all of"):
        make_kv_listener(load_plugins().kv_cache_listeners(), object())  # type: ignore[arg-type]


def test_the_worker_sees_the_choices_and_not_the_manager() -> None:
    from inferplane.api.providers import Providers
    from inferplane.plugins import PluginSet

    offered = {name for name in vars(Providers) if not name.startswith("_")}
    assert offered == {
        "choose_attention", "choose_experts", "choose_linear", "choose_quantized", "logits_processors", "models",
        "quant_formats", "resolve_ops", "weight_loader",
    }  # fmt: skip
    assert all(callable(getattr(PluginSet, name)) for name in offered)
