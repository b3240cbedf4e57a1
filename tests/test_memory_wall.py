"""Chapter 05 inside chapters 04 and 06: checkpointed blocks under hooks, masters of sharded parameters.

The functions without `test_` run on the ranks.
"""

import copy
import functools

import pytest
import torch
import torch.distributed as dist

from shared import models, ranks
from solutions.memory_wall import Checkpointed, MasterWeights
from solutions.overlapped_ddp import OverlappedDDP
from solutions.zero1 import ZeRO1

STEPS = 3


@pytest.fixture(params=[1, 2, 3])
def world(request, four_ranks):
    with ranks.world(request.param):
        yield request.param


def tiny_gpt() -> models.TinyGPT:
    torch.manual_seed(0)
    return models.TinyGPT(models.GPTConfig(vocab_size=11, context=8, width=16, heads=2, layers=3))


def batch_of(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(11, (2, 9), generator=torch.Generator().manual_seed(rank))
    return tokens[:, :-1], tokens[:, 1:]


def overlapped_gradients() -> tuple[list, list, list]:
    """→ gradients of OverlappedDDP with checkpointed blocks, and without, after two micro-batches"""
    found = []
    for wrap in (Checkpointed, lambda block: block):
        gpt = tiny_gpt()
        gpt.blocks = torch.nn.ModuleList(wrap(block) for block in gpt.blocks)
        model = OverlappedDDP(gpt, bucket_cap_mb=0.005)
        with model.no_sync():
            model(*batch_of(dist.get_rank() + 10)).backward()
        model(*batch_of(dist.get_rank())).backward()
        launched = model.queue.launched
        model.finish_gradient_sync()
        found.append(([parameter.grad.clone() for parameter in gpt.parameters()], launched, len(model.buckets)))
    return found


def test_checkpointed_blocks_tell_overlapped_ddp_of_whole_gradients(world):
    for (checkpointed, launched, buckets), (plain, *_) in ranks.run(overlapped_gradients):
        assert buckets > 3 and launched == buckets, "buckets leave in backward"
        for one, other in zip(checkpointed, plain, strict=True):
            torch.testing.assert_close(one, other)


def stepped(sharded: bool) -> tuple[list[torch.Tensor], int]:
    """Train in bfloat16 with masters, the last two parameters in a group of their own. → parameters, bytes of state"""
    gpt = tiny_gpt().bfloat16()
    parameters = list(gpt.parameters())
    groups = [{"params": parameters[:-2]}, {"params": parameters[-2:], "weight_decay": 0.3}]
    masters = functools.partial(MasterWeights, optimizer_cls=torch.optim.AdamW)
    optimizer = ZeRO1(groups, masters, lr=0.1) if sharded else masters(groups, lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS + 1)
    world_size = dist.get_world_size()
    for step in range(STEPS):
        optimizer.zero_grad()
        replicas = [copy.deepcopy(gpt) for _ in range(world_size)]
        for rank, replica in enumerate(replicas):
            replica(*batch_of(100 * step + rank)).backward()
        own = replicas[dist.get_rank()].parameters()
        mean = zip(*(replica.parameters() for replica in replicas), strict=True)
        for parameter, mine, every in zip(parameters, own, mean, strict=True):
            gradient = mine.grad if sharded else sum(each.grad.float() for each in every) / world_size
            parameter.grad = gradient.to(torch.bfloat16)
        optimizer.step()
        scheduler.step()
    inner = optimizer.inner.inner if sharded else optimizer.inner
    held = [value for each in inner.values() for state in each.state.values() for value in state.values()]
    return [parameter.detach().clone() for parameter in parameters], sum(value.nbytes for value in held)


def test_zero1_shards_masters(world):
    numbers = sum(parameter.numel() for parameter in tiny_gpt().parameters())
    alone, sharded = ranks.run(stepped, False), ranks.run(stepped, True)
    for (want, _), (found, held_bytes) in zip(alone, sharded, strict=True):
        assert held_bytes < 8 * numbers / world + 200
        for one, other in zip(found, want, strict=True):  # a mean of bfloat16 is rounded once more on its way
            torch.testing.assert_close(one, other, atol=0.02, rtol=0.02)
