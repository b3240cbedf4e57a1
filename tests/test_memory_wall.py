"""Chapter 06 inside chapters 04 and 07: checkpointed blocks under hooks, masters of sharded parameters.

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
        launched = model.sync.queue.launched
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
    masters = functools.partial(MasterWeights, optimizer_cls=torch.optim.AdamW, eps=1e-2)
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
    state = optimizer.inner.state if sharded else optimizer.state
    held = [value for each in state.values() for value in each.values()]
    return [parameter.detach().clone() for parameter in parameters], sum(value.nbytes for value in held)


def test_zero1_shards_masters(world):
    numbers = sum(parameter.numel() for parameter in tiny_gpt().parameters())
    alone, sharded = ranks.run(stepped, False), ranks.run(stepped, True)
    for (want, _), (found, held_bytes) in zip(alone, sharded, strict=True):
        assert 12 * numbers / world <= held_bytes < 12 * numbers / world + 200
        # A mean of bfloat16 is rounded once more on its way: Adam's large epsilon keeps a gradient near 0 from
        # turning that into a whole step.
        for one, other in zip(found, want, strict=True):
            torch.testing.assert_close(one, other, atol=0.02, rtol=0.02)


def resumed() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Save masters that ZeRO-1 shards, load them into another; step both. → pairs of parameters, which must be equal"""
    masters = functools.partial(MasterWeights, optimizer_cls=torch.optim.AdamW)
    one = tiny_gpt().bfloat16()
    optimizer = ZeRO1(one.parameters(), masters, lr=0.1)

    def step(model, optimizer, number):
        optimizer.zero_grad()
        model(*batch_of(10 * number + dist.get_rank())).backward()
        optimizer.step()

    step(one, optimizer, 0)
    saved = copy.deepcopy(optimizer.state_dict())
    assert all(each["master"].dtype == torch.float32 for each in saved["state"].values())
    other = copy.deepcopy(one)
    loaded = ZeRO1(other.parameters(), masters, lr=0.1)
    loaded.load_state_dict(saved)
    for number in range(1, STEPS):
        step(one, optimizer, number)
        step(other, loaded, number)
    return list(zip(map(torch.clone, one.parameters()), map(torch.clone, other.parameters()), strict=True))


def test_zero1_saves_masters(world):
    for pairs in ranks.run(resumed):
        assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("backward_inside", [False, True])
def test_checkpointed_blocks_compute_again_as_autocast_did(backward_inside):
    plain, saving = tiny_gpt(), tiny_gpt()
    saving.blocks = torch.nn.ModuleList(Checkpointed(block) for block in saving.blocks)
    for gpt in (plain, saving):
        with torch.autocast("cpu", torch.bfloat16):
            loss = gpt(*batch_of(0))
            if backward_inside:
                loss.backward()
        if not backward_inside:
            loss.backward()
    for one, other in zip(plain.parameters(), saving.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_checkpointed_refuses_gradients_of_gradients():
    x = torch.randn(2, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(Checkpointed(torch.nn.Linear(3, 3))(x).sum(), x, create_graph=True)


def resumed_where_one_had_no_gradient() -> list[torch.Tensor]:
    """Load a state of masters in which the last parameter never had a gradient, and step. → before, after"""
    weights = [torch.nn.Parameter(torch.full((5,), 0.5 + number, dtype=torch.bfloat16)) for number in range(2)]
    plain = MasterWeights(weights, torch.optim.AdamW, lr=0.1)
    weights[0].grad = torch.ones_like(weights[0])
    plain.step()
    masters = functools.partial(MasterWeights, optimizer_cls=torch.optim.AdamW)
    sharded = ZeRO1(weights, masters, lr=0.1, weight_decay=0.0)
    sharded.load_state_dict(plain.state_dict())
    before = weights[1].detach().clone()
    sharded.zero_grad()
    sharded.step()
    return [before, weights[1].detach().clone()]


def test_a_master_that_was_never_made_is_its_parameter(world):
    for before, after in ranks.run(resumed_where_one_had_no_gradient):
        torch.testing.assert_close(after, before)
