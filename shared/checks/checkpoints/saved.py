"""Training that is saved, and goes on elsewhere: on fewer ranks, on one where nothing is sharded, or where it was."""

import inspect
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import RELATIVE_TOLERANCE, close
from shared.checks.engine.framework import Attempt, Wrong
from shared.checks.engine.sharded.dtensors import assembled, judge_tensors, loss_of, shard_of, shards_of
from shared.checks.engine.sharded.plan import OPTIMIZERS
from shared.checks.engine.sharded.state import in_world_of
from shared.checks.engine.training import Draw
from shared.checks.models import awkward, unit_models

SAVED_AFTER, STEPS = 2, 4
_LOOK_AT_OPTIMIZER = "Look at: what does an optimizer remember, and who hands it back?"
_LOOK_AT_MODEL = "Look at: which tensors does load fill, and are they the model's?"


@dataclass(frozen=True)
class Saving:
    """sharded: by fully_shard, or a whole copy on every rank."""

    model: str
    optimizer: str = "AdamW"
    sharded: bool = True

    def __str__(self) -> str:
        return f"{unit_models.said(self.model)}, {self.optimizer}" + ", nothing sharded" * (not self.sharded)


def beside(piece, name: str):
    """Return the function of that name that is defined where this piece is."""
    defined = inspect.unwrap(piece).__globals__
    if name not in defined:
        raise AssertionError(f"{name} is not defined beside {piece.__name__}")
    return defined[name]


def build(plan: Saving, seed: int) -> nn.Module:
    """Build a model; what a state_dict leaves out is the same whatever the seed."""
    module = unit_models.build(plan.model, seed)
    kept = module.state_dict()
    for name, buffer in module.named_buffers():
        if name not in kept:
            buffer.fill_(0.25)
    return module


