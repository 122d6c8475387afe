"""The Mamba 2 mixer in steps and segments against transformers' over the whole sequence."""

from __future__ import annotations

import zlib

import pytest
import torch
from transformers import Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer as Theirs

from inferplane.api.attention import AttentionInputs
from inferplane.api.comm import Communicator, SoloCommunicator
from inferplane.api.model import ForwardBatch
from inferplane.api.state import allocate_states, state_rounds
from inferplane.config import ConfigError
from inferplane.layers import ssm, state_mixer
from inferplane.layers.layer import walk_layers
from model_harness import make_context, run_ranks

CONFIG = {"architectures": ["X"], "vocab_size": 8}
SHAPE = {"num_heads": 6, "head_dim": 8, "num_groups": 2, "state_size": 5, "conv_width": 4, "eps": 1e-5}
LENGTHS = [21, 9]
TABLE = torch.tensor([[7, 3, 9, 1, 0, 10], [2, 8, 5, 0, 0, 0]], dtype=torch.int32)


@pytest.fixture
def mixers(monkeypatch: pytest.MonkeyPatch) -> tuple[ssm.StateSpaceMixer, Theirs]:
    monkeypatch.setattr(state_mixer, "CHECKPOINT_TOKENS", 4)
    torch.manual_seed(0)
    theirs = Theirs(
        Mamba2Config(
            hidden_size=24, expand=2, num_heads=6, head_dim=8, n_groups=2, state_size=5, conv_kernel=4,
            num_hidden_layers=1, use_bias=True, layer_norm_epsilon=1e-5,
        ),
        layer_idx=0,
    )  # fmt: skip
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    ours = ssm.StateSpaceMixer(make_context(CONFIG), "mixer", 24, bias=True, **SHAPE)
    tensors = theirs.state_dict()
    layers = list(walk_layers(ours))
    slots = [slot for layer in layers for slot in layer.weight_slots()]
    assert sorted(slot.name for slot in slots) == sorted(f"mixer.{name}" for name in tensors)
    for slot in slots:
        tensor = tensors[slot.name.removeprefix("mixer.")]
        assert slot.shape == tuple(tensor.shape)
        slot.copy(tensor)
    for layer in layers:
        layer.finish_loading()
    return ours, theirs


@pytest.mark.parametrize(
    "steps",
    [
        [[(0, 21), (0, 9)]],
        [[(0, 3), (0, 9)], [(3, 16)], [(16, 17)], [(17, 21)]],
        [[(0, 1), (0, 8)], [(1, 20), (8, 9)], [(20, 21)]],
    ],
)
@torch.inference_mode()
def test_it_equals_transformers_in_any_steps(
    mixers: tuple[ssm.StateSpaceMixer, Theirs], steps: list[list[tuple[int, int]]]
) -> None:
    ours, theirs = mixers
    hidden = [torch.randn(length, 24) for length in LENGTHS]
    spec = ours.description.spec
    memory = allocate_states(spec, 11, torch.device("cpu")).fill_(255)  # which is NaN in any float
    parts: list[list[torch.Tensor]] = [[], []]
    for spans in steps:
        lens, ends = [end - start for start, end in spans], [end for _, end in spans]
        inputs = AttentionInputs(
            num_reqs=len(spans),
            num_tokens=sum(lens),
            query_lens_host=lens,
            seq_lens_host=ends,
            query_start=torch.tensor([0, *lens]).cumsum(0).int(),
            seq_lens=torch.tensor(ends, dtype=torch.int32),
            block_table=TABLE[: len(spans)],
            slot_mapping=torch.zeros(0, dtype=torch.int64),
            block_size=spec.block_size,
        )
        x = torch.cat([hidden[i][start:end] for i, (start, end) in enumerate(spans)])
        none = torch.zeros(0, dtype=torch.int64)
        batch = ForwardBatch(
            token_ids=none, positions=none, logits_rows=none,
            kv={"mixer": memory}, metadata={"mixer": state_rounds(inputs)},
        )  # fmt: skip
        for index, rows in enumerate(ours(x, batch).split(lens)):
            parts[index].append(rows)
    for own, rows in zip(hidden, parts):
        want = theirs(own.unsqueeze(0))[0]
        torch.testing.assert_close(torch.cat(rows), want, rtol=1e-4, atol=1e-5)
    # a checkpoint is what another request would have at that token: block 7 after 4 tokens of the first
    assert not memory[7].eq(255).all()


def filled(comm: Communicator, num_groups: int) -> ssm.StateSpaceMixer:
    """With weights that follow from their names, whatever part of them a rank has."""
    mixer = ssm.StateSpaceMixer(
        make_context(CONFIG, comm=comm), "mixer", 24, bias=True, **{**SHAPE, "num_groups": num_groups}
    )
    layers = list(walk_layers(mixer))
    for slot in (slot for layer in layers for slot in layer.weight_slots()):
        seed = torch.Generator().manual_seed(zlib.crc32(slot.name.encode()))
        slot.copy(0.3 * torch.randn(slot.shape, generator=seed))
    for layer in layers:
        layer.finish_loading()
    return mixer


@torch.inference_mode()
def outputs_of(mixer: ssm.StateSpaceMixer) -> torch.Tensor:
    """Of a prompt in two steps."""
    hidden = torch.randn(9, 24, generator=torch.Generator().manual_seed(7))
    spec, none = mixer.description.spec, torch.zeros(0, dtype=torch.int64)
    memory, parts = allocate_states(spec, 2, torch.device("cpu")), []
    for start, end in ((0, 6), (6, 9)):
        inputs = AttentionInputs(
            num_reqs=1,
            num_tokens=end - start,
            query_lens_host=[end - start],
            seq_lens_host=[end],
            query_start=torch.tensor([0, end - start], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32),
            block_table=torch.tensor([[1]], dtype=torch.int32),
            slot_mapping=none,
            block_size=spec.block_size,
        )
        batch = ForwardBatch(
            token_ids=none, positions=none, logits_rows=none,
            kv={"mixer": memory}, metadata={"mixer": state_rounds(inputs)},
        )  # fmt: skip
        parts.append(mixer(hidden[start:end], batch))
    return torch.cat(parts)


@pytest.mark.parametrize(("num_ranks", "num_groups"), [(2, 2), (3, 3), (2, 1), (3, 1), (6, 2)])
def test_ranks_together_equal_one_alone(num_ranks: int, num_groups: int) -> None:
    """With groups of their own, and with parts of groups."""
    alone = outputs_of(filled(SoloCommunicator(), num_groups))
    for rank in run_ranks(num_ranks, lambda comm: outputs_of(filled(comm, num_groups))):
        torch.testing.assert_close(rank, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("num_ranks", "num_groups", "what"), [(4, 1, "heads 6"), (3, 2, "groups 2")])
def test_numbers_that_do_not_divide_are_refused(num_ranks: int, num_groups: int, what: str) -> None:
    with pytest.raises(ConfigError, match=f"mixer: number of {what}"):
        run_ranks(num_ranks, lambda comm: filled(comm, num_groups))
