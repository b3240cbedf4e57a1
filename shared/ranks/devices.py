"""Where ranks can run on this machine: how many, with which backend, on which devices."""

import os
import resource
from dataclasses import dataclass, replace
from typing import Optional

import psutil

from shared import hosts
from shared.ranks import containers, interrupts, nccl
from shared.ranks.errors import RanksError

_SIMULATED = (
    "NCCL is simulated over gloo on the CPU. You can trust values and bytes here, but no times. Code that would "
    "compute wrong values or hang on NCCL is reported."
)
BACKENDS = ("nccl", "nccl:shared", "gloo", "gloo:cpu")
NCCL = "cpu:gloo,cuda:nccl"  # NCCL for tensors on a GPU, gloo for tensors on the CPU
ONE_PROCESS_PER_GPU = (
    "The compute mode probably lets only one process at a time use a GPU. `sudo nvidia-smi -c DEFAULT` changes that."
)
MEMORY_PER_RANK_GB = 0.4  # measured with torch imported and a small model, without pages shared by the fork


@dataclass(frozen=True)
class Placement:
    """A backend, one device per rank, and a sentence about which measurements are valid there.

    Attributes:
        simulates: "nccl" if gloo simulates NCCL (see shared/wire/simulated_nccl).
        ranks_per_gpu: How many ranks share a GPU over NCCL.
        fallback: The placement to use if ranks do not start in this one; None if they must use this one.
    """

    backend: str
    devices: tuple[str, ...]
    valid: str
    simulates: str | None = None
    ranks_per_gpu: int = 1
    fallback: Optional["Placement"] = None

    def because(self, reason: str) -> "Placement":
        """Say why the ranks run on the CPU, although the machine has a GPU."""
        return replace(self, valid=f"The ranks run on the CPU, because {reason}. {self.valid}")

    def on_shared_gpus(self, why_no_mps: str) -> "Placement":
        """Say what can be measured by ranks that share a GPU over NCCL, with MPS or without it."""
        sharing = f"{self.ranks_per_gpu} ranks share a GPU over NCCL"
        if why_no_mps:
            valid = (
                f"You can trust values, bytes and memory here, but no times: {sharing} and use it in turns, because "
                f"NVIDIA's MPS is not available ({why_no_mps})."
            )
        else:
            valid = f"You can trust values, bytes and memory here, and compare times within one run: {sharing}."
        return replace(self, valid=valid)


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


def check_container() -> None:
    """Check that a container leaves enough memory for ranks.

    Raises:
        RanksError: If it does not.
    """
    left_bytes, needed_bytes = containers.left_bytes(), containers.needed_bytes()
    if left_bytes is not None and left_bytes < needed_bytes:
        raise RanksError(
            f"This container leaves {left_bytes / 1e9:.2f} GB of memory, and ranks need {needed_bytes / 1e9:.2f} GB to "
            "start: let it use at least 1 GB, for example with `docker run --memory=1g`."
        )


def open_files(world_size: int) -> int:
    """Return how many files each process may need. With 4 ranks, the kernel opens 33 files, or more."""
    return 100 + 5 * world_size


def check_open_files(world_size: int) -> None:
    """Let this process and its children open as many files as they need, if the system allows it.

    Raises:
        RanksError: If it does not.
    """
    needed = open_files(world_size)
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed >= needed or allowed == resource.RLIM_INFINITY:
        return
    if most < needed and most != resource.RLIM_INFINITY:
        raise RanksError(
            f"{world_size} ranks need {needed} open files, but this process may open only {most}: raise the limit with "
            f"`ulimit -Hn {needed}` as root, or ask an administrator, then start the kernel again."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, most))


