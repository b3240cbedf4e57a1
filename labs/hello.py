"""The same program on every rank: each contributes its index plus 1, and all get the sum.

torchrun --standalone --nproc-per-node=4 labs/hello.py
"""

import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")  # reads RANK, WORLD_SIZE and MASTER_ADDR, among others
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)

names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
environment = " ".join(f"{name}={os.environ[name]}" for name in names)
print(f"{environment}: {total.item()}\n", end="")  # one write, so that lines do not mix
dist.destroy_process_group()
