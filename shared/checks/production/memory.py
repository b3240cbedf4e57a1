"""Judge the memory of a model sharded by fully_shard: a rank holds its shards, and the unit that computes."""

import torch

from shared import memory
from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.failures import Wrong
from shared.checks.engine.sharded.dtensors import loss_of
from shared.checks.engine.sharded.unit_training import new_optimizer
from shared.checks.engine.training import Draw
from shared.checks.models import unit_models
from shared.checks.production.layout import units_of
from shared.checks.production.training import Sharding, shard

SLACK = 1.02  # inputs, step counters
SAMPLES = 2
IN_FLIGHT = 4  # units: one received and one sent, and torch's copy of each
_HINT_ON_UNITS = "Hint: how many units are unsharded at the same time?"


def probe_memory(fully_sharded, plan: Sharding, seed: int, x, y) -> dict:
    """Train two steps.

    Returns:
        What is held between steps, and the most bytes of parameters in the second step, without and with the buffers of
        their collectives.
    """
    module = unit_models.build(plan.model, seed, plan.dtype).to(device_here())
    sharded = shard(fully_sharded, module, plan)
    optimizer = new_optimizer(plan, sharded)
    x, y = x.to(device_here(), plan.dtype), y.to(device_here(), plan.dtype)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(sharded, x, y).backward()
        optimizer.step()

    step()
    optimizer.zero_grad()
    between = memory.held(sharded, optimizer)
    with memory.peak(sharded, optimizer) as peak:
        step()
    samples = [(each.held.parameters_bytes, each.held.buckets_bytes) for each in peak.samples]
    return {"between": between, "parameters": max(samples)[0], "with buffers": max(map(sum, samples))}


def one_unit_is_unsharded_at_a_time(attempt: Attempt) -> None:
    """Allow a rank its shards, the root and two units at the same time.

    Raises:
        Wrong: If it holds more.
    """
    plan, draw = Sharding("Deep", dtype=torch.float32), Draw(attempt, [SAMPLES] * attempt.world_size)
    found = attempt.run(probe_memory, plan, per_rank=draw.per_rank, context=str(plan))
    *units, root = (4 * unit.padded_numel for unit in units_of(plan, attempt.world_size))
    shard_bytes = (sum(units) + root) / attempt.world_size
    most = shard_bytes + root + 2 * max(units)  # One unit computes, and the next one may be unsharded already.
    for rank, result in enumerate(found):
        if result["between"].total_bytes > SLACK * 3 * shard_bytes:
            context = f"{result['between'].total_bytes:,} bytes are held between steps; expected {3 * shard_bytes:,.0f}"
            raise Wrong({rank: f"{plan}: {context}"}, "Hint: which tensors are kept besides the sharded parameters?")
        if result["parameters"] > SLACK * most:
            context = f"{result['parameters']:,} bytes of parameters are held at once; expected at most {most:,.0f}"
            raise Wrong({rank: f"{plan}: {context}"}, _HINT_ON_UNITS)
        if result["with buffers"] > SLACK * (most + IN_FLIGHT * max(units)):
            context = f"{result['with buffers']:,} bytes of parameters and buffers are held at once"
            expected = f"expected at most {most + IN_FLIGHT * max(units):,.0f}"
            raise Wrong({rank: f"{plan}: {context}; {expected}"}, _HINT_ON_UNITS)
