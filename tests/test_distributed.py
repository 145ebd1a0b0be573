"""Two gloo processes under DistributedDataParallel: one start, one codebook, the gradients of the joint batch."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from drq_fast import RecurrentQuantizer

WORLD = 2


class Model(nn.Module):
    """A linear map and the layer; the loss is all that is returned, as in training by the loss alone."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        options = {"update": kind} if kind != "paper" else {"loss": kind}
        self.linear, self.layer = nn.Linear(6, 4), RecurrentQuantizer(4, 8, 3, **options)

    def forward(self, x: torch.Tensor, levels: int) -> torch.Tensor:
        return self.layer(self.linear(x), levels=levels, reconstruct=False).loss


def batch(step: int) -> torch.Tensor:
    return torch.randn(32 * WORLD, 6, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, rows: slice, steps: range) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in steps:
        optimiser.zero_grad()
        model(batch(step)[rows], 1 + step % 3).backward()
        optimiser.step()


def worker(rank: int, folder: str, kind: str) -> None:
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
    torch.manual_seed(rank)  # DDP broadcasts rank 0's weights; the k-means start must not depend on the rank either
    model = DistributedDataParallel(Model(kind))
    rows = slice(32 * rank, 32 * rank + 32)
    assert not model.module.layer.initialised
    model(batch(0)[rows], 3)  # starts the layer, on rank 0 and from its rows
    assert model.module.layer.initialised
    torch.save(copy.deepcopy(model.module.state_dict()), f"{folder}/start{rank}")
    train(model, rows, range(1, 8))
    torch.save(model.module.state_dict(), f"{folder}/end{rank}")

    layer = model.module.layer
    with torch.no_grad():
        layer.codebook[5] = 1e4
    revived = layer.revive(batch(9)[rows][:, :4] + rank)  # each rank offers other rows; rank 0's are taken
    torch.save((revived, layer.codebook.detach()), f"{folder}/revived{rank}")
    layer.observe(torch.tensor([[0, 1, 2], [3, 4, 5]]) if rank else torch.tensor([[6, 6, 6]]))
    before = layer.codebook.detach().clone()
    layer.revive(batch(9)[rows][:, :4], seed=0)
    torch.save((layer.codebook != before).any(dim=1), f"{folder}/observed{rank}")

    broken = batch(0)[:, :4] if rank else torch.full((3, 4), float("nan"))
    for op in ("initialise", "fit"):
        reason = f"{op}: x must be finite, got NaN or infinity in row 0."
        with pytest.raises(ValueError if rank == 0 else RuntimeError) as caught:
            getattr(RecurrentQuantizer(4, 8, 3), op)(broken)
        assert str(caught.value) == (reason if rank == 0 else f"{op}: failed on rank 0: {reason}")
    # Gloo's threads may still hold the last broadcast's tensors and need the interpreter to let go of them, while the
    # destructor of the process group, holding the interpreter, waits for these threads. So leave without destructors.
    dist.barrier()
    os._exit(0)


@pytest.fixture(scope="module", params=["ema", "gradient", "paper"])
def folder(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    mp.spawn(worker, args=(str(folder), request.param), nprocs=WORLD)
    return folder


def test_both_ranks_start_and_end_with_the_same_weights(folder):
    for moment in ("start", "end"):
        first, second = (torch.load(folder / f"{moment}{rank}") for rank in range(WORLD))
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_two_processes_train_as_one_with_the_joint_batch(folder):
    model = Model(folder.name.rstrip("0"))
    model.load_state_dict(torch.load(folder / "start0"))
    train(model, slice(None), range(1, 8))
    together = torch.load(folder / "end0")
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, together[name], rtol=1e-4, atol=1e-5)


def test_counts_of_all_ranks_decide_what_is_revived(folder):
    first, second = (torch.load(folder / f"observed{rank}") for rank in range(WORLD))
    assert torch.equal(first, second)
    assert first.tolist() == [False] * 7 + [True]


def test_revived_codewords_are_those_of_rank_zero(folder):
    (first, codebook), (second, other) = (torch.load(folder / f"revived{rank}") for rank in range(WORLD))
    assert first == second >= 1
    assert torch.equal(codebook, other)
    assert codebook.abs().max() < 100
