"""Judge that ZeRO3 behaves like its module, and that its state_dict() can be loaded."""

import copy

import torch

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.failures import Wrong
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


def probe_own_state(wrapper, plan: UnitPlan, seed: int, x, y) -> dict:
    """Train, and load state_dict() into another wrapper. Train both on. Return their states by name."""
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
    return {
        "saved": before,
        "after loading": loaded,
        "trained": seen(0),
        "after loading and training": seen(1),
        "elements": (own, saved),
    }


def its_own_state_can_be_loaded(attempt: Attempt) -> None:
    plan = UnitPlan(MODEL)
    found = attempt.run(probe_own_state, plan, per_rank=Draw(attempt).per_rank, context=f"{plan}, state_dict()")
    buffers = sum(b.numel() for b in unit_models.build(MODEL, 0).buffers())
    for rank, result in enumerate(found):
        own, saved = result["elements"]
        if saved > own + buffers:
            evidence = (
                f"state_dict() has {saved} elements; expected at most {own + buffers}, those of this rank's "
                "shards and the buffers"
            )
            raise Wrong({rank: evidence}, "Hint: which parameters does this rank store?")
        for one, another in (("after loading", "saved"), ("after loading and training", "trained")):
            for name, expected in result[another].items():
                if name not in result[one] or not torch.equal(result[one][name], expected):
                    evidence = f"{plan}: {name} of another wrapper is not that of the first, {one} its state_dict()"
                    hint = "Hint: which tensors are in state_dict(), and which wrapper do they belong to?"
                    raise Wrong({rank: evidence}, hint)
