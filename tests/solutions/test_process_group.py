"""Several hosts agree on a backend before they form a process group, or all of them fail with one sentence.

The hosts are processes on this machine. Each has a name and a number of GPUs of its own, which it pretends to have.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shared.deadlines import scaled
from solutions.process_group import Host, UnequalHosts, choose_backend

ROOT = Path(__file__).parents[2]
# The pretended GPUs cannot form a group, so a host only says how it would.
SCRIPT = """
import socket, sys
import torch
import torch.distributed as dist

name, gpus = sys.argv.pop(1), int(sys.argv.pop(1))
socket.gethostname = lambda: name
torch.cuda.device_count = lambda: gpus
torch.cuda.set_device = lambda device: None
dist.is_nccl_available = lambda: True

from solutions import process_group, train

def init_process_group(backend, **options):
    print(backend, options["rank"], options["world_size"], options["device_id"])

dist.init_process_group = init_process_group
train.train = lambda settings, device: sys.exit(0)
train.main()
"""


@dataclass(frozen=True)
class Ended:
    """What a rank printed, and its exit status."""

    status: int
    out: str
    error: str


def run_hosts(free_port: int, *hosts: tuple[str, int, int], world_sizes: tuple[int, ...] = ()) -> list[Ended]:
    """Start solutions.train on hosts, each a name with its GPUs and ranks, as torchrun does. Return how ranks ended."""
    world_size = sum(ranks for _, _, ranks in hosts)
    world_sizes = world_sizes or (world_size,) * len(hosts)
    processes = []
    for (name, gpus, ranks), expected in zip(hosts, world_sizes, strict=True):
        for local_rank in range(ranks):
            place = {"RANK": len(processes), "LOCAL_RANK": local_rank, "MASTER_ADDR": "127.0.0.1"}
            place |= {"WORLD_SIZE": expected, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": free_port}
            environment = os.environ | {key: str(value) for key, value in place.items()}
            command = [sys.executable, "-c", SCRIPT, name, str(gpus), "--global-batch", "12"]
            options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
            processes.append(subprocess.Popen(command, env=environment, **options))
    try:
        ended = [process.communicate(timeout=scaled(120)) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [Ended(each.returncode, *texts) for each, texts in zip(processes, ended, strict=True)]


@pytest.fixture
def free_port() -> int:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store.port  # free again when the store is gone


@pytest.mark.exhaustive
def test_hosts_with_a_gpu_per_rank_agree_on_nccl(free_port):
    ended = run_hosts(free_port, ("a", 2, 2), ("b", 1, 1))
    assert [(each.status, each.out) for each in ended] == [
        (0, "nccl 0 3 cuda:0\n"),
        (0, "nccl 1 3 cuda:1\n"),
        (0, "nccl 2 3 cuda:0\n"),
    ]


@pytest.mark.exhaustive
def test_a_host_short_of_gpus_is_named_by_every_rank(free_port):
    ended = run_hosts(free_port, ("b", 1, 2), ("a", 8, 1))
    sentence = (
        "python -m solutions.train: error: host b has GPUs for 1 of its 2 ranks, but host a has one for each rank: "
        "start fewer ranks where GPUs are missing (--nproc_per_node), or train on the CPU of every host "
        "(CUDA_VISIBLE_DEVICES=-1)\n"
    )
    assert [(each.status, each.out, each.error) for each in ended] == [(1, "", sentence)] * 3


@pytest.mark.exhaustive
def test_hosts_that_expect_different_worlds_all_say_so(free_port):
    ended = run_hosts(free_port, ("a", 1, 1), ("b", 1, 1), world_sizes=(2, 3))
    sentence = (
        "python -m solutions.train: error: host a expects 2 ranks in all, but host b expects 3: "
        "start every host with the same --nnodes and --nproc_per_node\n"
    )
    assert [(each.status, each.out, each.error) for each in ended] == [(1, "", sentence)] * 2


def host(name: str, gpus: int, ranks: int) -> Host:
    return Host(name, ranks, gpus, world_size=4)


@pytest.mark.parametrize(
    ("hosts", "backend"),
    [
        ([host("a", 4, 4)], "nccl"),
        ([host("a", 8, 4)], "nccl"),
        ([host("a", 3, 4)], "gloo"),
        ([host("a", 0, 1)], "gloo"),
        ([host("a", 2, 2), host("a", 2, 2), host("b", 2, 2), host("b", 2, 2)], "nccl"),
        ([host("a", 0, 2), host("b", 1, 2)], "gloo"),
    ],
)
def test_nccl_needs_a_gpu_for_every_rank_of_every_host(hosts, backend):
    assert choose_backend(hosts) == backend


def test_every_host_short_of_gpus_is_named_once():
    hosts = [host("a", 1, 1), host("b", 0, 2), host("b", 0, 2), host("c", 0, 1)]
    with pytest.raises(UnequalHosts, match=r"host b has GPUs for 0 of its 2 .* and host c has .* but host a") as error:
        choose_backend(hosts)
    assert str(error.value).count("host b") == 1


def test_a_build_without_nccl_uses_gloo(monkeypatch):
    """On the CPU, and with no torchrun, one process is a world of its own."""
    from solutions import process_group

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    started = {}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: started.update(options, backend=backend))
    assert process_group.join_process_group() == torch.device("cpu")
    assert (started["backend"], started["world_size"], started["device_id"]) == ("gloo", 1, None)