def settle(plan: Saving, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build a model on a rank, sharded or not, and its optimizer."""
    module = build(plan, seed).to(device_here())
    for each in (*module.blocks, module) if plan.sharded else ():
        fully_shard(each)
    return module, new_optimizer(plan, module)


def new_optimizer(plan: Saving, module: nn.Module) -> torch.optim.Optimizer:
    """Build one of two groups, of which each has settings of its own."""
    cls, settings = OPTIMIZERS[plan.optimizer]
    groups = [{"params": []}, {"params": [], "lr": settings["lr"] / 4}]
    for parameter in module.parameters():
        groups[parameter.ndim < 2]["params"].append(parameter)
    return cls(groups, **settings)


def train(module, optimizer, numbers: range, x, y) -> list[torch.Tensor]:
    """Take these steps, and change settings after each, as schedulers would. → losses"""
    losses = []
    for _ in numbers:
        optimizer.zero_grad()
        loss = loss_of(module, x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
        for group in optimizer.param_groups:
            group["lr"] *= 0.7
            group["weight_decay"] += 0.1
    return losses


def remembered(module, optimizer) -> dict:
    """Return this rank's shards of an optimizer's state, by parameter and name."""
    return {
        f"{name}, {what}": shard_of(torch.as_tensor(value))
        for name, parameter in module.named_parameters()
        for what, value in optimizer.state.get(parameter, {}).items()
        if value is not None
    }


def _ready(module) -> tuple:
    """Tell how training finds its module."""
    return module.training, [parameter.grad is None for parameter in module.parameters()]


def probe_saved(load_checkpoint, plan: Saving, folder: str, step: int, goes_back: bool, seed: int, x, y) -> dict:
    """Train, save, and train on. goes_back: save also what comes before, and at the end go back and on once more."""
    save_checkpoint = beside(load_checkpoint, "save_checkpoint")
    module, optimizer = settle(plan, seed)
    x, y = x.to(device_here()), y.to(device_here())
    for left in reversed(range(SAVED_AFTER)):
        train(module, optimizer, range(1), x, y)
        before = _ready(module)
        if goes_back or not left:
            save_checkpoint(Path(folder), step - left, module, optimizer)
        if _ready(module) != before:
            raise AssertionError("save_checkpoint() drops gradients, or leaves another mode than train()")
    found = {"state": shards_of(module), "optimizer": remembered(module, optimizer)}
    found["losses"] = train(module, optimizer, range(SAVED_AFTER, STEPS), x, y)
    found["end"] = shards_of(module)
    args = (module, optimizer, load_checkpoint, folder, f"step_{step}", x, y)
    return found | {"again": _go_on(*args) if goes_back else None}


def probe_resumed(load_checkpoint, plan: Saving, folder: str, name: str, seed: int, x, y) -> dict:
    """Load what is saved into a new model, and train on."""
    module, optimizer = settle(plan, seed)
    found = beside(load_checkpoint, "newest_checkpoint")(Path(folder))
    if found is None or Path(found).name != name:
        raise AssertionError(f"newest_checkpoint() finds {found and Path(found).name}, expected {name}")
    return _go_on(module, optimizer, load_checkpoint, folder, name, x.to(device_here()), y.to(device_here()))


def _go_on(module, optimizer, load_checkpoint, folder: str, name: str, x, y) -> dict:
    loaded = load_checkpoint(Path(folder) / name, module, optimizer)
    found = {"step": loaded, "state": shards_of(module), "optimizer": remembered(module, optimizer)}
    found["losses"] = train(module, optimizer, range(SAVED_AFTER, STEPS), x, y)
    return found | {"end": shards_of(module)}


# -- judging, in the kernel


def trained_alone(plan: Saving, seed: int, x, y) -> dict:
    """→ the last losses, and the state at the end"""
    module = build(plan, seed)
    losses = train(module, new_optimizer(plan, module), range(STEPS), x, y)
    return {"losses": losses[SAVED_AFTER:], "end": awkward.state_of(module)}


def judge(found: list[dict], want: dict, saved: dict | None, step: int, said: str) -> None:
    """saved: the state and the optimizer's as they were, which come back bit by bit; None where nothing was loaded.

    Raises: Wrong.
    """
    for what, hint in (("state", _LOOK_AT_MODEL), ("optimizer", _LOOK_AT_OPTIMIZER)) if saved else ():
        for rank, tensors in enumerate(assembled([result[what] for result in found])):
            for name, expected in saved[what].items():
                if name not in tensors or not torch.equal(tensors[name], expected):
                    raise Wrong({rank: f"{said}: {name} is not what was saved"}, hint)
    if saved:
        wrong = {rank: f"{said}: load_checkpoint() gives back {each['step']!r}" for rank, each in enumerate(found)}
        wrong = {rank: text for rank, text in wrong.items() if repr(found[rank]["step"]) != repr(step)}
        if wrong:
            raise Wrong(wrong, f"Expected: {step}, an int.")
    for number, expected in enumerate(want["losses"]):
        loss = sum(result["losses"][number] for result in found) / len(found)
        if not close(loss, expected, RELATIVE_TOLERANCE):
            evidence = f"{said}: loss {loss:.8g} in step {SAVED_AFTER + number + 1}, expected {expected:.8g}"
            hint = _LOOK_AT_OPTIMIZER if saved else "Look at: does saving change what is trained?"
            raise Wrong(evidence, "Parameters and moments came back. Look at: what of param_groups?" if saved else hint)
    judge_tensors(assembled([result["end"] for result in found]), want["end"], f"{said}: ", RELATIVE_TOLERANCE)


def _shares(plan: Saving, draw: Draw, ranks: int) -> list[tuple]:
    """Split the samples; where nothing is sharded, each rank trains on all of them, and nothing need be averaged."""
    if not plan.sharded:
        return [(draw.x, draw.y)] * ranks
    return list(zip(draw.x.chunk(ranks), draw.y.chunk(ranks), strict=True))


def any_number_of_ranks_goes_on(attempt: Attempt) -> None:
    size = attempt.world_size
    plans = {
        1: [Saving("Frozen", sharded=False)],
        2: [Saving("Buffered", "SGD"), Saving("TiedInside", "Adam"), Saving("Blocks", sharded=False)],
        4: [Saving(attempt.random.choice(("Buffered", "Frozen")), attempt.random.choice(("AdamW", "SGD")))],
    }[size]
    for plan in plans:
        draw, step = Draw(attempt), attempt.random.randrange(1, 10**6)
        want = trained_alone(plan, draw.seeds[0], draw.x, draw.y)
        with tempfile.TemporaryDirectory() as root:
            folder = str(Path(root) / "runs" / "first")  # which is not there yet
            per_rank = [(draw.seeds[0], x, y) for x, y in _shares(plan, draw, size)]
            found = attempt.run(probe_saved, plan, folder, step, False, per_rank=per_rank, context=str(plan))
            judge(found, want, None, step, f"{plan}, after it was saved")
            saved = {what: assembled([result[what] for result in found])[0] for what in ("state", "optimizer")}
            for fewer in {1: [1], 2: [1] if plan.sharded else [2], 4: [4, 3, 2]}[size]:
                other, name = replace(plan, sharded=plan.sharded and fewer > 1), f"step_{step}"
                said = f"{plan}, saved on {size} rank{'s' * (size > 1)} and resumed on {fewer}"
                if size == 4 and fewer == 2:  # what a checkpoint is, it holds
                    name, said = f"step_{step + 1}", f"{said}, when its folder is called step_{step + 1} by then"
                    (Path(folder) / f"step_{step}").rename(Path(folder) / name)
                with in_world_of(attempt, fewer) as there:
                    per_rank = [(attempt.draw_seed(), x, y) for x, y in _shares(other, draw, fewer)]
                    went = there.run(probe_resumed, other, folder, name, per_rank=per_rank, context=said)
                    judge(went, want, saved, step, said)


def training_goes_back(attempt: Attempt) -> None:
    """In the run that saved, whose optimizer has gone on since, and whose gradients are still there."""
    plan, draw, step = Saving("Blocks", sharded=attempt.world_size > 1), Draw(attempt), attempt.random.randrange(1, 99)
    want = trained_alone(plan, draw.seeds[0], draw.x, draw.y)
    per_rank = [(draw.seeds[0], x, y) for x, y in draw.shares]
    with tempfile.TemporaryDirectory() as folder:
        found = attempt.run(probe_saved, plan, folder, step, True, per_rank=per_rank, context=str(plan))
    judge(found, want, None, step, f"{plan}, after it was saved")
    saved = {what: assembled([result[what] for result in found])[0] for what in ("state", "optimizer")}
    judge([result["again"] for result in found], want, saved, step, f"{plan}, gone back in the same run")
