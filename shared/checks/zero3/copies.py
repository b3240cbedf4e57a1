"""Judge that ZeRO3 behaves like its module, that it can be copied, and that its state_dict() can be loaded."""

import copy

import torch

from shared.checks.engine.candidate import device_here
from shared.checks.engine.framework import Attempt, Wrong
from shared.checks.engine.sharded.unit_training import StateReader, UnitPlan, new_optimizer, shard, take_step
from shared.checks.engine.training import Draw
from shared.checks.models import unit_models

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


def probe_copies(wrapper, plan: UnitPlan, seed: int, x, y) -> dict:
    """Train, copy, train both, load the copy's state_dict() into a third. Return the states by name."""
    module = unit_models.build(plan.model, seed).to(device_here())
    x, y = x.to(device_here()), y.to(device_here())
    read_state = StateReader(module)
    wrapped = shard(wrapper, module, plan)
    optimizer = new_optimizer(plan, wrapped)
    take_step(wrapped, optimizer, plan, x, y)

    def seen(which, how: StateReader) -> dict:
        with torch.no_grad():
            return how(lambda: which(x))[1]

    copied = copy.deepcopy(wrapped)
    other = new_optimizer(plan, copied)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = seen(wrapped, read_state)
    take_step(copied, other, plan, x, y)
    untouched, its = seen(wrapped, read_state), seen(copied, StateReader(copied.module))
    take_step(wrapped, optimizer, plan, x, y)
    third_module = unit_models.build(plan.model, seed).to(device_here())
    read_third = StateReader(third_module)
    third = shard(wrapper, third_module, plan)
    third.load_state_dict(copied.state_dict())
    own = sum(p.numel() for p in copied.parameters())
    saved = sum(value.numel() for value in copied.state_dict().values() if value.is_floating_point())
    return {
        "the original before that": before,
        "the original after its copy was trained": untouched,
        "the copy": its,
        "the original": seen(wrapped, read_state),
        "one that has loaded the copy's state_dict()": seen(third, read_third),
        "elements": (own, saved),
    }


def a_copy_trains_independently(attempt: Attempt) -> None:
    plan = UnitPlan(MODEL)
    found = attempt.run(probe_copies, plan, per_rank=Draw(attempt).per_rank, context=f"{plan}, deepcopy()")
    buffers = sum(b.numel() for b in unit_models.build(MODEL, 0).buffers())
    for rank, result in enumerate(found):
        pairs = [
            (
                "the original after its copy was trained",
                "the original before that",
                "Hint: which memory does the copy share with the original?",
            ),
            ("the copy", "the original", "Hint: which parameters do the copy's hooks and flat parameters refer to?"),
            (
                "one that has loaded the copy's state_dict()",
                "the copy",
                "Hint: which tensors are in state_dict(), and which wrapper do they belong to?",
            ),
        ]
        for one, another, hint in pairs:
            for name, expected in result[another].items():
                if name not in result[one] or not torch.equal(result[one][name], expected):
                    raise Wrong({rank: f"{plan}, trained and copied: {name} differs between {one} and {another}"}, hint)
        trained, before = result["the original"], result["the original before that"]
        if all(torch.equal(trained[name], value) for name, value in before.items()):
            raise Wrong({rank: f"{plan}: training after deepcopy() changes nothing"})
        own, saved = result["elements"]
        if saved > own + buffers:
            evidence = (
                f"state_dict() has {saved} elements; expected at most {own + buffers}, those of this rank's "
                "shards and the buffers"
            )
            raise Wrong({rank: evidence}, "Hint: which parameters does this rank store?")
