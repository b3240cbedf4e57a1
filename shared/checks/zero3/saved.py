"""Judge that ZeRO3 behaves like its module, and its checkpoints: any number of ranks can load what they need."""

import copy
import re
from dataclasses import dataclass, field

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

# -- judge that ZeRO3 behaves like its module, and that its state_dict() can be loaded


MODEL = "Buffered"


def probe_wrapping(wrapper, plan: UnitPlan, seed: int, x, y) -> dict[str, bool]:
    """Return, for each claim, whether it holds."""
    module = unit_models.build(plan.model, seed).to(device_here())
    module.blocks[0].eval()
    modes, random_state = [each.training for each in module.modules()], torch.get_rng_state()
    x = x.to(device_here())
    wrapped = shard(wrapper, module, plan)
    seen = []
    module.register_forward_hook(lambda *_: seen.append(True))
    found = {
        "is a module": isinstance(wrapped, torch.nn.Module),
        "keeps the module as .module": wrapped.module is module,
        "does not change the train/eval mode of any module": [each.training for each in module.modules()] == modes,
        "does not change torch's random number state": torch.equal(random_state, torch.get_rng_state()),
    }
    with torch.no_grad():
        by_position, by_keyword = wrapped(x), wrapped(x=x)
    found["forwards keyword arguments"] = torch.equal(by_position, by_keyword)
    found["calls the module itself, so that the module's hooks run"] = len(seen) == 2
    found["passes eval() on to the module"] = not wrapped.eval().module.training
    return found


def it_is_like_its_module(attempt: Attempt) -> None:
    found = attempt.run(probe_wrapping, UnitPlan(MODEL), per_rank=Draw(attempt).per_rank)
    broken = {
        rank: "; ".join(f"this does not hold: the wrapper {claim}" for claim, holds in result.items() if not holds)
        for rank, result in enumerate(found)
        if not all(result.values())
    }
    if broken:
        raise Wrong(broken)


@dataclass
class OwnState:
    owned: int  # the elements of this rank's shards
    saved: int  # the elements of state_dict()
    first: list[dict[str, torch.Tensor]]  # the states of the first wrapper: when it is saved, and after another step
    second: list[dict[str, torch.Tensor]]  # the states of the second one: after loading, and after another step


def probe_own_state(wrapper, plan: UnitPlan, seed: int, x, y) -> OwnState:
    """Train, and load state_dict() into another wrapper. Train both on."""
    x, y = x.to(device_here()), y.to(device_here())
    wrapped, readers, optimizers = [], [], []
    for _ in range(2):
        module = unit_models.build(plan.model, seed).to(device_here())
        readers.append(StateReader(module))
        wrapped.append(shard(wrapper, module, plan))
        optimizers.append(new_optimizer(plan, wrapped[-1]))

    def seen(index: int) -> dict:
        with torch.no_grad():
            return readers[index](lambda: wrapped[index](x))[1]

    take_step(wrapped[0], optimizers[0], plan, x, y)
    state = copy.deepcopy(wrapped[0].state_dict())
    own = sum(p.numel() for p in wrapped[0].parameters())
    saved = sum(value.numel() for value in state.values() if value.is_floating_point())
    before = seen(0)
    wrapped[1].load_state_dict(state)
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    loaded = seen(1)
    for index in (0, 1):
        take_step(wrapped[index], optimizers[index], plan, x, y)
    return OwnState(own, saved, [before, seen(0)], [loaded, seen(1)])


def its_own_state_can_be_loaded(attempt: Attempt) -> None:
    plan = UnitPlan(MODEL)
    found = attempt.run(probe_own_state, plan, per_rank=Draw(attempt).per_rank, context=f"{plan}, state_dict()")
    buffers = sum(b.numel() for b in unit_models.build(MODEL, 0).buffers())
    for rank, result in enumerate(found):
        if result.saved > result.owned + buffers:
            evidence = (
                f"state_dict() has {result.saved} elements; expected at most {result.owned + buffers}, those of this "
                "rank's shards and the buffers"
            )
            raise Wrong({rank: evidence}, "Hint: which parameters does this rank store?")
        moments = ("after loading", "after loading and training")
        for moment, first, second in zip(moments, result.first, result.second, strict=True):
            for name, expected in first.items():
                if name not in second or not torch.equal(second[name], expected):
                    evidence = f"{plan}: {name} of another wrapper is not that of the first, {moment} its state_dict()"
                    hint = "Hint: which tensors are in state_dict(), and which wrapper do they belong to?"
                    raise Wrong({rank: evidence}, hint)


