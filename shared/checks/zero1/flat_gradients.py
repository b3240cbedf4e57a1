"""Judge FlatGradients: gradients are slices of one flat tensor, and each rank gets its shard of their mean."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import (
    MOST_DIVISOR,
    describe_calls,
    first_difference,
    nearly_equal,
    tolerance_of,
    total_of,
)
from shared.checks.engine.failures import Wrong
from shared.checks.engine.footprint import living_bytes
from shared.checks.engine.sharded.flat_layout import flat_parameter_type_of
from shared.checks.engine.sharded.wire import Flat, judge_rounds, reject_messages
from shared.checks.engine.subgroups import SUBGROUPS, called_alone, join_subgroup, members_of
from shared.checks.engine.training import Draw
from shared.checks.models import awkward
from shared.wire import instrumentation

WAYS = (
    "as reset() left them",
    "after model.zero_grad()",
    "after model.zero_grad(set_to_none=False)",
    "all None since backward()",
)
SKIPPED = "after reduce() and model.zero_grad(), without reset()"
_HINT_ON_STALE = "There are new gradients. Hint: on which two things does it depend whether reduce() returns at once?"
_HINT_ON_LEFT_OVERS = "Hint: what does a gradient's view still contain when reduce() puts the new gradient into it?"
_HINT_ON_NONE = "Hint: what does the flat tensor contain for a parameter that has no gradient this time?"
_HINT_ON_LEFT = "Hint: what does a gradient's view still contain when .grad is None?"


@dataclass(frozen=True)
class Gradients:
    """Describe whose gradients are averaged.

    Attributes:
        model: The model.
        ways: For each round, what happens to the gradients before reduce().
        in_subgroup: Whether only some ranks take part.
    """

    model: str
    ways: tuple[str, ...] = WAYS
    in_subgroup: bool = False

    def __str__(self) -> str:
        return awkward.describe(self.model)


def _build(flat_gradients, how: Gradients, seed: int, group):
    module = awkward.build(how.model, seed).to(device_here())
    parameters = [p for p in module.parameters() if p.requires_grad]
    flat_parameter = flat_parameter_type_of(flat_gradients)(parameters, group)
    return module, parameters, flat_parameter, flat_gradients(flat_parameter)


def probe_gradients(flat_gradients, how: Gradients, seed: int, x, y) -> list[dict]:
    """Return for each round this rank's own gradients, where .grad is stored, the mean, and what was sent."""
    group, member = join_subgroup(how.in_subgroup)
    if not member:
        return []
    module, parameters, flat_parameter, gradients = _build(flat_gradients, how, seed, group)
    x, y, rounds = x.to(device_here()), y.to(device_here()), []
    for number, way in enumerate(how.ways):
        if number and way != SKIPPED:
            gradients.reset()
        found = {
            "addresses": _addresses(parameters),
            "zeros": not any(bool(p.grad.any()) for p in parameters if p.grad is not None),
        }
        found["dropped"] = flat_parameter.shard.grad is None
        if way in (*WAYS[1:3], SKIPPED):
            module.zero_grad(set_to_none=way != WAYS[2])
        twin = awkward.twin_of(how.model, module)
        twin.zero_grad()
        with instrumentation.listening() as early:
            for each in (module, twin):
                awkward.loss_of(each, x, y).backward()
        for each in (module, twin) if way == WAYS[3] else ():
            each.zero_grad()
        with instrumentation.listening() as calls:
            gradients.reduce()
        found["kept"] = _addresses(parameters)
        mean = flat_parameter.shard.grad.detach().cpu().clone()
        again = [_reduce_again(gradients, flat_parameter, mean, "a second reduce()")]
        if len(parameters) > 1:  # so that another .grad is still a view
            parameters[0].grad = None
            what = "after one .grad was set to None, another reduce()"
            again.append(_reduce_again(gradients, flat_parameter, mean, what))
        found |= {"early": early, "calls": calls, "again": again, "mean": mean, "own": awkward.gradients_of(twin)}
        rounds.append(found)
        x = awkward.other_branches(x)
    return rounds


