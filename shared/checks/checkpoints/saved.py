"""Judge which rank saves what, and training that is resumed: on fewer ranks, without sharding, or in the same run."""

import inspect
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.fsdp import fully_shard

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here, mesh_here
from shared.checks.engine.compare import RELATIVE_TOLERANCE, describe_calls, nearly_equal, total_of
from shared.checks.engine.failures import Wrong
from shared.checks.engine.folders import shared_folder
from shared.checks.engine.sharded.dtensors import assembled, judge_tensors, loss_of, shard_of, shards_of
from shared.checks.engine.sharded.plan import OPTIMIZERS
from shared.checks.engine.sharded.state import in_world_of
from shared.checks.engine.training import Draw
from shared.checks.models import awkward, unit_models
from shared.wire import instrumentation

# -- judge which rank writes what: each rank writes about its own shard, and no rank gathers the others' shards


WIDTH, LAYERS = 256, 4  # The tensors are much larger than their metadata.
STATE_BYTES = 3 * 4 * LAYERS * (WIDTH * WIDTH + WIDTH)  # in float32, with Adam's moments
SLACK = 1.15  # metadata of each tensor
MOST_SENT = 0.25  # As a fraction of the state: ranks exchange only their plans of what to write.


def probe_shards(save_checkpoint, folder: str) -> tuple[list, bool]:
    """Save a model of a few large tensors. Return what was sent while saving, and whether the step is missing."""
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(device_here())
    mesh = mesh_here()
    for each in (*module, module):
        fully_shard(each, mesh=mesh)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(2, WIDTH, device=device_here())).sum().backward()
    optimizer.step()
    with instrumentation.listening() as calls:
        save_checkpoint(Path(folder), 1, module, optimizer)
    if not (Path(folder) / "step_1" / ".metadata").exists():
        return calls, False
    keys = FileSystemReader(Path(folder) / "step_1").read_metadata().state_dict_metadata
    return calls, not any(key.split(".")[-1] == "step" and ".state." not in key for key in keys)


def each_writes_its_shard(attempt: Attempt) -> None:
    shard_bytes = STATE_BYTES / attempt.world_size
    with shared_folder() as folder:
        found = attempt.run(probe_shards, folder)
        sizes = [path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()]
    if max(sizes, default=0) > SLACK * shard_bytes:
        evidence = (
            f"the largest file has {max(sizes):,} bytes; expected about {shard_bytes:,.0f}, one rank's shard of "
            "the state"
        )
        raise Wrong(evidence, "Hint: which rank writes which tensors?")
    if not STATE_BYTES <= sum(sizes) <= SLACK * STATE_BYTES:
        evidence = (
            f"all files together have {sum(sizes):,} bytes; expected about {STATE_BYTES:,}, the size of the state"
        )
        raise Wrong(evidence, "Hint: what belongs in a checkpoint, and how many times is each tensor written?")
    if any(no_step for _, no_step in found):
        raise Wrong("the checkpoint does not contain the step", "Hint: from which step would a run resume?")
    for rank, (calls, _) in enumerate(found):
        if sum(call.payload_bytes for call in calls) > MOST_SENT * STATE_BYTES:
            evidence = (
                f"to save a state of {STATE_BYTES:,} bytes, this rank sent {describe_calls(calls)}; expected "
                "only metadata"
            )
            raise Wrong({rank: evidence}, "Hint: why would a rank need another rank's shard to write its own?")


SAVED_AFTER, STEPS = 2, 4
_HINT_ON_OPTIMIZER = (
    "Hint: does the dict that dcp.load() fills contain the optimizer's state, and does the optimizer get it afterwards?"
)
_HINT_ON_SETTINGS = (
    "The parameters and moments are right. Hint: which function gives the settings in param_groups to the optimizer?"
)
_HINT_ON_SAVING = "Hint: does saving change the model or the optimizer?"
_HINT_ON_STEP = "Hint: where does dcp.load() put the step that was saved?"
_HINT_ON_MODEL = "Hint: which tensors does load() write into, and are they the model's?"


@dataclass(frozen=True)
class Saving:
    """Describe what is trained; `sharded` by fully_shard, or else with a full copy on every rank."""

    model: str
    optimizer: str = "AdamW"
    sharded: bool = True

    def __str__(self) -> str:
        return f"{unit_models.describe(self.model)}, {self.optimizer}" + ", without sharding" * (not self.sharded)


def beside(piece, name: str):
    """Return the function of that name that is defined in the same module, or notebook, as this function or class."""
    defined = vars(sys.modules[piece.__module__]) if inspect.isclass(piece) else inspect.unwrap(piece).__globals__
    if name not in defined:
        raise AssertionError(f"{name} is not defined where {piece.__name__} is defined")
    return defined[name]


def build(plan: Saving, seed: int) -> Any:
    """Build a model whose non-persistent buffers do not depend on the seed."""
    module = unit_models.build(plan.model, seed)
    kept = module.state_dict()
    for name, buffer in module.named_buffers():
        if name not in kept:
            buffer.fill_(0.25)
    return module


