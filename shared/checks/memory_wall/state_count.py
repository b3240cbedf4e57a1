"""Judge a count of the bytes that a module and its optimizer hold, with models on which shortcuts count wrong."""

import contextlib
from dataclasses import dataclass

import torch

from shared import memory
from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.failures import Wrong
from shared.checks.engine.hints import where_it_raises
from shared.checks.models import awkward
from shared.memory import storages

COMPONENTS = ("parameters", "gradients", "optimizer")
SAMPLES = 4


class Counting(torch.optim.Optimizer):
    """Keep one tensor and one plain number for each parameter."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                state.setdefault("sum", torch.zeros_like(parameter)).add_(parameter.grad)


OPTIMIZERS = {
    "Adam": torch.optim.Adam,
    "AdamW with amsgrad": lambda params: torch.optim.AdamW(params, amsgrad=True),
    "SGD": torch.optim.SGD,
    "SGD with momentum": lambda params: torch.optim.SGD(params, momentum=0.9),
    "an optimizer whose state has plain numbers": Counting,
}
BEFORE, AFTER, EMPTIED = "before the first step", "after a step", "after zero_grad()"
PARTLY, FROZEN = "with half of the model's parameters", "with the model frozen after a step"
TRIED = [  # model, optimizer, when
    ("Plain", "Adam", BEFORE),
    ("Plain", "Adam", AFTER),
    ("Tied", "Adam", AFTER),
    ("Frozen", "AdamW with amsgrad", AFTER),
    ("Buffered", "SGD with momentum", AFTER),
    ("Mixed", "Adam", AFTER),
    ("Unused", "SGD", AFTER),
    ("Scalar", "an optimizer whose state has plain numbers", AFTER),
    ("Plain", "SGD with momentum", EMPTIED),
    ("Tied", "Adam", PARTLY),
    ("Plain", "Adam", FROZEN),
]

RAISED = {
    "'NoneType' object has no attribute": "Hint: which parameters have no gradient?",
    "'int' object has no attribute": "Hint: which values of an optimizer's state are not tensors?",
}


def train(case: tuple[str, str, str], seed: int, dtype: torch.dtype, device: torch.device):
    """Train a model and its optimizer up to the moment at which they are counted."""
    model, optimizer_name, when = case
    module = awkward.build(model, seed, dtype).to(device)
    parameters = list(module.parameters())
    optimizer = OPTIMIZERS[optimizer_name](parameters[: len(parameters) // 2] if when == PARTLY else parameters)
    if when != BEFORE:
        x, y = (part.to(device, dtype) for part in awkward.draw_batch(seed, SAMPLES))
        awkward.loss_of(module, x, y).backward()
        optimizer.step()
    if when == EMPTIED:
        optimizer.zero_grad()
    if when == FROZEN:
        module.requires_grad_(False)
    return module, optimizer


@dataclass
class Count:
    counted: dict  # what the piece returns
    states: tuple[int, int]  # the number of entries in optimizer.state before and after that


def probe_count(model_state_bytes, case: tuple, seed: int, dtype: torch.dtype, handmade: bool) -> Count:
    module, optimizer = train(case, seed, dtype, device_here())
    before = len(optimizer.state)
    with _ledger_rejected() if handmade else contextlib.nullcontext():
        counted = dict(model_state_bytes(module, optimizer))
    return Count(counted, (before, len(optimizer.state)))


@contextlib.contextmanager
def _ledger_rejected():
    """Make the memory ledger raise, since it is the reference. All of its functions go through _parts."""
    parts = storages._parts

    def reject(_):
        raise AssertionError("this uses shared.memory: count by hand instead")

    storages._parts = reject
    try:
        yield
    finally:
        storages._parts = parts


@where_it_raises(RAISED)
def without_the_ledger(attempt: Attempt) -> None:
    attempt.run(probe_count, TRIED[1], attempt.draw_seed(), torch.float32, True)


@where_it_raises(RAISED)
def counted_to_the_byte(attempt: Attempt) -> None:
    for case in TRIED:
        dtype = attempt.random.choice((torch.bfloat16, torch.float32, torch.float64))
        _judge_case(attempt, case, attempt.draw_seed(), dtype)


def _judge_case(attempt: Attempt, case: tuple[str, str, str], seed: int, dtype: torch.dtype) -> None:
    module, optimizer = train(case, seed, dtype, torch.device("cpu"))
    model, name, when = case
    context = f"{awkward.describe(model)} in {str(dtype).removeprefix('torch.')}, {name}, {when}"
    for rank, result in enumerate(attempt.run(probe_count, case, seed, dtype, False, context=context)):
        _judge(rank, result.counted, module, optimizer, context)
        before, after = result.states
        if before != after:
            evidence = (
                f"{context}: optimizer.state had {before} entries before counting and {after} after; expected no change"
            )
            raise Wrong({rank: evidence}, "Hint: what does a defaultdict do when you look up a missing key?")


def _judge(rank: int, found: dict, module, optimizer, context: str) -> None:
    held = memory.held(module, optimizer).by_component()
    if sorted(found) != sorted(COMPONENTS):
        raise Wrong({rank: f"the keys are {sorted(found)}; expected {sorted(COMPONENTS)}"})
    for component in COMPONENTS:
        if found[component] != held[component]:
            evidence = (
                f"{context}: {component} counted as {found[component]:,} bytes; expected {held[component]:,}, "
                "as by shared.memory.held"
            )
            raise Wrong({rank: evidence}, _cause(component, found[component], module, optimizer))


def _cause(component: str, actual: int, module, optimizer) -> str:
    if component == "parameters" and actual == sum(each.nbytes for each in (*module.parameters(), *module.buffers())):
        return "Hint: which of the counted tensors is not a parameter?"
    listed = sum(each.nbytes for each in module.state_dict().values())  # counts a tied parameter twice, and buffers
    if actual == listed != sum(parameter.nbytes for parameter in module.parameters()):
        return "Hint: what does state_dict() list twice, and which of its tensors are not parameters?"
    if component == "gradients":
        return "Hint: which parameters have no .grad, and which dtype does a gradient have?"
    if component == "parameters":
        return "Hint: how many bytes does one element take, and is that the same for every parameter?"
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    if actual == sum(value.nbytes for value in states if value.dim()):
        return "Only a few bytes are missing. Hint: what else does Adam keep for each parameter?"
    return "Hint: what is in optimizer.state before and after the first step, and for which parameters?"
