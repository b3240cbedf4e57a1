"""Shards while it walks down the tree, prefetches by hand, saves through a Stateful, and keeps the best so far."""

import contextlib
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from shared import planner
from shared.planner import clusters
from solutions import production
from solutions.manual_ddp import broadcast_state


def fully_sharded(module, units=None, compute_dtype=None, reduce_dtype=None, reshard_after_forward=True, mesh=None):
    broadcast_state(module)
    chosen = [*(production.default_units(module) if units is None else units)]
    mesh = mesh or init_device_mesh("cuda" if torch.cuda.is_initialized() else "cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype)

    def descend(each):
        for child in each.children():
            descend(child)
        if each is not module and each in chosen:
            chosen.remove(each)
            fully_shard(each, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)

    descend(module)
    return fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def host_mesh(ranks_per_host):
    hosts, left = divmod(dist.get_world_size(), ranks_per_host)
    if left:
        raise ValueError(f"with {ranks_per_host} ranks per host, {left} of {dist.get_world_size()} ranks are left over")
    flat = init_device_mesh("cuda" if torch.cuda.is_initialized() else "cpu", (hosts, ranks_per_host))
    return type(flat)(flat.device_type, flat.mesh, mesh_dim_names=("replicate", "shard"))


class Run(Stateful):
    """All that a run is, as torch.distributed.checkpoint asks for it."""

    def __init__(self, model, optimizer, step=0):
        self.model, self.optimizer, self.step = model, optimizer, step

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = state["step"]


def save_checkpoint(folder, step, model, optimizer):
    half = Path(folder, f"step_{step}.half")
    if dist.get_rank() == dist.get_world_size() - 1:  # the last one tidies up, and renames
        for path in (half, half.with_suffix("")):
            with contextlib.suppress(FileNotFoundError):
                production.shutil.rmtree(path)
    dist.barrier()
    dcp.save({"run": Run(model, optimizer, step)}, checkpoint_id=str(half))
    dist.barrier()
    if dist.get_rank() == dist.get_world_size() - 1:
        half.replace(half.with_suffix(""))
    dist.barrier()


def newest_checkpoint(folder):
    found = None
    for path in sorted(Path(folder).glob("step_*")):
        with contextlib.suppress(ValueError):
            number = int(path.name.split("step_", 1)[1])
            found = max(found or (number, path), (number, path))
    return found and found[1]


def load_checkpoint(path, model, optimizer):
    run = Run(model, optimizer)
    dcp.load({"run": run}, checkpoint_id=path)
    return run.step


def choose_strategy(shape, cluster, micro_batch=1):
    best = None
    for stage in (3, 2, 1, 0):
        for checkpointing in ("full", "selective"):
            for ranks in dict.fromkeys((cluster.cards_per_host, cluster.cards)):
                if not stage and ranks < cluster.cards:
                    continue
                how = {"stage": stage, "checkpointing": checkpointing, "micro_batch": micro_batch}
                fits = planner.plan(shape, ranks=ranks, **how).total_bytes / cluster.card_bytes <= 0.9
                step_s = clusters.step_seconds(shape, cluster, shard_ranks=ranks, **how)
                if fits and (best is None or step_s <= best.step_s):
                    best = SimpleNamespace(stage=stage, shard_ranks=ranks, checkpointing=checkpointing, step_s=step_s)
    return best
