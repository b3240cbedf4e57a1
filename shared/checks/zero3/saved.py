"""Judge sharded checkpoints: each rank saves its shards, and any number of ranks can load what it needs."""

import tempfile

import torch

from shared.checks.engine.candidate import device_here
from shared.checks.engine.framework import Attempt, Wrong
from shared.checks.engine.sharded.state import in_world_of
from shared.checks.engine.sharded.training import judge_states, on_one_batch
from shared.checks.engine.sharded.unit_memory import SLACK, bytes_of
from shared.checks.engine.sharded.unit_training import (
    StateReader,
    UnitPlan,
    new_optimizer,
    reject_missing,
    shard,
    take_step,
)
from shared.checks.engine.training import Draw
from shared.checks.models import unit_models

SAVED_AFTER = 2


def probe_saved(wrapper, plan: UnitPlan, folder: str, resumes: bool, seed: int, x, y) -> dict:
    """Train some steps and save, or load a checkpoint. Then train the remaining steps. Return the final state."""
    import torch.distributed.checkpoint as dcp

    module = unit_models.build(plan.model, seed).to(device_here())
    read_state, x, y = StateReader(module), x.to(device_here()), y.to(device_here())
    wrapped = shard(wrapper, module, plan)
    optimizer = new_optimizer(plan, wrapped)
    if resumes:
        _initialize_state(optimizer)
        dcp.load({"zero3": wrapped.sharded_state_dict(optimizer)}, checkpoint_id=folder)
    for number in range(SAVED_AFTER if resumes else 0, plan.steps):
        if number == SAVED_AFTER:
            saved = wrapped.sharded_state_dict(optimizer)
            dcp.save({"zero3": saved}, checkpoint_id=folder)
        take_step(wrapped, optimizer, plan, x, y)
    with torch.no_grad():
        _, state = read_state(lambda: wrapped(x))
    buffers = [name for name, _ in module.named_buffers()]
    found = {"state": state, "misnamed": [] if resumes else [name for name in buffers if f"module.{name}" not in saved]}
    return found | {"saved": None if resumes else {name: _local_bytes(each) for name, each in saved.items()}}


def _local_bytes(value) -> int:
    local = getattr(value, "_local_tensor", value)
    return local.untyped_storage().nbytes() if isinstance(local, torch.Tensor) else 0


def _initialize_state(optimizer) -> None:
    """Make an optimizer create the state to load into, and undo the step that this takes."""
    kept = [each.detach().clone() for group in optimizer.param_groups for each in group["params"]]
    for group in optimizer.param_groups:
        for each in group["params"]:
            each.grad = torch.zeros_like(each) if each.requires_grad else None
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for group in optimizer.param_groups:
            for each in group["params"]:
                each.copy_(kept.pop(0))


def any_number_of_ranks_resumes(attempt: Attempt) -> None:
    for model, optimizer in (("Buffered", "AdamW"), ("Few", "SGD")):
        plan, draw = UnitPlan(model, optimizer, steps=4), Draw(attempt)
        expected = on_one_batch(plan, draw).steps[-1]["state"]
        with tempfile.TemporaryDirectory() as folder:
            found = attempt.run(probe_saved, plan, folder, False, per_rank=draw.per_rank, context=str(plan))
            _judge(found, expected, f"{plan}, saved after {SAVED_AFTER} steps, when training continues")
            _judge_names(plan, found)
            _judge_bytes(attempt, plan, found)
            for size in (2,) if attempt.world_size == 4 else range(1, attempt.world_size + 1):
                with in_world_of(attempt, size) as smaller:
                    share = zip(draw.x.chunk(size), draw.y.chunk(size), strict=True)
                    per_rank = [(attempt.draw_seed(), x, y) for x, y in share]
                    context = f"{plan}, saved on {attempt.world_size} ranks and resumed on {size}"
                    result = smaller.run(probe_saved, plan, folder, True, per_rank=per_rank, context=context)
                    _judge(result, expected, context)


def _judge(found: list[dict], expected: dict, context: str) -> None:
    states = {rank: result["state"] for rank, result in enumerate(found)}
    reject_missing(states, expected, context)
    hint = "Hint: which memory does loading write into, and how does each shard record its position?"
    judge_states(states, expected, states, context, hint=hint)


def _judge_names(plan: UnitPlan, found: list[dict]) -> None:
    for rank, result in enumerate(found):
        for name in result["misnamed"][:1]:
            evidence = f"{plan}: sharded_state_dict() does not name the buffer module.{name}"
            raise Wrong(
                {rank: evidence}, "Hint: under which names does sharded_state_dict() save the module's buffers?"
            )


def _judge_bytes(attempt: Attempt, plan: UnitPlan, found: list[dict]) -> None:
    own = bytes_of(plan, attempt.world_size).shards
    buffers = sum(each.nbytes for each in unit_models.build(plan.model, 0).buffers())
    moments = {"AdamW": 2, "Adam": 3, "SGD": 1}[plan.optimizer]
    for rank, result in enumerate(found):
        nbytes, most = sum(result["saved"].values()), (1 + moments) * own + buffers
        if nbytes > SLACK * most + 1000:
            evidence = (
                f"{plan}: the tensors of sharded_state_dict() have {nbytes:,} bytes on this rank; expected {most:,.0f}"
            )
            raise Wrong({rank: evidence}, "Hint: which slice of each tensor must this rank save?")
