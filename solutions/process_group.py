"""Join the process group of a script that torchrun has started, on one host or on several.

Every rank must use the same backend, but each of them sees only the GPUs of its own host. So the ranks agree first,
through the store in which they also find each other. A host with too few GPUs is an error that names it.
"""

import json
import os
import socket
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist


def join_process_group() -> torch.device:
    """Join the process group that torchrun has prepared, or form one of a single rank. Returns this rank's device.

    Raises:
        UnequalHosts: If the hosts cannot train together.
    """
    started_by_torchrun = "RANK" in os.environ
    store, rank, world_size = next(dist.rendezvous("env://")) if started_by_torchrun else (dist.HashStore(), 0, 1)
    local_rank, local_ranks = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpus = torch.cuda.device_count() if dist.is_nccl_available() else 0
    backend = agree_on_backend(store, rank, Host(socket.gethostname(), local_ranks, gpus, world_size))
    if backend == "nccl":
        device = torch.device("cuda", local_rank)  # not the rank, which exceeds the number of GPUs on the second host
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
    # With device_id, NCCL connects all ranks here, and barrier() knows which GPU to use. Without it, NCCL connects them
    # in their first collective, and each pair of ranks again in its first send, where nothing can interrupt it.
    device_id = device if backend == "nccl" else None
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, device_id=device_id)
    return device


@dataclass(frozen=True)
class Host:
    """What a rank knows before there is a process group: its own host, and how many ranks it was told to expect."""

    name: str
    ranks: int
    gpus: int  # 0 if this build of PyTorch has no NCCL
    world_size: int


class UnequalHosts(ValueError):
    """The hosts cannot train together. The message is one sentence, and the same on every rank."""


def agree_on_backend(store: dist.Store, rank: int, host: Host) -> str:
    """Agree with all ranks on a backend. If each host chose by its own GPUs, ranks could wait for each other forever.

    Communication: each rank writes what it knows about its host to the store, and reads what the others wrote.

    Raises:
        UnequalHosts: If the hosts expect different numbers of ranks, or if only some of them have enough GPUs.
    """

    def host_of(other: int) -> Host:
        return Host(**json.loads(store.get(f"host of rank {other}")))  # waits until that rank has written it

    store.set(f"host of rank {rank}", json.dumps(asdict(host)))
    all_ranks = range(host_of(0).world_size)
    hosts = [host_of(other) for other in all_ranks]
    store.set(f"rank {rank} is done", "")
    if rank == 0:  # It may host the store, which the others can use only as long as rank 0 has not failed.
        store.wait([f"rank {other} is done" for other in all_ranks])
    return choose_backend([*hosts, host])


def choose_backend(hosts: list[Host]) -> str:
    """Choose NCCL if every rank can have a GPU of its own, or gloo on the CPU if no host has enough GPUs for that.

    Raises:
        UnequalHosts: As in agree_on_backend.
    """
    first = hosts[0]
    for host in hosts:
        if host.world_size != first.world_size:
            raise UnequalHosts(
                f"host {first.name} expects {first.world_size} ranks in all, but host {host.name} expects "
                f"{host.world_size}: start every host with the same --nnodes and --nproc_per_node"
            )
    equipped = [host for host in hosts if host.gpus >= host.ranks]
    short = [host for host in dict.fromkeys(hosts) if host.gpus < host.ranks]
    if equipped and short:
        counts = " and ".join(f"host {host.name} has GPUs for {host.gpus} of its {host.ranks} ranks" for host in short)
        raise UnequalHosts(
            f"{counts}, but host {equipped[0].name} has one for each rank: start fewer ranks where GPUs are missing "
            "(--nproc_per_node), or train on the CPU of every host (CUDA_VISIBLE_DEVICES=-1)"
        )
    return "nccl" if equipped else "gloo"
