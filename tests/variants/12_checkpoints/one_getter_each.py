"""Uses one getter per state, os.replace, and a broadcast that tells the other ranks about the rename.

In the background, it stages with deepcopy and renames in the thread.
"""

import copy
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)


def cleared(folder, step):
    target = os.path.join(folder, f"step_{step}")
    if dist.get_rank() == 0:
        for name in (target + ".gone", target + ".half"):
            if os.path.isdir(name):
                shutil.rmtree(name)
    dist.barrier()
    return target


def state_of(step, model, optimizer):
    return {
        "step": torch.tensor(step),
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }


def write(target, state, group=None):
    writer = dcp.FileSystemWriter(target + ".half", thread_count=2)
    dcp.save(state, storage_writer=writer, process_group=group)
    done = [None]
    if dist.get_rank() == 0:
        if os.path.isdir(target):
            os.replace(target, target + ".gone")
        os.replace(target + ".half", target)
        shutil.rmtree(target + ".gone", ignore_errors=True)
        done = ["renamed"]
    dist.broadcast_object_list(done, src=0, group=group)


def save_checkpoint(folder, step, model, optimizer):
    write(cleared(folder, step), state_of(step, model, optimizer))


class BackgroundSaver:
    def __init__(self):
        self.group = dist.new_group(backend="gloo")
        self.thread = ThreadPoolExecutor(max_workers=1)
        self.saves = []

    def save(self, folder, step, model, optimizer):
        self.wait()
        state = copy.deepcopy(state_of(step, model, optimizer))
        self.saves.append(self.thread.submit(write, cleared(folder, step), state, self.group))

    def wait(self):
        while self.saves:
            self.saves.pop().result()


def newest_checkpoint(folder):
    steps = []
    if folder.is_dir():
        for entry in os.scandir(folder):
            matched = re.fullmatch(r"step_(\d+)", entry.name)
            if matched and entry.is_dir():
                steps.append(int(matched[1]))
    return folder / f"step_{max(steps)}" if steps else None


def load_checkpoint(path, model, optimizer):
    state = {
        "step": torch.tensor(0),
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.load(state, storage_reader=dcp.FileSystemReader(path))
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return int(state["step"])