def _reduce_again(gradients, flat_parameter, mean: torch.Tensor, what: str) -> dict:
    """Call reduce(), which must do nothing. Returns what it sent, and whether the mean is still the same."""
    with instrumentation.listening() as calls:
        gradients.reduce()
    found = flat_parameter.shard.grad
    return {"what": what, "calls": calls, "same": found is not None and torch.equal(found.cpu(), mean)}


def _addresses(parameters: list) -> list[tuple[int, int]]:
    """Return for each .grad its storage and the element at which it begins, or (0, −1) for None."""
    grads = [p.grad for p in parameters]
    return [(0, -1) if g is None else (g.untyped_storage().data_ptr(), g.storage_offset()) for g in grads]


def _try(attempt: Attempt, how: Gradients) -> dict[int, list[dict]]:
    members = members_of(attempt, how.in_subgroup)
    context = called_alone(attempt) if how.in_subgroup else str(how)
    found = attempt.run(probe_gradients, how, per_rank=Draw(attempt).per_rank, context=context)
    return {rank: found[rank] for rank in members}


def gradients_are_slices_of_zeros(attempt: Attempt) -> None:
    for model in ("Tied", "Frozen", "Scalar"):
        module = awkward.build(model, 0)
        sizes = [p.numel() for p in module.parameters() if p.requires_grad]
        for rank, rounds in _try(attempt, Gradients(model)).items():
            for number, found in enumerate(rounds, 1):
                context = f"{awkward.describe(model)}, after {'reset()' if number > 1 else 'the constructor'}"
                storage, offset = found["addresses"][0]
                expected = [(storage, offset + sum(sizes[:index])) for index in range(len(sizes))]
                if found["addresses"] != expected:
                    hint = (
                        "reduce() would have to copy them. Hint: how can a parameter's .grad be a view of the "
                        "flat tensor?"
                    )
                    raise Wrong({rank: f"{context}: the .grad tensors are not adjacent slices of one tensor"}, hint)
                if not found["zeros"]:
                    hint = "backward() adds to what .grad holds. Hint: which tensor does reset() fill with zeros?"
                    raise Wrong({rank: f"{context}: the gradients are not zero"}, hint)
                if not found["dropped"]:
                    hint = "Hint: what would the next reduce() do with it?"
                    raise Wrong({rank: f"{context}: shard.grad still holds the last mean"}, hint)


def a_plain_model_has_its_mean(attempt: Attempt) -> None:
    """Judge a plain loop only: reset(), backward(), reduce()."""
    how = Gradients("Plain", WAYS[:1])
    _judge_means(how, _try(attempt, how))


def each_rank_gets_its_shard_of_the_mean(attempt: Attempt) -> None:
    models = ("TwoBranches", "Unused", "Scalar")
    ways = (*WAYS, SKIPPED, SKIPPED)  # the first time the old gradients are zeros, the second time they are not
    tried = [Gradients(model, ways) for model in (models if attempt.world_size == 2 else models[:1])]
    if attempt.world_size in SUBGROUPS:
        tried.append(Gradients("TwoBranches", in_subgroup=True))
    for how in tried:
        found = _try(attempt, how)
        _judge_means(how, found)
        _judge_views(how, found)
        _judge_second_calls(found)


def _judge_means(how: Gradients, found: dict[int, list[dict]]) -> None:
    for number, way in enumerate(how.ways):
        rounds = {rank: each[number] for rank, each in found.items()}
        own = {rank: _flat(each["own"], how.model, len(found)) for rank, each in rounds.items()}
        mean = (total_of(own.values()) / len(own)).view(len(own), -1)
        for index, (rank, each) in enumerate(rounds.items()):
            if not nearly_equal(each["mean"].flatten(), mean[index], tolerance_of([mean])):
                difference = first_difference(each["mean"].flatten(), mean[index])
                evidence = f"{how}, gradients {way}, round {number + 1}: shard.grad is wrong: {difference}"
                hint = _cause(each["mean"].flatten(), mean, index, own[rank], way)
                if way == SKIPPED:  # the earlier rounds were right
                    stale = torch.equal(each["mean"], found[rank][number - 1]["mean"])
                    hint = _HINT_ON_STALE if stale else _HINT_ON_LEFT_OVERS
                raise Wrong({rank: evidence}, hint)


