"""Judge sharded checkpoints: each rank saves its shards, and any number of ranks can load what it needs."""

import re

import torch

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.failures import Wrong
from shared.checks.engine.folders import shared_folder
from shared.checks.engine.sharded.plan import OPTIMIZERS
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
    return {"state": state} | ({} if resumes else _describe(saved, wrapped, optimizer))


def _describe(saved: dict, wrapped, optimizer) -> dict:
    """Return what is wrong with the names and the memory of a sharded state, and how many bytes it has."""
    buffers = dict(wrapped.module.named_buffers())
    tensors = {name: getattr(value, "_local_tensor", value) for name, value in saved.items()}
    tensors = {name: value for name, value in tensors.items() if isinstance(value, torch.Tensor)}
    own = [*buffers.values(), *wrapped.parameters(), *(v for state in optimizer.state.values() for v in state.values())]
    storages = {each.untyped_storage()._cdata for each in own if isinstance(each, torch.Tensor)}
    copies = [name for name, value in tensors.items() if value.untyped_storage()._cdata not in storages]
    return {
        "misnamed": [name for name in buffers if f"module.{name}" not in saved],
        "copies": [name for name in copies if tensors[name].numel()],
        "kept_bytes": sum(value.untyped_storage().nbytes() for value in tensors.values()),
        "saved_bytes": sum(value.nbytes for value in tensors.values()),
    }


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
    for model, optimizer in (("Buffered", "AdamW"), ("Few", "SGD"), ("Few", "AdamW")):
        plan, draw = UnitPlan(model, optimizer, steps=4), Draw(attempt)
        expected = on_one_batch(plan, draw).steps[-1]["state"]
        with shared_folder() as folder:
            found = attempt.run(probe_saved, plan, folder, False, per_rank=draw.per_rank, context=str(plan))
            context = f"{plan}, saved after {SAVED_AFTER} steps, when training continues"
            _judge(found, expected, context, "Hint: does saving change the shards, or the optimizer's state?")
            _judge_names(plan, found)
            _judge_copies(plan, found)
            _judge_bytes(attempt, plan, found)
            for size in (2,) if attempt.world_size == 4 else range(1, attempt.world_size + 1):
                with in_world_of(attempt, size) as smaller:
                    share = zip(draw.x.chunk(size), draw.y.chunk(size), strict=True)
                    per_rank = [(attempt.draw_seed(), x, y) for x, y in share]
                    context = f"{plan}, saved on {attempt.world_size} ranks and resumed on {size}"
                    result = smaller.run(probe_saved, plan, folder, True, per_rank=per_rank, context=context)
                    _judge(result, expected, context, "Hint: how does each shard record its position?")


def probe_trained(wrapper, plan: UnitPlan, seed: int, x, y) -> list[str]:
    """Train only the shards that require a gradient. Return the optimizer state that is not saved beside its shard."""
    module = unit_models.build(plan.model, seed).to(device_here())
    wrapped = shard(wrapper, module, plan)
    cls, settings = OPTIMIZERS[plan.optimizer]
    optimizer = cls([each for each in wrapped.parameters() if each.requires_grad], **settings)
    take_step(wrapped, optimizer, plan, x.to(device_here()), y.to(device_here()))
    saved = wrapped.sharded_state_dict(optimizer)
    tensors = {name: getattr(value, "_local_tensor", value) for name, value in saved.items()}
    tensors = {name: value for name, value in tensors.items() if isinstance(value, torch.Tensor)}
    names = {value.untyped_storage()._cdata: name for name, value in tensors.items()}

    def place_of(tensor: torch.Tensor) -> list[str]:
        """Return the name of the shard to which an entry belongs: all of its name but the last part."""
        return re.split(r"[./]", names.get(tensor.untyped_storage()._cdata, ""))[:-1]

    return [
        name
        for each in wrapped.parameters()
        for name, value in optimizer.state.get(each, {}).items()
        if isinstance(value, torch.Tensor) and value.dim() and place_of(value) != place_of(each)
    ]


def each_state_belongs_to_its_shard(attempt: Attempt) -> None:
    for optimizer in ("AdamW", "UnknownOptimizer"):
        plan = UnitPlan("Frozen", optimizer)
        name = "an optimizer made up for this check" if optimizer == "UnknownOptimizer" else optimizer
        context = f"{plan}, {name}, which gets only the shards that are trained"
        for rank, wrong in enumerate(
            attempt.run(probe_trained, plan, per_rank=Draw(attempt).per_rank, context=context)
        ):
            if wrong:
                evidence = (
                    f"{context}: sharded_state_dict() does not save {wrong[0]} beside the shard that it belongs to"
                )
                raise Wrong({rank: evidence}, "Hint: by what do you look up the optimizer's state of a shard?")


def _judge(found: list[dict], expected: dict, context: str, hint: str) -> None:
    states = {rank: result["state"] for rank, result in enumerate(found)}
    reject_missing(states, expected, context)
    judge_states(states, expected, {}, context, hint=hint)


def _judge_names(plan: UnitPlan, found: list[dict]) -> None:
    for rank, result in enumerate(found):
        for name in result["misnamed"][:1]:
            evidence = f"{plan}: sharded_state_dict() does not name the buffer module.{name}"
            raise Wrong(
                {rank: evidence}, "Hint: under which names does sharded_state_dict() save the module's buffers?"
            )


def _judge_copies(plan: UnitPlan, found: list[dict]) -> None:
    for rank, result in enumerate(found):
        for name in result["copies"][:1]:
            evidence = f"{plan}: {name} of sharded_state_dict() shares no memory with the model or its optimizer"
            raise Wrong({rank: evidence}, "Hint: into which memory does loading write?")


def _judge_bytes(attempt: Attempt, plan: UnitPlan, found: list[dict]) -> None:
    own, module = bytes_of(plan, attempt.world_size).shards, unit_models.build(plan.model, 0)
    buffers = sum(each.nbytes for each in module.buffers())
    moments = {"AdamW": 2, "Adam": 3, "SGD": 1}[plan.optimizer]
    saved, least = sum(each["saved_bytes"] for each in found), sum(each.nbytes for each in module.parameters())
    if saved < (1 + moments) * least + len(found) * buffers:
        evidence = f"{plan}: the tensors of sharded_state_dict() have {saved:,} bytes on all ranks together"
        expected = f"expected at least {least:,} for the parameters, and {moments * least:,} for the optimizer's state"
        raise Wrong(f"{evidence}; {expected}", "Hint: without which tensors can training not continue?")
    for rank, result in enumerate(found):
        nbytes, most = result["kept_bytes"], (1 + moments) * own + buffers
        if nbytes > SLACK * most + 1000:
            evidence = (
                f"{plan}: the tensors of sharded_state_dict() have {nbytes:,} bytes on this rank; expected {most:,.0f}"
            )
            raise Wrong({rank: evidence}, "Hint: which slice of each tensor must this rank save?")
