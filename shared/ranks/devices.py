"""Where ranks can run on this machine: how many, with which backend, on which devices."""

import os
from dataclasses import dataclass, replace

import psutil

from shared import hosts
from shared.ranks import interrupts

_SIMULATED = (
    "NCCL is simulated over gloo on the CPU. You can trust values and bytes here, but no times. Code that would "
    "compute wrong values or hang on NCCL is reported."
)
MEMORY_PER_RANK_GB = 0.4  # measured with torch imported and a small model, without pages shared by the fork


@dataclass(frozen=True)
class Placement:
    """A backend, one device per rank, and a sentence about which measurements are valid there.

    `simulates` is "nccl" if gloo simulates NCCL (see shared/wire/simulated_nccl).
    """

    backend: str
    devices: tuple[str, ...]
    valid: str
    simulates: str | None = None


def check_world_size(world_size: int) -> None:
    """Check that this machine can run world_size ranks.

    Raises:
        TypeError: If world_size is not an integer.
        ValueError: If it is too small, or too large for this machine.
    """
    if not isinstance(world_size, int) or isinstance(world_size, bool):
        raise TypeError(f"world_size must be an integer, got {world_size!r}")
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    cores = os.cpu_count() or 1
    free_gb = psutil.virtual_memory().available / 1e9
    fit_in_memory = max(1, int(free_gb / MEMORY_PER_RANK_GB))
    limit = min(max(8, 2 * cores), fit_in_memory)
    if world_size > limit and world_size > min(gpu_count(), fit_in_memory):
        raise ValueError(
            f"world_size={world_size} is too large for this machine ({cores} cores, {free_gb:.0f} GB free): "
            f"start at most {limit} ranks. Only lesson 18 needs more than 4, and it needs 8."
        )


def gpu_count() -> int:
    with interrupts.held():  # an interrupted import of torch cannot be repeated
        import torch

    return torch.cuda.device_count()


def check_link(link: str | None) -> None:
    """Check that link is a rate and that this machine can shape links.

    Raises:
        ValueError: If link is not a rate, or this machine cannot shape links.
    """
    if link is None:
        return
    hosts.bits_per_s(link)
    if why := hosts.why_not():
        raise ValueError(f"{why} Leave out the link, or emulate one in your cells with `shared.hosts.emulated.link`.")


def place(
    world_size: int, backend: str | None = None, link: str | None = None, simulate: str | None = None
) -> Placement:
    """Choose NCCL if every rank can have its own GPU, and gloo on the CPU otherwise.

    With fewer GPUs than ranks, the ranks could share GPUs over gloo, but only collectives would work: gloo cannot send
    or receive a tensor on a GPU, and a DeviceMesh on GPUs needs NCCL. Most chapters use a DeviceMesh or send tensors to
    single ranks, so ranks share GPUs only on request. Ranks behind a link communicate over TCP, so they use gloo, too.

    Args:
        backend: "nccl", "gloo" to share GPUs, or "gloo:cpu" to use none; by default, the environment variable
            RANKS_BACKEND.
        simulate: "nccl" to simulate NCCL over gloo, on the CPU; by default, the environment variable RANKS_SIMULATE.

    Raises:
        ValueError: If this machine or this build of PyTorch cannot run the backend, or if it cannot be simulated.
    """
    source, simulate = ("simulate", simulate) if simulate else ("RANKS_SIMULATE", os.environ.get("RANKS_SIMULATE"))
    if simulate not in (None, "", "nccl"):
        raise ValueError(f"{source} can only be 'nccl', the only backend that can be simulated, got {simulate!r}")
    if simulate and backend not in (None, "gloo:cpu"):
        raise ValueError(f"NCCL is simulated on the CPU: use backend='gloo:cpu' instead of {backend!r}")
    if simulate:
        return replace(_place("gloo:cpu", world_size, link), simulates=simulate, valid=_SIMULATED)
    return _place(backend or os.environ.get("RANKS_BACKEND"), world_size, link)


def _place(requested: str | None, world_size: int, link: str | None) -> Placement:
    gpus = gpu_count()
    import torch.distributed as dist

    if requested not in (None, "nccl", "gloo", "gloo:cpu"):
        raise ValueError(f"backend must be 'nccl', 'gloo' or 'gloo:cpu', got {requested!r}")
    if requested == "nccl" and link:
        raise ValueError("ranks behind a link communicate over TCP: use backend='gloo'")
    if requested == "nccl" and not dist.is_nccl_available():
        raise ValueError("this build of PyTorch has no NCCL: install a CUDA build, or use backend='gloo'")
    if requested == "nccl" and gpus < world_size:
        raise ValueError(
            f"NCCL needs one GPU per rank, but world_size is {world_size} and this machine has {_name_gpus(gpus)}: "
            "use backend='gloo:cpu'"
        )
    if requested == "nccl" or (requested is None and not link and gpus >= world_size and dist.is_nccl_available()):
        devices = tuple(f"cuda:{rank}" for rank in range(world_size))
        return Placement("cpu:gloo,cuda:nccl", devices, "You can trust values, bytes, memory and times here.")
    if gpus and requested == "gloo":
        return _on_shared_gpus(gpus, world_size, link)
    return _on_the_cpu(world_size, link, _why_no_gpu(gpus, world_size) if requested is None and not link else "")


def _on_shared_gpus(gpus: int, world_size: int, link: str | None) -> Placement:
    devices = tuple(f"cuda:{rank % gpus}" for rank in range(world_size))
    shared = f"{world_size} ranks share {_name_gpus(gpus)}"
    valid = f"You can trust values, bytes and memory here, but not communication times: {shared}."
    if link:
        valid = f"{valid_behind(link)} {shared}."
    return Placement(
        "gloo", devices, f"{valid} gloo can run collectives on GPU tensors, but it cannot send or receive them."
    )


def _on_the_cpu(world_size: int, link: str | None, why: str) -> Placement:
    cores = os.cpu_count() or 1
    valid = "You can trust values, bytes and memory here, and compare times within one run"
    valid += f": {world_size} ranks share {cores} cores." if cores < world_size else "."
    if link:
        valid = valid_behind(link)
        valid += f" The ranks compute on {cores} cores." if cores < world_size else ""
    return Placement("gloo", ("cpu",) * world_size, f"{why} {valid}".strip())


def _why_no_gpu(gpus: int, world_size: int) -> str:
    """Return a sentence on why ranks run on the CPU although the machine has GPUs, or "" if it has none."""
    if gpus == 0:
        return ""
    if gpus < world_size:
        reason = f"NCCL needs one GPU per rank and this machine has {_name_gpus(gpus)}"
    else:
        reason = "this build of PyTorch has no NCCL"
    return f"The ranks run on the CPU, because {reason}."


def _name_gpus(count: int) -> str:
    return f"{count} GPU" + ("s" if count != 1 else "")


def valid_behind(link: str, ranks_per_host: int = 1) -> str:
    gbit_per_s = hosts.bits_per_s(link) / 1e9
    own = "Each rank runs on its own host" if ranks_per_host == 1 else f"{ranks_per_host} ranks share each host,"
    return (
        f"{own} behind a {gbit_per_s:g} Gbit/s link, shaped by the kernel in both directions. "
        "You can trust values, bytes, memory, and communication times on such links."
    )