def place(
    world_size: int, backend: str | None = None, link: str | None = None, simulate: str | None = None
) -> Placement:
    """Choose NCCL if every rank can have its own GPU or share one (see nccl.py), and gloo on the CPU otherwise.

    Ranks can also share GPUs over gloo, but only collectives work there: gloo cannot send or receive a tensor on a GPU,
    and a DeviceMesh on GPUs needs NCCL. So ranks share GPUs over gloo only on request. Ranks behind a link communicate
    over TCP, so they use gloo, too.

    Args:
        backend: "nccl" for one GPU per rank, "nccl:shared" or "gloo" to share GPUs, or "gloo:cpu" to use none; by
            default, the environment variable RANKS_BACKEND.
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

    if requested not in (None, *BACKENDS):
        known = ", ".join(map(repr, BACKENDS))
        raise ValueError(f"backend must be one of {known}, got {requested!r}")
    over_nccl = requested in ("nccl", "nccl:shared")
    if over_nccl and link:
        raise ValueError("ranks behind a link communicate over TCP: use backend='gloo'")
    if over_nccl and not dist.is_nccl_available():
        raise ValueError("this build of PyTorch has no NCCL: install a CUDA build, or use backend='gloo'")
    has_nccl = gpus > 0 and dist.is_nccl_available() and not link
    if requested == "nccl" or (requested is None and has_nccl and gpus >= world_size):
        if gpus < world_size:
            other = "'gloo:cpu'" if why_not_shared(gpus, world_size) else "'nccl:shared'"
            raise ValueError(
                f"backend='nccl' gives each rank a GPU of its own, but world_size is {world_size} and this machine has "
                f"{_name_gpus(gpus)}: use backend={other}"
            )
        devices = tuple(f"cuda:{rank}" for rank in range(world_size))
        return Placement(NCCL, devices, "You can trust values, bytes, memory and times here.")
    if requested == "nccl:shared":
        if why := why_not_shared(gpus, world_size):
            raise ValueError(f"backend='nccl:shared' cannot be used here, because {why}")
        return _on_gpus_shared_over_nccl(gpus, world_size)
    if gpus and requested == "gloo":
        return _on_shared_gpus(gpus, world_size, link)
    on_the_cpu = _on_the_cpu(world_size, link)
    if requested is not None or link or gpus == 0:
        return on_the_cpu
    if not has_nccl:
        return on_the_cpu.because("this build of PyTorch has no NCCL")
    if why := nccl.gave_up or why_not_shared(gpus, world_size):
        return on_the_cpu.because(why)
    return replace(_on_gpus_shared_over_nccl(gpus, world_size), fallback=on_the_cpu)


def why_not_shared(gpus: int, world_size: int) -> str:
    """Return why this many ranks cannot share the GPUs over NCCL, as the end of a sentence, or "" if they can try."""
    if gpus == 0:
        return "PyTorch sees no GPU"
    if world_size > gpus * nccl.MOST_RANKS_PER_GPU:
        return (
            f"at most {nccl.MOST_RANKS_PER_GPU} ranks can share a GPU, and this machine has {_name_gpus(gpus)} for "
            f"{world_size} ranks"
        )
    version = nccl.version_for_ranks()
    if version < nccl.SHARES_SINCE:
        return (
            f"ranks can share a GPU only with NCCL {nccl.named(nccl.SHARES_SINCE)} or later, and they would load "
            f"{nccl.named(version)} (`make doctor` says how to get a newer one)"
        )
    return ""


def _on_gpus_shared_over_nccl(gpus: int, world_size: int) -> Placement:
    devices = tuple(f"cuda:{rank % gpus}" for rank in range(world_size))
    return Placement(NCCL, devices, "", ranks_per_gpu=-(-world_size // gpus)).on_shared_gpus(why_no_mps="")


def _on_shared_gpus(gpus: int, world_size: int, link: str | None) -> Placement:
    devices = tuple(f"cuda:{rank % gpus}" for rank in range(world_size))
    shared = f"{world_size} ranks share {_name_gpus(gpus)}"
    valid = f"You can trust values, bytes and memory here, but not communication times: {shared}."
    if link:
        valid = f"{valid_behind(link)} {shared}."
    return Placement(
        "gloo", devices, f"{valid} gloo can run collectives on GPU tensors, but it cannot send or receive them."
    )


def _on_the_cpu(world_size: int, link: str | None) -> Placement:
    cores = os.cpu_count() or 1
    valid = "You can trust values, bytes and memory here, and compare times within one run"
    valid += f": {world_size} ranks share {cores} cores." if cores < world_size else "."
    if link:
        valid = valid_behind(link)
        valid += f" The ranks compute on {cores} cores." if cores < world_size else ""
    return Placement("gloo", ("cpu",) * world_size, valid)


def _name_gpus(count: int) -> str:
    return f"{count} GPU" + ("s" if count != 1 else "")


def valid_behind(link: str, ranks_per_host: int = 1) -> str:
    gbit_per_s = hosts.bits_per_s(link) / 1e9
    own = "Each rank runs on its own host" if ranks_per_host == 1 else f"{ranks_per_host} ranks share each host,"
    return (
        f"{own} behind a {gbit_per_s:g} Gbit/s link, shaped by the kernel in both directions. "
        "You can trust values, bytes, memory, and communication times on such links."
    )
