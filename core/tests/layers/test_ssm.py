"""The Mamba 2 mixer in steps and segments against transformers' over the whole sequence."""

from __future__ import annotations

import pytest
import torch
from transformers import Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer as Theirs

from inferplane.api.attention import AttentionInputs
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


def test_there_is_one_state_without_checkpoints_and_no_second_rank() -> None:
    with pytest.raises(ConfigError, match="state-space layers run on one rank, not 2"):
        run_ranks(2, lambda comm: ssm.StateSpaceMixer(make_context(CONFIG, comm=comm), "m", 24, **SHAPE))
