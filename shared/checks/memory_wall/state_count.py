"""Judging a count of what a module and its optimizer hold: models and optimizers for which short cuts are wrong."""

import contextlib

import torch

from shared import memory
from shared.checks.engine.candidate import device_here
from shared.checks.engine.framework import Attempt, Wrong
from shared.checks.models import awkward
from shared.memory import storages

COMPONENTS = ("parameters", "gradients", "optimizer")
SAMPLES = 4


class Counting(torch.optim.Optimizer):
    """Keeps one tensor per parameter, and a plain number."""

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
PARTLY, FROZEN = "with half of the model", "frozen since a step"
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


def train(case: tuple[str, str, str], seed: int, dtype: torch.dtype, device: torch.device):
    """Bring a model and its optimizer to where they are to be counted."""
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


def probe_count(model_state_bytes, tried: list[tuple], handmade: bool) -> list[dict]:
    """→ per try what was counted, and for how many parameters there is state, before and after that"""
    found = []
    for each in tried:
        module, optimizer = train(*each, device_here())
        before = len(optimizer.state)
        with _ledger_refused() if handmade else contextlib.nullcontext():
            counted = dict(model_state_bytes(module, optimizer))
        found.append({"counted": counted, "states": (before, len(optimizer.state))})
    return found


@contextlib.contextmanager
def _ledger_refused():
    """The ledger is what the count is compared with. All of it goes through _parts, whoever has imported what."""
    parts = storages._parts

    def refuse(_):
        raise AssertionError("the memory ledger does the counting here: count by hand")

    storages._parts = refuse
    try:
        yield
    finally:
        storages._parts = parts


def without_the_ledger(attempt: Attempt) -> None:
    attempt.run(probe_count, [(TRIED[1], attempt.draw_seed(), torch.float32)], True)


def counted_to_the_byte(attempt: Attempt) -> None:
    dtypes = (torch.bfloat16, torch.float32, torch.float64)
    tried = [(case, attempt.draw_seed(), attempt.random.choice(dtypes)) for case in TRIED]
    for rank, counts in enumerate(attempt.run(probe_count, tried, False)):
        for (case, seed, dtype), result in zip(tried, counts, strict=True):
            module, optimizer = train(case, seed, dtype, torch.device("cpu"))
            model, name, when = case
            context = f"{awkward.said(model)} in {str(dtype).removeprefix('torch.')}, {name}, {when}"
            _judge(rank, result["counted"], module, optimizer, context)
            before, after = result["states"]
            if before != after:
                said = f"{context}: optimizer.state had {before} entries, and has {after} since it was counted"
                raise Wrong({rank: said}, "Look at: what does a defaultdict do when it is asked for what it has not?")


def _judge(rank: int, found: dict, module, optimizer, context: str) -> None:
    held = memory.held(module, optimizer).by_component()
    if sorted(found) != sorted(COMPONENTS):
        raise Wrong({rank: f"the keys are {sorted(found)}; expected {sorted(COMPONENTS)}"})
    for component in COMPONENTS:
        if found[component] != held[component]:
            said = f"{context}: {component} {found[component]:,} bytes; the ledger has {held[component]:,}"
            raise Wrong({rank: said}, _cause(component, found[component], module, optimizer))


def _cause(component: str, came: int, module, optimizer) -> str:
    if component == "parameters" and came == sum(each.nbytes for each in (*module.parameters(), *module.buffers())):
        return "Look at: which of the tensors that were counted is no parameter?"
    listed = sum(each.nbytes for each in module.state_dict().values())  # a tied one twice, and buffers
    if came == listed != sum(parameter.nbytes for parameter in module.parameters()):
        return "Look at: what does state_dict() list twice, and what in it is no parameter?"
    if component == "gradients":
        return "Look at: which parameters have no .grad, and of which dtype is a gradient?"
    if component == "parameters":
        return "Look at: how many bytes does one number take, and is it the same for every parameter?"
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    if came == sum(value.nbytes for value in states if value.dim()):
        return "Only a few bytes are missing. Look at: what else does Adam remember of each parameter?"
    return "Look at: what is in optimizer.state, before the first step and after it, and for which parameters?"