def settle(plan: Saving, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build a model on a rank, sharded or not, and its optimizer."""
    module = build(plan, seed).to(device_here())
    if plan.sharded:
        mesh = mesh_here()
        for each in (*module.blocks, module):
            fully_shard(each, mesh=mesh)
    return module, new_optimizer(plan, module)


def new_optimizer(plan: Saving, module: nn.Module) -> torch.optim.Optimizer:
    """Build an optimizer with two groups that have different settings."""
    cls, settings = OPTIMIZERS[plan.optimizer]
    groups = [{"params": []}, {"params": [], "lr": settings["lr"] / 4}]
    for parameter in module.parameters():
        groups[parameter.ndim < 2]["params"].append(parameter)
    return cls(groups, **settings)


def train(module, optimizer, numbers: range, x, y) -> list[torch.Tensor]:
    """Take these steps, and change settings after each, as schedulers do. Return the losses."""
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


@dataclass
class Contents:
    """What a checkpoint holds, by name: a rank's shards or, in the kernel, the whole tensors."""

    state: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)


def contents_of(module, optimizer) -> Contents:
    return Contents(shards_of(module), remembered(module, optimizer))


@dataclass
class Continued:
    """How training went on after a checkpoint."""

    losses: list[torch.Tensor]
    end: dict[str, Any]  # the model's state at the end: a rank's shards, or one process's tensors


@dataclass
class Resumed(Continued):
    contents: Contents  # when it went on
    step: Any = None  # what load_checkpoint() returned
    again: "Resumed | None" = None  # how it went on after loading in the same run


def _ready(module) -> tuple:
    """Return what training would find: the module's mode, and which gradients are None."""
    return module.training, [parameter.grad is None for parameter in module.parameters()]


def probe_saved(load_checkpoint, plan: Saving, folder: str, step: int, goes_back: bool, seed: int, x, y) -> Resumed:
    """Train, save, and train on. If goes_back, also save each earlier step, then load and train on once more."""
    save_checkpoint = beside(load_checkpoint, "save_checkpoint")
    module, optimizer = settle(plan, seed)
    x, y = x.to(device_here()), y.to(device_here())
    for left in reversed(range(SAVED_AFTER)):
        train(module, optimizer, range(1), x, y)
        before = _ready(module)
        if goes_back or not left:
            save_checkpoint(Path(folder), step - left, module, optimizer)
        if _ready(module) != before:
            raise AssertionError(
                "save_checkpoint() changed gradients or the train/eval mode; expected it to change neither"
            )
    found = _continue(module, optimizer, x, y)
    if goes_back:
        found.again = _resume(module, optimizer, load_checkpoint, folder, f"step_{step}", x, y)
    return found


def probe_resumed(load_checkpoint, plan: Saving, folder: str, name: str, seed: int, x, y) -> Resumed:
    """Load a checkpoint into a new model, and train on."""
    module, optimizer = settle(plan, seed)
    found = beside(load_checkpoint, "newest_checkpoint")(Path(folder))
    if found is None or Path(found).name != name:
        raise AssertionError(f"newest_checkpoint() found {found and Path(found).name}; expected {name}")
    return _resume(module, optimizer, load_checkpoint, folder, name, x.to(device_here()), y.to(device_here()))


def _resume(module, optimizer, load_checkpoint, folder: str, name: str, x, y) -> Resumed:
    loaded = load_checkpoint(Path(folder) / name, module, optimizer)
    return _continue(module, optimizer, x, y, loaded)


def _continue(module, optimizer, x, y, step=None) -> Resumed:
    contents = contents_of(module, optimizer)
    losses = train(module, optimizer, range(SAVED_AFTER, STEPS), x, y)
    return Resumed(losses, shards_of(module), contents, step)


# -- judging, in the kernel


def trained_alone(plan: Saving, seed: int, x, y) -> Continued:
    """Return the last losses and the final state of one process."""
    module = build(plan, seed)
    losses = train(module, new_optimizer(plan, module), range(STEPS), x, y)
    return Continued(losses[SAVED_AFTER:], awkward.state_of(module))


def whole(shards: list[Contents]) -> Contents:
    """Assemble the shards of all ranks."""
    states, optimizers = [each.state for each in shards], [each.optimizer for each in shards]
    return Contents(assembled(states)[0], assembled(optimizers)[0])


def judge_contents(found: list[Contents], saved: Contents, context: str, than: str, hints: tuple[str, str]) -> None:
    """Judge that each rank's contents equal what was saved, bitwise.

    Raises:
        Wrong: If they differ. There is a hint for the model's state, and one for the optimizer's.
    """
    pairs = ([each.state for each in found], saved.state), ([each.optimizer for each in found], saved.optimizer)
    for (shards, right), hint in zip(pairs, hints, strict=True):
        for rank, tensors in enumerate(assembled(shards)):
            for name, expected in right.items():
                if name not in tensors or not torch.equal(tensors[name], expected):
                    raise Wrong({rank: f"{context}: {name} differs from {than}"}, hint)


