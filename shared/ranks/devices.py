"""Where ranks can live on this machine: how many fit, with which backend, on which device."""

import os
from dataclasses import dataclass

import psutil

from shared import hosts
from shared.ranks import interrupts

MEMORY_PER_RANK_GB = 0.4  # torch imported and a small model, measured; pages shared by the fork not counted


@dataclass(frozen=True)
class Placement:
    """A backend, one device per rank, and what may be measured there."""

    backend: str
    devices: tuple[str, ...]
    valid: str


def check_world_size(world_size: int) -> None:
    """Refuse a world size that cannot be served, in one sentence.

    Raises: TypeError, ValueError.
    """
    if not isinstance(world_size, int) or isinstance(world_size, bool):
        raise TypeError(f"world_size must be a whole number, got {world_size!r}")
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    cores = os.cpu_count() or 1
    free_gb = psutil.virtual_memory().available / 1e9
    fit = max(1, int(free_gb / MEMORY_PER_RANK_GB))
    most = min(max(8, 2 * cores), fit)
    if world_size > most and world_size > min(gpu_count(), fit):
        raise ValueError(
            f"world_size={world_size} is too much for this machine ({cores} cores, {free_gb:.0f} GB free): "
            f"ask for {most} ranks at most. No lesson needs more than 4."
        )


def gpu_count() -> int:
    with interrupts.held():  # an import of torch that is broken off cannot be completed later
        import torch

    return torch.cuda.device_count()


def check_link(link: str | None) -> None:
    """Refuse a link that cannot be read, or that this machine cannot put between hosts.

    Raises: ValueError.
    """
    if link is None:
        return
    hosts.bits_per_s(link)
    if why := hosts.why_not():
        raise ValueError(f"{why} Leave link away, or emulate a link in your cells: shared/hosts/emulated.py")


def place(world_size: int, backend: str | None = None, link: str | None = None) -> Placement:
    """Choose NCCL with a GPU per rank if there are enough, else gloo on shared GPUs, else gloo on the CPU.

    Hosts behind a link talk over TCP, which is gloo's.

    backend, or the environment variable RANKS_BACKEND: "nccl", "gloo", or "gloo:cpu" to leave GPUs alone.
    Raises: ValueError for a backend that this machine or this torch build cannot run.
    """
    gpus = gpu_count()
    import torch.distributed as dist

    wanted = backend or os.environ.get("RANKS_BACKEND")
    if wanted is None and link:
        wanted = "gloo"
    if wanted not in (None, "nccl", "gloo", "gloo:cpu"):
        raise ValueError(f"backend must be 'nccl', 'gloo' or 'gloo:cpu', got {wanted!r}")
    if wanted == "nccl" and link:
        raise ValueError("a link lies between ranks that talk over TCP, as gloo's do: use backend='gloo'")
    if wanted == "nccl" and not dist.is_nccl_available():
        raise ValueError("this torch build has no NCCL: install a CUDA build, or use backend='gloo'")
    if wanted == "nccl" and gpus < world_size:
        raise ValueError(f"NCCL needs one GPU per rank: {world_size} ranks, {gpus} GPUs. Use backend='gloo'")
    if wanted == "nccl" or (wanted is None and gpus >= world_size and dist.is_nccl_available()):
        devices = tuple(f"cuda:{rank}" for rank in range(world_size))
        return Placement("cpu:gloo,cuda:nccl", devices, "Values, bytes, memory and times are valid here.")
    if gpus and wanted != "gloo:cpu":
        devices = tuple(f"cuda:{rank % gpus}" for rank in range(world_size))
        shared = f"{world_size} ranks share {gpus} GPU" + ("s" if gpus > 1 else "")
        valid = f"Values, bytes and memory are valid here; communication times are not: {shared}."
        return Placement("gloo", devices, _valid_behind(link) + f" {shared}." if link else valid)
    cores = os.cpu_count() or 1
    valid = "Values, bytes and memory are valid here."
    if cores < world_size:
        valid += f" Times too, within one run: {world_size} ranks share {cores} cores."
    else:
        valid += " Times too, within one run."
    if link:
        valid = _valid_behind(link)
        valid += f" Computing shares {cores} cores." if cores < world_size else ""
    return Placement("gloo", ("cpu",) * world_size, valid)


def _valid_behind(link: str) -> str:
    gbit_per_s = hosts.bits_per_s(link) / 1e9
    return (
        f"Each rank is a host of its own behind a {gbit_per_s:g} Gbit/s link, shaped by the kernel in both directions. "
        "Values, bytes and memory are valid here, and the time that messages take on such links."
    )