def _judge_views(how: Gradients, found: dict[int, list[dict]]) -> None:
    """Judge where each .grad is stored after reduce(). The constructor has made all of them views."""
    for rank, rounds in found.items():
        views = rounds[0]["addresses"]
        for number, (way, each) in enumerate(zip(how.ways, rounds, strict=True), 1):
            wrong = sum(kept != view for kept, view in zip(each["kept"], views, strict=True))
            if wrong:
                evidence = (
                    f"{how}, gradients {way}, round {number}: after reduce(), {wrong} of {len(views)} "
                    "parameters have a .grad that is not their view"
                )
                hint = "Hint: what does .grad refer to once its gradient has been copied into the view?"
                raise Wrong({rank: evidence}, hint)


def _judge_second_calls(found: dict[int, list[dict]]) -> None:
    for rank, rounds in found.items():
        for again in [again for each in rounds for again in each["again"]]:
            if again["calls"] or not again["same"]:
                does = f"sends {describe_calls(again['calls'])}" if again["calls"] else "changes shard.grad"
                evidence = f"{again['what']} {does}; expected it to do nothing"
                hint = (
                    "The flat tensor no longer holds gradients by then. Hint: how can reduce() know that "
                    "it was already called?"
                )
                raise Wrong({rank: evidence}, hint)


def _flat(gradients: dict, model: str, size: int) -> torch.Tensor:
    """Concatenate gradients, padded; None counts as zeros."""
    parameters = dict(awkward.build(model, 0).named_parameters())
    known = [(gradients[name], p) for name, p in parameters.items() if p.requires_grad]
    flat = torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in known])
    return torch.cat([flat, flat.new_zeros(-len(flat) % size)])


def _cause(found: torch.Tensor, mean: torch.Tensor, index: int, own: torch.Tensor, way: str) -> str:
    size = len(mean)
    if found.shape != mean[index].shape:
        return "Hint: which shard of the flat gradients belongs to this rank?"
    if size > 1 and nearly_equal(found, mean[index] * size):
        return f"It is exactly {size} times too large. Hint: is it the sum or the mean?"
    if size > 1 and nearly_equal(found, mean[index] / size):
        return f"It is exactly {size} times too small. Hint: how many times is it divided?"
    divisor = next((n for n in range(2, MOST_DIVISOR + 1) if nearly_equal(found, mean[index] * size / n)), None)
    if divisor and mean[index].count_nonzero() > 1:  # a single element is a multiple of any other
        return f"It is the sum over {size} ranks, divided by {divisor}. Hint: over how many ranks is the mean?"
    other = next((rank for rank in range(size) if nearly_equal(found, mean[rank])), None)
    if other is not None:
        return f"It is the shard of the group's rank {other}. Hint: which shard belongs to which rank?"
    if nearly_equal(found, own.view(size, -1)[index]):
        return "It is this rank's own gradient. Hint: which tensor holds the sum?"
    if not found.any():
        return "It is all zeros. Hint: which tensor did backward() write into?"
    if way == WAYS[3]:
        return _HINT_ON_LEFT
    return _HINT_ON_NONE if way != WAYS[0] else "Hint: at which offset is each gradient in the tensor that is sent?"


