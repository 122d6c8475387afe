"""Mixtures over ranks: each rank has a part of every expert, or some experts whole, and the sum is the same."""

from __future__ import annotations

import pytest
import torch

from inferplane.api.comm import Communicator
from inferplane.layers import Experts, SeparateExperts, StackedExperts
from inferplane.models.weights import load_weights
from model_harness import make_context, run_ranks

NUM, HIDDEN, INNER = 6, 20, 12
CONFIG = {"architectures": ["X"], "vocab_size": 8}


def stacked_tensors(bias: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {"a.in": torch.randn(NUM, 2 * INNER, HIDDEN), "a.out": torch.randn(NUM, HIDDEN, INNER)}
    if bias:
        tensors |= {"a.in_bias": torch.randn(NUM, 2 * INNER), "a.out_bias": torch.randn(NUM, HIDDEN)}
    return tensors


@pytest.mark.parametrize("is_expert_parallel", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_add_up(is_expert_parallel: bool, bias: bool, num_ranks: int):
    x, ids = torch.randn(30, HIDDEN), torch.stack([torch.randperm(NUM)[:2] for _ in range(30)]).int()
    weights, tensors = torch.rand(30, 2), stacked_tensors(bias)

    def work(comm: Communicator) -> torch.Tensor:
        experts = Experts(
            make_context(CONFIG, comm=comm),
            StackedExperts("a.in", "a.out"),
            NUM,
            HIDDEN,
            INNER,
            bias=bias,
            is_expert_parallel=is_expert_parallel,
        )
        load_weights([experts], tensors.items())
        return experts(x, weights, ids)

    [alone] = run_ranks(1, work)
    for rank in run_ranks(num_ranks, work):
        torch.testing.assert_close(rank, alone, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("is_transposed", "is_interleaved"), [(False, False), (True, False), (True, True)])
def test_however_the_checkpoint_lays_them_out(is_transposed: bool, is_interleaved: bool):
    stacked = stacked_tensors(bias=False)
    gate, up = stacked["a.in"].chunk(2, dim=1)
    separate = {f"b.{i}.g.weight": gate[i] for i in range(NUM)}
    separate |= {f"b.{i}.u.weight": up[i] for i in range(NUM)}
    separate |= {f"b.{i}.d.weight": stacked["a.out"][i] for i in range(NUM)}
    if is_interleaved:
        stacked["a.in"] = torch.stack([gate, up], dim=2).flatten(1, 2)
    if is_transposed:
        stacked = {name: tensor.transpose(1, 2) for name, tensor in stacked.items()}
    x, ids, weights = torch.randn(9, HIDDEN), torch.randint(NUM, (9, 1)).int(), torch.rand(9, 1)
    answers = []
    for tensors, held in (
        (StackedExperts("a.in", "a.out", is_transposed, is_interleaved), stacked),
        (SeparateExperts("b", "g", "u", "d"), separate),
    ):
        experts = Experts(make_context(CONFIG), tensors, NUM, HIDDEN, INNER)
        load_weights([experts], held.items())
        answers.append(experts(x, weights, ids))
    assert torch.equal(*answers)
