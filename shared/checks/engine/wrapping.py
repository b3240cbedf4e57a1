"""Check that a wrapper behaves like the module that it wraps."""

import copy

import torch

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.failures import Wrong
from shared.checks.engine.training import Draw
from shared.checks.models import awkward

KEEPS_MODULE = "keeps the module as .module"


def probe_wrapping(wrapper, options: dict, overlaps: bool, seed: int, x) -> dict:
    """Wrap a module, use the wrapper instead of it, and return which claims about the wrapper hold."""
    module = awkward.build("Buffered", seed).to(device_here())
    module.second.eval()
    module.first.bias.requires_grad_(False)

    def marks():
        return (
            [id(p) for p in module.parameters()],
            [p.requires_grad for p in module.parameters()],
            [m.training for m in module.modules()],
        )

    torch.rand(1)  # so that setting the same seed as an earlier attempt is detected, too
    marked, random_state = marks(), torch.get_rng_state()
    wrapped = wrapper(module, **options)
    rng_kept = torch.equal(random_state, torch.get_rng_state())
    x = x.to(device_here())
    seen = []
    module.register_forward_hook(lambda *_: seen.append(True))
    wrapped(x)
    hooked, untouched = bool(seen), marks() == marked
    copied = _copy_of(wrapped, overlaps)
    other = wrapper(awkward.build("Plain", seed).to(device_here()), **options)  # several wrappers may exist at once
    copy_syncs = copied is None or _syncs(copied, overlaps, "optimizer_cls" in options, x)
    _finish_backward(other, x)
    other.zero_grad()
    others_kept = all(p.grad is None for p in [*module.parameters(), *other.module.parameters()])
    found = {
        "keeps the parameters, requires_grad and the train/eval mode as they were": untouched,
        "does not change torch's random number state": rng_kept,
        "calls the module itself, so that its forward hooks run": hooked,
        "changes .grad only after its own backward(), and only in its own module": others_kept,
        "forwards several positional arguments": torch.equal(wrapped(x, 2.0), module(x, 2.0)),
        "accepts keyword arguments only": torch.equal(wrapped(x=x), module(x)),
        "is an nn.Module": isinstance(wrapped, torch.nn.Module),
        KEEPS_MODULE: wrapped.module is module,
        "forwards positional arguments": torch.equal(wrapped(x), module(x)),
        "forwards keyword arguments": torch.equal(wrapped(x, times=2.0), module(x, times=2.0)),
        "has the module's parameters": {id(p) for p in wrapped.parameters()} == {id(p) for p in module.parameters()},
        "passes eval() on to the module": not wrapped.eval().module.training,
        "returns the module's state from state_dict()": len(wrapped.state_dict()) == len(module.state_dict()),
    }
    syncs = _syncs(wrapped, overlaps, "optimizer_cls" in options, x)  # if this is False, the copy is not to blame
    apart = copied is None or copied.module is not module
    return found | {"can be copied with deepcopy": apart and (copy_syncs or not syncs)}


def _copy_of(wrapped, overlaps: bool):
    """Copy a wrapper. Returns None if it stores a process group, because that cannot be copied.

    Where wrappers overlap, the text says that they are copied.
    """
    try:
        return copy.deepcopy(wrapped)
    except TypeError as error:
        if overlaps or "ProcessGroup" not in str(error):
            raise
        return None


def _loss_of(module, x) -> torch.Tensor:
    return awkward.loss_of(module, x, torch.zeros(len(x), awkward.OUTPUTS, dtype=x.dtype, device=x.device))


def _finish_backward(wrapped, x) -> None:
    _loss_of(wrapped, x).backward()
    wrapped.finish_gradient_sync()


def _syncs(wrapped, overlaps: bool, shards: bool, x) -> bool:
    """Return whether finish_gradient_sync() replaces the gradient of this rank's own samples.

    A wrapper that shards gradients must leave none.
    """
    plain = awkward.twin_of("Buffered", wrapped.module) if overlaps else wrapped.module
    _loss_of(wrapped, x).backward()
    if overlaps:
        _loss_of(plain, x).backward()
    own = plain.second.weight.grad.clone()
    wrapped.finish_gradient_sync()
    left = wrapped.module.second.weight.grad
    return left is None if shards else not torch.equal(own, left)


def judge_wrapping(attempt: Attempt, options: dict | None = None, overlaps: bool = False) -> None:
    """Check every claim about how the wrapper behaves.

    Args:
        options: As in Training.
        overlaps: As in Training.

    Raises:
        Wrong: If a claim does not hold; the evidence names every such claim, unless `.module` is another module.
    """
    per_rank = [(seed, x) for seed, x, _ in Draw(attempt).per_rank]
    found = attempt.run(probe_wrapping, options or {}, overlaps, per_rank=per_rank)
    broken = {
        rank: [claim for claim, holds in result.items() if not holds]
        for rank, result in enumerate(found)
        if not all(result.values())
    }
    if any(KEEPS_MODULE in claims for claims in broken.values()):  # the other claims fail for this reason
        broken = {rank: [KEEPS_MODULE] for rank in broken}
    if broken:
        raise Wrong(
            {rank: f"expected, but not true: the wrapper {'; it '.join(its)}" for rank, its in broken.items()},
            "Hint: how does the module alone behave there, and which of your lines changes that?",
        )
