"""Finds checkpoints by a regular expression, and lets rank 0 tell the others what it has done with a broadcast."""

import contextlib
import re
import shutil
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

from shared.sharded.checkpoints import states_of, states_to_load


def newest_checkpoint(folder):
    found = [
        (int(match[1]), path) for path in folder.glob("step_*") if (match := re.fullmatch(r"step_(\d+)", path.name))
    ]
    return max(found)[1] if found else None


def _on_rank_0(*actions):
    """Run actions on rank 0. All ranks return when they are done."""
    if dist.get_rank() == 0:
        for action in actions:
            action()
    done = torch.zeros(1, device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.broadcast(done, src=0)
    done.item()  # waits, because on a GPU broadcast() returns before it is done


def _names(folder, step):
    return tuple(folder.joinpath(f"step_{step}{suffix}") for suffix in ("", ".half", ".old"))


def _begin(folder, step):
    _, half, old = _names(folder, step)
    _on_rank_0(*(partial(shutil.rmtree, path, True) for path in (half, old)))
    return half


def _complete(folder, step):
    final, half, old = _names(folder, step)

    def move_aside():
        with contextlib.suppress(FileNotFoundError):
            final.rename(old)

    _on_rank_0(move_aside, partial(half.rename, final), partial(shutil.rmtree, old, True))


def _state(model, optimizer, step):
    return dict(zip(("model", "optimizer"), states_of(model, optimizer), strict=True), step=step)


def save_checkpoint(folder, step, model, optimizer):
    writer = dcp.FileSystemWriter(_begin(folder, step))
    dcp.save(_state(model, optimizer, step), storage_writer=writer)
    _complete(folder, step)


def load_checkpoint(path, model, optimizer):
    with states_to_load(path, model, optimizer) as states:
        loaded = {"step": -1, "model": states[0], "optimizer": states[1]}
        dcp.load(loaded, storage_reader=dcp.FileSystemReader(path))
        options = StateDictOptions(strict=False)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optimizer"],
            options=options,
        )
    return int(loaded["step"])


class BackgroundSaver:
    def __init__(self):
        self.group, self.waiting = dist.new_group(backend="gloo"), []

    def save(self, folder, step, model, optimizer):
        self.wait()
        state = _state(model, optimizer, step)
        future = dcp.async_save(state, checkpoint_id=str(_begin(folder, step)), process_group=self.group)
        self.waiting = [future.result, partial(_complete, folder, step)]

    def wait(self):
        steps, self.waiting = self.waiting, []
        for step in steps:
            step()
