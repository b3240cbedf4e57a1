"""Checkpoints of a run whose ranks are killed while they save: others resume from the last complete one.

The functions without `test_` run on the ranks.
"""

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter

from shared import models, ranks
from shared.deadlines import scaled
from solutions.checkpoints import BackgroundSaver, load_checkpoint, newest_checkpoint, save_checkpoint
from solutions.production import fully_sharded, host_mesh

pytestmark = pytest.mark.slow

SAMPLES, SAVED_AT, KILLED_AT, STEPS = 12, 2, 4, 6
SETTINGS = {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-3}  # A large eps keeps values near 0 from becoming a step of lr.
DEADLINE_S = scaled(30.0)


def tiny_gpt(seed: int) -> models.TinyGPT:
    """Build a model with a tied embedding, a frozen layer, a buffer, and no size that is divisible by three."""
    gpt = models.TinyGPT(models.GPTConfig(vocab_size=13, context=8, layers=2, heads=2, width=10), seed).double()
    gpt.blocks[0].attention.requires_grad_(False)
    gpt.register_buffer("count", torch.tensor(3.0 + seed))
    return gpt


def batch_of(step: int, rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a rank's share of a step's samples, which are the same for any number of ranks."""
    tokens = torch.randint(13, (SAMPLES, 9), generator=torch.Generator().manual_seed(step))
    own = tokens[rank::world_size]
    return own[:, :-1], own[:, 1:]


def train(model, optimizer, steps: range, rank: int = 0, world_size: int = 1) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(*batch_of(step, rank, world_size))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def new_run(seed: int, sharded: bool = True, hosts: int = 1):
    model = tiny_gpt(seed)
    if sharded:
        fully_sharded(model, mesh=host_mesh(dist.get_world_size() // hosts) if hosts > 1 else None)
    return model, torch.optim.AdamW(model.parameters(), **SETTINGS)


def die(*_, **__) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_while_saving(folder: str, moment: str) -> None:
    """Save, train on, and save again, when a rank is killed."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, optimizer = new_run(rank)
    saver = BackgroundSaver()

    def save(step: int) -> None:
        if moment != "while a thread writes":
            save_checkpoint(Path(folder), step, model, optimizer)
            return
        saver.save(Path(folder), step, model, optimizer)
        saver.wait()

    train(model, optimizer, range(SAVED_AT), rank, world_size)
    save(SAVED_AT)
    train(model, optimizer, range(SAVED_AT, KILLED_AT), rank, world_size)
    if moment != "before the rename" and rank == world_size - 1:
        FileSystemWriter.write_data = die
    if moment == "before the rename" and rank == 0:
        Path.rename = die
    save(KILLED_AT)


def killed_while_removing_an_earlier_attempt(folder: str) -> None:
    """Save the same step twice. Kill rank 0 when it has removed one file of the first attempt."""
    model, optimizer = new_run(dist.get_rank())
    for step in (SAVED_AT, KILLED_AT):
        save_checkpoint(Path(folder), step, model, optimizer)
    if dist.get_rank() == 0:
        shutil.rmtree = lambda path, **_: path.exists() and die(next(path.iterdir()).unlink())
    save_checkpoint(Path(folder), KILLED_AT, model, optimizer)


def resumed(folder: str, hosts: int = 1) -> tuple[str, int, list[float]]:
    """Resume from the newest checkpoint. Return its name, its step, and the losses from there on."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, optimizer = new_run(7 + rank, sharded=world_size > 1, hosts=hosts)
    path = newest_checkpoint(Path(folder))
    step = load_checkpoint(path, model, optimizer)
    losses = train(model, optimizer, range(step, KILLED_AT), rank, world_size)
    save_checkpoint(Path(folder), KILLED_AT, model, optimizer)
    return path.name, step, losses + train(model, optimizer, range(KILLED_AT, STEPS), rank, world_size)


def uninterrupted() -> list[float]:
    """Return the losses of one process that was not killed."""
    model, optimizer = new_run(0, sharded=False)
    return train(model, optimizer, range(STEPS))


def mean_losses(found: list[tuple]) -> list[float]:
    return [sum(losses) / len(losses) for losses in zip(*(losses for _, _, losses in found), strict=True)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("moment", ["while a rank writes", "while a thread writes", "before the rename"])
def test_a_kill_loses_only_the_steps_since_the_last_save(four_ranks, tmp_path, moment):
    with pytest.raises(ranks.CellFailed, match=r"was killed \(SIGKILL\)"):
        ranks.run(killed_while_saving, str(tmp_path), moment, timeout_s=DEADLINE_S)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step_{SAVED_AT}", f"step_{KILLED_AT}.half"]
    with ranks.world(2):
        found = ranks.run(resumed, str(tmp_path), timeout_s=DEADLINE_S)
    assert {(name, step) for name, step, _ in found} == {(f"step_{SAVED_AT}", SAVED_AT)}
    assert mean_losses(found) == pytest.approx(uninterrupted()[SAVED_AT:], abs=1e-10)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step_{SAVED_AT}", f"step_{KILLED_AT}"]


def test_a_kill_leaves_no_partial_earlier_attempt(four_ranks, tmp_path):
    with pytest.raises(ranks.CellFailed, match=r"was killed \(SIGKILL\)"):
        ranks.run(killed_while_removing_an_earlier_attempt, str(tmp_path), timeout_s=DEADLINE_S)
    newest = newest_checkpoint(tmp_path)
    assert newest == tmp_path / f"step_{KILLED_AT}"  # The new one: the old one was removed only after it was written.
    assert len(list(newest.glob("*.distcp"))) == 4 and (newest / ".metadata").exists()


def saved(folder: str, hosts: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, optimizer = new_run(rank, hosts=hosts)
    train(model, optimizer, range(SAVED_AT), rank, world_size)
    save_checkpoint(Path(folder), SAVED_AT, model, optimizer)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_process_without_a_group_resumes(four_ranks, tmp_path):
    ranks.run(saved, str(tmp_path), 2, timeout_s=DEADLINE_S)
    model, optimizer = new_run(5, sharded=False)
    step = load_checkpoint(newest_checkpoint(tmp_path), model, optimizer)
    assert train(model, optimizer, range(step, STEPS)) == pytest.approx(uninterrupted()[step:], abs=1e-10)


@pytest.mark.parametrize(("size", "hosts"), [(1, 1), (3, 1), (4, 2)])
def test_any_number_of_ranks_resumes_hybrid_or_not(four_ranks, tmp_path, size, hosts):
    ranks.run(saved, str(tmp_path), 1 if hosts == 2 else 2, timeout_s=DEADLINE_S)
    with ranks.world(size):
        found = ranks.run(resumed, str(tmp_path), hosts, timeout_s=DEADLINE_S)
    assert mean_losses(found) == pytest.approx(uninterrupted()[SAVED_AT:], abs=1e-10)