def each_gradient_is_sent_once(attempt: Attempt) -> None:
    for model in ("Tied", "Frozen"):
        module = awkward.build(model, 0)
        numel = sum(p.numel() for p in module.parameters() if p.requires_grad)
        found = _try(attempt, Gradients(model))
        for number in range(len(WAYS)):
            reject_messages(
                {rank: each[number]["early"] for rank, each in found.items()},
                f"{awkward.describe(model)}, before reduce()",
            )
            calls = {rank: each[number]["calls"] for rank, each in found.items()}
            judge_rounds(calls, [Flat(numel, 8)], 1, f"{awkward.describe(model)}, reduce()")


def probe_late(flat_gradients, gone: bool, seed: int, x, y) -> dict:
    """Run backward() after reduce(), and reduce() again. Returns the error that this raises.

    Args:
        flat_gradients: The student's class.
        gone: Whether a .grad is set to None before, so that only this gradient is outside the flat tensor.
        seed: The seed of the model.
        x: The inputs.
        y: The targets.
    """
    module, parameters, flat_parameter, gradients = _build(flat_gradients, Gradients("Plain"), seed, None)
    x, y = x.to(device_here()), y.to(device_here())
    awkward.loss_of(module, x, y).backward()
    gradients.reduce()
    with torch.no_grad():
        flat_parameter.shard.grad *= 0.5  # as clipping does
    mean = flat_parameter.shard.grad.detach().cpu().clone()
    again = _reduce_again(gradients, flat_parameter, mean, "after shard.grad was scaled, another reduce()")
    if gone:
        parameters[0].grad = None
        parameters[0].sum().backward()
    else:
        awkward.loss_of(module, x, y).backward()
    try:
        gradients.reduce()
    except Exception as error:
        return {"again": [again], "kind": type(error).__name__, "message": str(error)}
    return {"again": [again], "kind": None}


def later_gradients_are_rejected(attempt: Attempt) -> None:
    """A gradient that is added to what reduce() has left must not be lost without an error."""
    for gone in (False, True):
        found = attempt.run(probe_late, gone, per_rank=Draw(attempt).per_rank)
        _judge_second_calls({rank: [each] for rank, each in enumerate(found)})
        for rank, each in enumerate(found):
            if each["kind"] != "RuntimeError":
                raised = f"{each['kind']}({each['message'][:80]!r})" if each["kind"] else "no error"
                when = ", one .grad was set to None" * gone
                evidence = f"backward(), reduce(){when}, backward(), reduce() raised {raised}; expected a RuntimeError"
                hint = (
                    "The gradients of the second backward() are lost. Hint: are the given lines at the beginning and "
                    "at the end of reduce() still there?"
                )
                raise Wrong({rank: evidence}, hint)


def probe_footprint(flat_gradients, way: str, seed: int, x, y) -> int:
    """Return the bytes that live besides the parameters, once the gradients are reduced."""
    how = Gradients("Large")
    before_bytes = living_bytes()
    module, _, flat_parameter, gradients = _build(flat_gradients, how, seed, None)
    x, y = x.to(device_here()), y.to(device_here())
    for _ in range(2):
        gradients.reset()
        if way == WAYS[1]:
            module.zero_grad()
        awkward.loss_of(module, x, y).backward()
        gradients.reduce()
    dist.barrier()
    return living_bytes() - before_bytes - flat_parameter.flat_param.nbytes


def gradients_are_held_once(attempt: Attempt) -> None:
    numel = sum(p.numel() for p in awkward.build("Large", 0).parameters())
    most = 8 * numel * (1 + 1 / attempt.world_size)  # The mean may have memory of its own.
    for way in WAYS[:2]:
        found = attempt.run(probe_footprint, way, per_rank=Draw(attempt).per_rank)
        for rank, held_bytes in enumerate(found):
            if held_bytes > 1.01 * most:
                evidence = (
                    f"gradients {way}: {held_bytes:,} bytes are held for gradients of {8 * numel:,} bytes; "
                    f"expected at most {most:,.0f}"
                )
                hint = "Hint: once a gradient is copied into its view, what does .grad still refer to?"
                raise Wrong({rank: evidence}, hint)