SAVED_AFTER = 2


@dataclass
class Trained:
    state: dict[str, torch.Tensor]  # the final one
    # Of a sharded state that was saved:
    misnamed: list[str] = field(default_factory=list)  # the buffers that it does not name
    copies: list[str] = field(default_factory=list)  # its tensors that share no memory with the model or its optimizer
    kept_bytes: int = 0  # the memory that it keeps alive
    saved_bytes: int = 0  # the size of its tensors


def probe_saved(wrapper, plan: UnitPlan, folder: str, resumes: bool, seed: int, x, y) -> Trained:
    """Train some steps and save, or load a checkpoint. Then train the remaining steps."""
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
    return Trained(state) if resumes else _describe(state, saved, wrapped, optimizer)


def _describe(state: dict[str, torch.Tensor], saved: dict, wrapped, optimizer) -> Trained:
    """Find out what is wrong with the names and the memory of a sharded state, and how many bytes it has."""
    buffers = dict(wrapped.module.named_buffers())
    tensors = {name: getattr(value, "_local_tensor", value) for name, value in saved.items()}
    tensors = {name: value for name, value in tensors.items() if isinstance(value, torch.Tensor)}
    own = [*buffers.values(), *wrapped.parameters(), *(v for each in optimizer.state.values() for v in each.values())]
    storages = {each.untyped_storage()._cdata for each in own if isinstance(each, torch.Tensor)}
    copies = [name for name, value in tensors.items() if value.untyped_storage()._cdata not in storages]
    return Trained(
        state,
        misnamed=[name for name in buffers if f"module.{name}" not in saved],
        copies=[name for name in copies if tensors[name].numel()],
        kept_bytes=sum(value.untyped_storage().nbytes() for value in tensors.values()),
        saved_bytes=sum(value.nbytes for value in tensors.values()),
    )


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
        expected = on_one_batch(plan, draw).steps[-1].state
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


def _judge(found: list[Trained], expected: dict, context: str, hint: str) -> None:
    states = {rank: result.state for rank, result in enumerate(found)}
    reject_missing(states, expected, context)
    judge_states(states, expected, {}, context, hint=hint)


def _judge_names(plan: UnitPlan, found: list[Trained]) -> None:
    for rank, result in enumerate(found):
        for name in result.misnamed[:1]:
            evidence = f"{plan}: sharded_state_dict() does not name the buffer module.{name}"
            raise Wrong(
                {rank: evidence}, "Hint: under which names does sharded_state_dict() save the module's buffers?"
            )


def _judge_copies(plan: UnitPlan, found: list[Trained]) -> None:
    for rank, result in enumerate(found):
        for name in result.copies[:1]:
            evidence = f"{plan}: {name} of sharded_state_dict() shares no memory with the model or its optimizer"
            raise Wrong({rank: evidence}, "Hint: into which memory does loading write?")


def _judge_bytes(attempt: Attempt, plan: UnitPlan, found: list[Trained]) -> None:
    own, module = bytes_of(plan, attempt.world_size).shards, unit_models.build(plan.model, 0)
    buffers = sum(each.nbytes for each in module.buffers())
    moments = {"AdamW": 2, "Adam": 3, "SGD": 1}[plan.optimizer]
    saved, least = sum(each.saved_bytes for each in found), sum(each.nbytes for each in module.parameters())
    if saved < (1 + moments) * least + len(found) * buffers:
        evidence = f"{plan}: the tensors of sharded_state_dict() have {saved:,} bytes on all ranks together"
        expected = f"expected at least {least:,} for the parameters, and {moments * least:,} for the optimizer's state"
        raise Wrong(f"{evidence}; {expected}", "Hint: without which tensors can training not continue?")
    for rank, result in enumerate(found):
        nbytes, most = result.kept_bytes, (1 + moments) * own + buffers
        if nbytes > SLACK * most + 1000:
            evidence = (
                f"{plan}: the tensors of sharded_state_dict() have {nbytes:,} bytes on this rank; expected {most:,.0f}"
            )
            raise Wrong({rank: evidence}, "Hint: which slice of each tensor must this rank save?")
