"""Data parallelism in one file, without a notebook.

    torchrun --nproc_per_node=2 labs/simple_ddp.py
    torchrun --nproc_per_node=4 labs/simple_ddp.py --steps 100 --width 512

Every rank trains the same MLP on its own share of the handwritten digits, twice: with your ManualDDP of lab 02,
and with torch's DistributedDataParallel. Rank 0 prints both losses, and what part of a step was communication.
"""

import argparse
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed.nn  # before any group: its default arguments would hold ours past the end
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shared.data import digits
from shared.models import MLP

SAMPLES_PER_RANK = 32


def main() -> None:
    options = parse_arguments()
    device = join()
    images, labels = (tensor.to(device) for tensor in digits())
    report("by hand", *train(by_hand, options, images, labels, device))
    report("torch's DDP", *train(by_ddp, options, images, labels, device))
    dist.destroy_process_group()  # ends gloo's threads too: one that outlives Python aborts its process


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, default=128, help="of the MLP's two hidden layers")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun, which says who is which rank: torchrun --nproc_per_node=2 " + __file__)
    if options.steps < 2 or options.width < 1:
        parser.error(f"--steps must be at least 2 and --width at least 1, got {options.steps} and {options.width}")
    return options


def join() -> torch.device:
    """Join the process group that torchrun prepared, on this rank's own device."""
    local_rank, local_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.device_count() >= local_ranks and dist.is_nccl_available():
        device = torch.device("cuda", local_rank)  # not the rank, which exceeds the number of GPUs on the second host
        torch.cuda.set_device(device)
        # With device_id, NCCL connects all ranks here, and not in the middle of their first collective.
        dist.init_process_group("nccl", device_id=device)
        return device
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return torch.device("cpu")


# -- two ways to keep the ranks equal: each takes a module and gives (what to call, how to synchronise)


def manual_ddp() -> type[nn.Module]:
    """Return your ManualDDP, which lab 02 saves when all its checks pass, or else ours, if it is here."""
    try:
        from shared.mine import ManualDDP
    except ImportError:
        try:
            from solutions.manual_ddp import ManualDDP
        except ImportError:
            raise SystemExit(
                "This script trains with your ManualDDP, which is not in mine/ yet. "
                "It is saved there when all checks of exercise 2.4 pass in lab 02 in JupyterLab."
            ) from None
    return ManualDDP


def by_hand(module: nn.Module) -> tuple[nn.Module, Callable[[], None]]:
    model = manual_ddp()(module)
    return model, model.finish_gradient_sync


def by_ddp(module: nn.Module) -> tuple[nn.Module, Callable[[], None]]:
    return DistributedDataParallel(module), lambda: None  # it synchronises inside backward()


# -- the loop, the same for both


def train(make_parallel, options, images, labels, device) -> tuple[list[float], float, float]:
    """→ the mean loss over all ranks per step; ms of forward, backward and messages; ms without the messages"""
    sizes = (64, options.width, options.width, 10)
    module = MLP(sizes, seed=dist.get_rank()).to(device)
    model, synchronise = make_parallel(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    losses, step_ms, alone_ms = [], [], []
    for step in range(options.steps):
        mine = samples_of(step, len(images))
        began = clock(device)
        loss = forward_backward(model, optimizer, images[mine], labels[mine])
        synchronise()
        step_ms.append(clock(device) - began)
        optimizer.step()

        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
        began = clock(device)
        forward_backward(module, optimizer, images[mine], labels[mine])  # the module alone sends nothing
        alone_ms.append(clock(device) - began)
    return losses, median(step_ms), median(alone_ms)


def forward_backward(model, optimizer, x, y) -> torch.Tensor:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    return loss.detach()


def samples_of(step: int, length: int) -> torch.Tensor:
    """This rank's share of a step's global batch: all ranks draw alike, then each takes every N-th."""
    world_size = dist.get_world_size()
    draw = torch.Generator().manual_seed(step)
    return torch.randint(length, (SAMPLES_PER_RANK * world_size,), generator=draw)[dist.get_rank() :: world_size]


def clock(device: torch.device) -> float:
    """Milliseconds, once the device has done what it was asked: a GPU works on after the call returns."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() * 1e3


def median(values: list[float]) -> float:
    return sorted(values[1:])[len(values[1:]) // 2]  # the first step pays for start-up


def report(name: str, losses: list[float], step_ms: float, alone_ms: float) -> None:
    if dist.get_rank() == 0:
        share = max(0.0, 1 - alone_ms / step_ms)
        print(
            f"{name:12} loss {losses[0]:.3f} → {losses[-1]:.3f}   forward, backward and messages "
            f"{step_ms:6.2f} ms, of which messages {share:4.0%}"
        )


if __name__ == "__main__":
    main()