def judge(found: list[Resumed], alone: Continued, saved: Contents | None, step: int, context: str) -> None:
    """Judge what ranks had after loading, and how training went on.

    Args:
        found: For each rank, what its probe found.
        alone: What one process found.
        saved: What was saved, which must be restored bitwise; None if nothing was loaded.
        step: The step that load_checkpoint() must return.
        context: What was done.

    Raises:
        Wrong: If something differs.
    """
    if saved is not None:
        hints = _HINT_ON_MODEL, _HINT_ON_OPTIMIZER
        judge_contents([each.contents for each in found], saved, context, "what was saved", hints)
        returned = {rank: each.step for rank, each in enumerate(found) if repr(each.step) != repr(step)}
        wrong = {
            rank: f"{context}: load_checkpoint() returned {value!r}; expected the int {step}"
            for rank, value in returned.items()
        }
        if wrong:
            raise Wrong(wrong, _HINT_ON_STEP if all(isinstance(value, int) for value in returned.values()) else "")
    for number, expected in enumerate(alone.losses):
        loss = total_of(result.losses[number] for result in found) / len(found)
        if not nearly_equal(loss, expected, RELATIVE_TOLERANCE):
            evidence = f"{context}: the loss in step {SAVED_AFTER + number + 1} is {loss:.8g}; expected {expected:.8g}"
            raise Wrong(evidence, _HINT_ON_SETTINGS if saved is not None else _HINT_ON_SAVING)
    judge_tensors(assembled([result.end for result in found]), alone.end, f"{context}: ", RELATIVE_TOLERANCE)


def _shares(plan: Saving, draw: Draw, ranks: int) -> list[tuple]:
    """Split the samples. Without sharding, each rank trains on all of them, so nothing needs to be averaged."""
    if not plan.sharded:
        return [(draw.x, draw.y)] * ranks
    return list(zip(draw.x.chunk(ranks), draw.y.chunk(ranks), strict=True))


def a_plain_model_resumes(attempt: Attempt) -> None:
    """Save a plain model and resume on the same number of ranks."""
    _save_and_resume(attempt, Saving("Blocks"), [attempt.world_size])


def any_number_of_ranks_resumes(attempt: Attempt) -> None:
    size = attempt.world_size
    plans = {
        1: [Saving("Frozen", sharded=False)],
        2: [Saving("Buffered", "SGD"), Saving("TiedInside", "Adam"), Saving("Blocks", sharded=False)],
        4: [Saving(attempt.random.choice(("Buffered", "Frozen")), attempt.random.choice(("AdamW", "SGD")))],
    }[size]
    for plan in plans:
        _save_and_resume(attempt, plan, {1: [1], 2: [1] if plan.sharded else [2], 4: [4, 3, 2]}[size])


def _save_and_resume(attempt: Attempt, plan: Saving, resumed_on: list[int]) -> None:
    """Train on fresh data, save, and resume on each of these numbers of ranks.

    Raises:
        Wrong: If what was loaded or what follows differs from one process that was not interrupted.
    """
    size, draw, step = attempt.world_size, Draw(attempt), attempt.random.randrange(1, 10**6)
    expected = trained_alone(plan, draw.seeds[0], draw.x, draw.y)
    with shared_folder() as root:
        folder = str(Path(root) / "runs" / "first")  # This folder does not exist yet.
        per_rank = [(draw.seeds[0], x, y) for x, y in _shares(plan, draw, size)]
        found = attempt.run(probe_saved, plan, folder, step, False, per_rank=per_rank, context=str(plan))
        judge(found, expected, None, step, f"{plan}, after it was saved")
        saved = whole([result.contents for result in found])
        for fewer in resumed_on:
            other, name = replace(plan, sharded=plan.sharded and fewer > 1), f"step_{step}"
            context = f"{plan}, saved on {size} rank{'s' * (size > 1)} and resumed on {fewer}"
            if size == 4 and fewer == 2:  # A checkpoint must not depend on its folder's name.
                name, context = f"step_{step + 1}", f"{context}, after its folder was renamed to step_{step + 1}"
                (Path(folder) / f"step_{step}").rename(Path(folder) / name)
            with in_world_of(attempt, fewer) as there:
                per_rank = [(attempt.draw_seed(), x, y) for x, y in _shares(other, draw, fewer)]
                resumed = there.run(probe_resumed, other, folder, name, per_rank=per_rank, context=context)
                judge(resumed, expected, saved, step, context)


def training_can_go_back(attempt: Attempt) -> None:
    """Load in the same run that saved, after its optimizer has taken more steps and while gradients exist."""
    plan, draw, step = Saving("Blocks", sharded=attempt.world_size > 1), Draw(attempt), attempt.random.randrange(1, 99)
    expected = trained_alone(plan, draw.seeds[0], draw.x, draw.y)
    per_rank = [(draw.seeds[0], x, y) for x, y in draw.shares]
    with shared_folder() as folder:
        found = attempt.run(probe_saved, plan, folder, step, True, per_rank=per_rank, context=str(plan))
    judge(found, expected, None, step, f"{plan}, after it was saved")
    saved = whole([result.contents for result in found])
    judge([result.again for result in found], expected, saved, step, f"{plan}, loaded again in the same run")
