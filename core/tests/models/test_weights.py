"""Every parameter is loaded, tied or reported."""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_models
from inferplane.api.comm import Communicator
from inferplane.api.linear import LinearShape, Multiply
from inferplane.api.model import Model
from inferplane.api.quant import PLAIN_DTYPES
from inferplane.layers import Linear, walk_layers
from inferplane.layers.layer import Layer, WeightSlot
from inferplane.models.errors import ModelLoadError
from inferplane.models.registry import build_model
from inferplane.models.weights import dummy_tensors, load_weights, weight_slots
from model_harness import DenseLinear, PromptRun, make_context, read_config, read_tensors, run_ranks

PROMPTS = [[5, 9, 2, 700], [7]]
Tensors = dict[str, torch.Tensor]


def _load(folder: Path, change: Callable[[Tensors], Any] = lambda tensors: None, **context: Any) -> Model:
    tensors = dict(read_tensors(folder))
    change(tensors)
    model = build_model(make_context(read_config(folder), **context))
    model.load_weights(tensors.items())
    return model


def _logits(model: Model) -> torch.Tensor:
    return torch.cat(PromptRun(model).logits(PROMPTS))


@pytest.fixture
def untied(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_models.make_tiny_model("llama", tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)
    assert "lm_head.weight" not in dict(read_tensors(folder))
    return folder


def _with_lm_head(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def _with_lm_head_first(tensors: Tensors) -> None:
    rest = dict(tensors)
    tensors.clear()
    tensors["lm_head.weight"] = rest["model.embed_tokens.weight"].clone()
    tensors.update(rest)


@pytest.mark.parametrize("add_lm_head", [_with_lm_head, _with_lm_head_first])
def test_a_tied_model_loads_with_and_without_a_head(
    add_lm_head: Callable[[Tensors], None], tied: Path, caplog: pytest.LogCaptureFixture
):
    assert torch.equal(_logits(_load(tied)), _logits(_load(tied, add_lm_head)))
    assert not caplog.records


def test_a_head_that_differs_from_a_tied_embedding_is_used_as_transformers_does(
    tied: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    import safetensors.torch
    from transformers import AutoModelForCausalLM

    tensors = dict(read_tensors(tied))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 0.5
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((tied / "config.json").read_bytes())
    with caplog.at_level(logging.WARNING, "inferplane"):
        ours = _logits(_load(tmp_path))
    assert "lm_head.weight differs from the embedding" in caplog.text
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        expected = torch.cat([theirs(torch.tensor([prompt])).logits[0] for prompt in PROMPTS])
    assert (ours - expected).abs().max() < 1e-4


def test_an_untied_model_without_its_head_is_refused_by_name(untied: Path):
    with pytest.raises(ModelLoadError, match=r"missing: lm_head\.weight"):
        _load(untied, lambda tensors: tensors.pop("lm_head.weight"))


@pytest.mark.parametrize("arch", tiny_models.ARCHITECTURES)
def test_each_tensor_that_is_missing_is_named(arch: str, tiny_model: Callable[[str], Path]):
    folder = tiny_model(arch)
    hf_config = read_config(folder)
    tensors = dict(read_tensors(folder))
    for name in tensors:
        others = ((other, tensor) for other, tensor in tensors.items() if other != name)
        with pytest.raises(ModelLoadError) as caught:
            build_model(make_context(hf_config)).load_weights(others)
        assert str(caught.value).endswith(f": missing: {name}")


def test_all_faults_are_named_at_once(untied: Path):
    def spoil(tensors: Tensors) -> None:
        del tensors["model.norm.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
        tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(160, 64)
        tensors["model.layers.1.self_attn.k_proj.weight"] = torch.zeros(64, 32)
        tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(160, 64, dtype=torch.int8)

    with pytest.raises(ModelLoadError) as caught:
        _load(untied, spoil)
    message = str(caught.value)
    assert message.startswith("the checkpoint does not fit LlamaForCausalLM: ")
    assert "missing: model.norm.weight" in message
    unexpected = "model.layers.0.self_attn.q_proj.bias, model.layers.2.mlp.up_proj.weight"
    assert f"unexpected: {unexpected}" in message
    assert "wrong shape: model.layers.1.self_attn.k_proj.weight is [64, 32] and should be [32, 64]" in message
    assert "wrong type: model.layers.1.mlp.up_proj.weight is int8" in message


class OneTensor(Layer):
    def __init__(self, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...]) -> None:
        self.taken: list[torch.Tensor] = []
        self._slot = WeightSlot("x", shape, self.taken.append, dtypes=dtypes)

    def weight_slots(self) -> list[WeightSlot]:
        return [self._slot]


@pytest.mark.parametrize(
    ("stored", "wanted", "dtypes"),
    [
        ((), (1,), PLAIN_DTYPES),
        ((), (None,), PLAIN_DTYPES),
        ((), (1, 1), (torch.float32,)),
        ((3,), (3, 1), (torch.float32,)),
    ],
    ids=str,
)
def test_last_dimensions_of_one_that_are_not_stored(stored, wanted, dtypes):
    layer, tensor = OneTensor(wanted, dtypes), torch.randn(stored)
    load_weights(layer, [("x", tensor)])
    shape = tuple(size or 1 for size in wanted)
    assert len(layer.taken) == 1 and torch.equal(layer.taken[0], tensor.reshape(shape))


@pytest.mark.parametrize(
    ("stored", "wanted", "dtypes"),
    [
        ((3,), (3, 1), PLAIN_DTYPES),
        ((), (3,), PLAIN_DTYPES),
        ((2,), (3, 1), (torch.float32,)),
        ((3, 1), (3,), (torch.float32,)),
    ],
    ids=str,
)
def test_other_dimensions_that_are_not_stored_are_a_wrong_shape(stored, wanted, dtypes):
    message = f"wrong shape: x is {list(stored)} and should be {list(wanted)}"
    with pytest.raises(ModelLoadError, match=re.escape(message)):
        load_weights(OneTensor(wanted, dtypes), [("x", torch.randn(stored))])


def test_a_long_list_of_names_is_cut_and_counted(untied: Path):
    def strangers(tensors: Tensors) -> None:
        tensors.update({f"stranger.{index}": torch.zeros(1) for index in range(25)})

    with pytest.raises(ModelLoadError, match=r"stranger\.19 and 5 more$"):
        _load(untied, strangers)


def test_a_tensor_given_twice_is_refused(untied: Path):
    tensors = list(read_tensors(untied))
    model = build_model(make_context(read_config(untied)))
    with pytest.raises(ModelLoadError, match=f"repeated: {tensors[3][0]}"):
        model.load_weights([*tensors, tensors[3]])


def test_rotary_buffers_of_old_checkpoints_are_ignored(untied: Path):
    def add_buffers(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    assert torch.equal(_logits(_load(untied)), _logits(_load(untied, add_buffers)))


def test_any_order_of_tensors_gives_the_same_model(untied: Path):
    def turn_round(tensors: Tensors) -> None:
        items = list(reversed(tensors.items()))
        tensors.clear()
        tensors.update(items)

    assert torch.equal(_logits(_load(untied)), _logits(_load(untied, turn_round)))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_are_converted_on_the_way(stored: torch.dtype, untied: Path):
    def store(tensors: Tensors) -> None:
        tensors.update({name: tensor.to(stored) for name, tensor in tensors.items()})

    def round_trip(tensors: Tensors) -> None:
        tensors.update({name: tensor.to(stored).float() for name, tensor in tensors.items()})

    assert torch.equal(_logits(_load(untied, store)), _logits(_load(untied, round_trip)))


def test_a_packed_weight_is_not_kept_a_second_time(untied: Path):
    alive: list[weakref.ref[torch.Tensor]] = []
    most_alive = 0

    class PackingLinear(DenseLinear):
        @classmethod
        def prepare(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> Multiply:
            nonlocal most_alive
            alive.append(weakref.ref(weight))
            most_alive = max(most_alive, sum(each() is not None for each in alive))
            return super().prepare(weight.clone(), bias)

    model = _load(untied, choose_linear=lambda shape: PackingLinear)
    assert len(alive) == 2 * 4 + 1
    assert most_alive == 1
    assert not any(each() is not None for each in alive)
    assert torch.equal(_logits(model), _logits(_load(untied)))


def test_the_kernel_is_chosen_by_the_shape_on_this_rank(untied: Path):
    shapes: list[LinearShape] = []

    def choose(shape: LinearShape) -> type[DenseLinear]:
        shapes.append(shape)
        return DenseLinear

    run_ranks(2, lambda comm: _load(untied, comm=comm, choose_linear=choose if comm.rank == 1 else _dense))
    found = {shape.name.rpartition(".")[2]: (shape.in_features, shape.out_features) for shape in shapes}
    assert found == {
        "v_proj": (64, 64 // 2 + 2 * 32 // 2),
        "o_proj": (64 // 2, 64),
        "up_proj": (64, 160),
        "down_proj": (160 // 2, 64),
        "lm_head": (64, 1024 // 2),
    }
    assert all(shape.dtype == torch.float32 and not shape.has_bias for shape in shapes)


def _dense(shape: LinearShape) -> type[DenseLinear]:
    return DenseLinear


def test_a_layer_called_before_it_is_loaded_says_so(untied: Path):
    model = build_model(make_context(read_config(untied)))
    linear = next(layer for layer in walk_layers(model) if isinstance(layer, Linear))
    with pytest.raises(RuntimeError, match="called before its weights were loaded"):
        linear(torch.zeros(1, 64))


class TestDummy:
    def test_is_the_same_each_time_and_another_for_another_seed(self, untied: Path):
        slots = weight_slots(build_model(make_context(read_config(untied))))
        first, again, other = (dict(dummy_tensors(slots, seed)) for seed in (0, 0, 1))
        assert first.keys() == {slot.name for slot in slots}
        for name, tensor in first.items():
            assert torch.equal(tensor, again[name])
            assert not torch.equal(tensor, other[name])
        q_projections = [first[f"model.layers.{index}.self_attn.q_proj.weight"] for index in (0, 1)]
        assert not torch.equal(*q_projections)

    def test_is_small_noise_and_scales_of_about_one(self, untied: Path):
        slots = weight_slots(build_model(make_context(read_config(untied))))
        for name, tensor in dummy_tensors(slots):
            center = 1.0 if "norm" in name else 0.0
            assert abs(tensor.mean() - center) < 0.01
            assert 0.01 < tensor.std() < 0.03
            assert tensor.ndim == 1 or len(tensor.unique(dim=0)) == len(tensor)

    @pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
    def test_is_one_model_on_all_ranks(self, arch: str, tiny_model: Callable[[str], Path]):
        hf_config = read_config(tiny_model(arch))

        def dummy(comm: Communicator | None) -> torch.Tensor:
            model = build_model(make_context(hf_config, comm=comm))
            model.load_weights(dummy_tensors(weight_slots(model)))
            return _logits(model)

        alone = dummy(None)
        assert alone.isfinite().all()
        for rank in run_ranks(2, dummy):
            assert (rank - alone).abs().max() < 1e-5

    def test_of_a_tied_model_needs_no_head(self, tied: Path):
        model = build_model(make_context(read_config(tied)))
        model.load_weights(dummy_tensors(weight_slots(model)))
        assert _logits(model).isfinite().all()

    def test_of_a_stack_of_matrices_is_noise_in_every_one(self):
        slot = WeightSlot("experts.gate_up", (3, 8, 16), copy=lambda tensor: None)
        [(_, tensor)] = dummy_tensors([slot], device="cpu")
        assert tensor.shape == slot.shape
        assert len(tensor.flatten(0, 1).unique(dim=0)) == 24
