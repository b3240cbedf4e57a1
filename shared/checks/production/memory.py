"""What a rank holds of a model that fully_shard has sharded: its part, and the unit that computes."""

import torch

from shared import memory
from shared.checks.engine.candidate import device_here
from shared.checks.engine.framework import Attempt, Wrong
from shared.checks.engine.sharded.dtensors import loss_of
from shared.checks.engine.sharded.unit_training import new_optimizer
from shared.checks.engine.training import Draw
from shared.checks.models import unit_models
from shared.checks.production.layout import units_of
from shared.checks.production.training import Sharding, shard

SLACK = 1.02  # inputs, counts of steps
SAMPLES = 2
UNDER_WAY = 4  # units: a message in and one out, each of which torch copies
_LOOK_AT_UNITS = "Look at: how many units are gathered at the same time?"


def probe_memory(fully_sharded, plan: Sharding, seed: int, x, y) -> dict:
    """Train two steps. → what is held between steps, and the most bytes of parameters in the second

    Once alone, once with the messages in which they come and their gradients go.
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
    return {"between": between, "parameters": max(samples)[0], "with messages": max(map(sum, samples))}


def one_unit_is_gathered(attempt: Attempt) -> None:
    """Raises: Wrong where more than a rank's part, the root and two units are there at once."""
    plan, draw = Sharding("Deep", dtype=torch.float32), Draw(attempt, [SAMPLES] * attempt.world_size)
    found = attempt.run(probe_memory, plan, per_rank=draw.per_rank, context=str(plan))
    *units, root = (4 * unit.filled for unit in units_of(plan, attempt.world_size))
    part = (sum(units) + root) / attempt.world_size
    most = part + root + 2 * max(units)  # one computes, the next one may be there
    for rank, result in enumerate(found):
        if result["between"].total_bytes > SLACK * 3 * part:
            said = f"{result['between'].total_bytes:,} bytes are held between steps; expected {3 * part:,.0f}"
            raise Wrong({rank: f"{plan}: {said}"}, "Look at: what is kept beside the sharded parameters?")
        if result["parameters"] > SLACK * most:
            said = f"{result['parameters']:,} bytes of parameters at once; expected at most {most:,.0f}"
            raise Wrong({rank: f"{plan}: {said}"}, _LOOK_AT_UNITS)
        if result["with messages"] > SLACK * (most + UNDER_WAY * max(units)):
            said = f"{result['with messages']:,} bytes of parameters and messages at once"
            expected = f"expected at most {most + UNDER_WAY * max(units):,.0f}"
            raise Wrong({rank: f"{plan}: {said}; {expected}"}, _LOOK_AT_UNITS)
