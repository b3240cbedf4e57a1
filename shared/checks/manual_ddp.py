"""Checks for chapter 02: data parallelism by hand.

The kernel draws the model's weights and the batch. Rank 0 alone gets the right weights (the others build
their own), and each rank only its own samples: right gradients can only come from the other ranks.
"""

import copy
from itertools import islice

import torch
import torch.distributed as dist

from shared import rankside, tap
from shared.checks import awkward
from shared.checks.compare import close, describe_calls, first_difference, judge_gradients, tolerance_of
from shared.checks.framework import Attempt, Exercise, Wrong

SAMPLES_PER_RANK = 6
SUBGROUPS = {3: [1, 2], 4: [1, 3]}  # without rank 0, smaller than the world, and not always neighbours

mean_over_ranks_ = Exercise("2.1", "mean_over_ranks_", optional=True)
broadcast_state = Exercise("2.2", "broadcast_state", optional=True)
average_gradients = Exercise("2.3", "average_gradients", optional=True)
ManualDDP = Exercise("2.4", "ManualDDP")
ShardedSampler = Exercise("2.5", "ShardedSampler", optional=True)
average_gradients_weighted = Exercise("2.6", "average_gradients_weighted", optional=True)


# -- probes: what runs on a rank, beside the student's code


def _device() -> torch.device:
    return torch.device(rankside.here.device)


def _subgroup(use: bool):
    """→ (group, am I in it)"""
    if not use:
        return None, True
    members = SUBGROUPS[dist.get_world_size()]
    return dist.new_group(members), dist.get_rank() in members


def _frozen_with_gradient(module) -> list[str]:
    return [name for name, p in module.named_parameters() if not p.requires_grad and p.grad is not None]


def probe_mean(mean_over_ranks_, in_subgroup: bool, values: torch.Tensor) -> dict:
    group, member = _subgroup(in_subgroup)
    given = values.to(_device())
    tensor = given[...]  # in place: whoever else looks at this memory sees it too
    with tap.listening() as calls:
        if member:
            mean_over_ranks_(tensor, group) if in_subgroup else mean_over_ranks_(tensor)
    return {"value": given.cpu().clone(), "calls": calls}


def probe_broadcast(broadcast_state, model: str, in_subgroup: bool, seed: int) -> dict:
    group, member = _subgroup(in_subgroup)
    module = awkward.build(model, seed).to(_device())
    flags = [(id(p), p.requires_grad) for p in module.parameters()]
    with tap.listening() as calls:
        if member:
            broadcast_state(module, group)
    kept = flags == [(id(p), p.requires_grad) for p in module.parameters()]
    return {"state": awkward.state_of(module), "calls": calls, "kept": kept}


def probe_average(average_gradients, model: str, in_subgroup: bool, seed: int, x, y, *extra) -> dict:
    """One backward, then the student's function. `extra` goes between the module and the group."""
    group, member = _subgroup(in_subgroup)
    module = awkward.build(model, seed).to(_device())
    if len(x):
        awkward.loss_of(module, x.to(_device()), y.to(_device())).backward()
    local = awkward.gradients_of(module)
    with tap.listening() as calls:
        if member:
            average_gradients(module, *extra, group)
    gradients = awkward.gradients_of(module)
    return {"gradients": gradients, "local": local, "calls": calls, "frozen": _frozen_with_gradient(module)}


def probe_training(
    wrapper, model: str, micro_batches: int, in_subgroup: bool, dtype: torch.dtype, seed: int, x, y
) -> dict:
    """Wrap, then three steps of SGD. → what the wrapper did to state and gradients, and when it communicated"""
    group, member = _subgroup(in_subgroup)
    module = awkward.build(model, seed, dtype).to(_device())
    if not member:
        return {"outside": True}
    with tap.listening() as building:
        wrapped = wrapper(module, group) if in_subgroup else wrapper(module)
    _refuse_library_wrappers(wrapped)
    found = {"start": awkward.state_of(module), "building": building, "steps": []}
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    x, y = x.to(_device(), dtype), y.to(_device(), dtype)
    for _ in range(3):
        optimizer.zero_grad()
        with tap.listening() as working:
            for part_x, part_y in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
                (awkward.loss_of(wrapped, part_x, part_y) / micro_batches).backward()
        local = awkward.gradients_of(module)
        with tap.listening() as finishing:
            wrapped.finish_gradient_sync()
        gradients = awkward.gradients_of(module)
        found["steps"].append({"local": local, "gradients": gradients, "working": working, "finishing": finishing})
        found["frozen"] = _frozen_with_gradient(module)
        optimizer.step()
        x = awkward.other_roads(x)
    found["end"] = awkward.state_of(module)
    return found


def _refuse_library_wrappers(wrapped) -> None:
    for part in [wrapped, *wrapped.modules()]:
        if any(base.__module__.startswith("torch.nn.parallel") for base in type(part).__mro__):
            raise AssertionError("torch's own DistributedDataParallel does the work here: write it by hand")


def probe_wrapping(wrapper, seed: int, x) -> dict:
    """Does the wrapper behave like the module that it wraps?"""
    module = awkward.build("Buffered", seed).to(_device())
    module.second.eval()
    module.first.bias.requires_grad_(False)

    def marks():
        return (
            [id(p) for p in module.parameters()],
            [p.requires_grad for p in module.parameters()],
            [m.training for m in module.modules()],
        )

    torch.rand(1)  # a seed that an earlier try has set may not hide the next
    marked, random_state = marks(), torch.get_rng_state()
    wrapped = wrapper(module)
    untouched, rng_left = marks() == marked, torch.equal(random_state, torch.get_rng_state())
    x = x.to(_device())
    seen = []
    module.register_forward_hook(lambda *_: seen.append(True))
    wrapped(x)
    hooked = bool(seen)
    copied = copy.deepcopy(wrapped)
    other = wrapper(awkward.build("Plain", seed).to(_device()))  # two wrappers may live at once
    y = torch.zeros(len(x), awkward.OUTPUTS, dtype=x.dtype, device=x.device)
    awkward.loss_of(copied, x, y).backward()
    before = copied.module.second.weight.grad.clone()
    copied.finish_gradient_sync()
    awkward.loss_of(other, x, y).backward()
    other.finish_gradient_sync()
    other.zero_grad()
    copy_syncs = not torch.equal(before, copied.module.second.weight.grad)
    original_left = all(p.grad is None for p in [*module.parameters(), *other.module.parameters()])
    return {
        "leaves parameters, requires_grad and train() as they were": untouched,
        "leaves the random numbers alone": rng_left,
        "calls the module, so that its hooks run": hooked,
        "keeps to its own module, where there are several wrappers": original_left,
        "forwards several positional arguments": torch.equal(wrapped(x, 2.0), module(x, 2.0)),
        "forwards keyword arguments alone": torch.equal(wrapped(x=x), module(x)),
        "is a module": isinstance(wrapped, torch.nn.Module),
        "keeps the module as .module": wrapped.module is module,
        "forwards positional arguments": torch.equal(wrapped(x), module(x)),
        "forwards keyword arguments": torch.equal(wrapped(x, times=2.0), module(x, times=2.0)),
        "has the module's parameters": {id(p) for p in wrapped.parameters()} == {id(p) for p in module.parameters()},
        "passes eval() on": not wrapped.eval().module.training,
        "holds the module's state in state_dict": len(wrapped.state_dict()) == len(module.state_dict()),
        "can be copied with deepcopy": copied.module is not module and copy_syncs,
    }


def probe_sampler(sampler_class, length: int, seed: int) -> dict:
    """Iterate over every rank's sampler, here: what they yield may depend on nothing but their arguments."""
    world_size = dist.get_world_size()
    random_state = torch.get_rng_state()

    def drawn(epoch: int = 0, **options) -> list[list]:
        samplers = [sampler_class(length, rank, world_size, **options) for rank in range(world_size)]
        for sampler in samplers:
            sampler.set_epoch(epoch)
        return [list(islice(sampler, 2 * length + world_size)) for sampler in samplers]

    def twice_at_once() -> bool:
        sampler = sampler_class(length, 0, world_size, seed=seed)
        return all(one == other for one, other in zip(sampler, sampler, strict=True))

    with tap.listening() as calls:
        unset = sampler_class(length, dist.get_rank(), world_size, seed=seed)
        early = len(sampler_class(length, 0, world_size))
        found = {
            "len before": early,
            "two iterators": twice_at_once(),
            "epochs": [drawn(epoch, seed=seed) for epoch in (1, 2, 3, 10)],
            "unset": list(islice(unset, 2 * length + world_size)),
            "len": len(unset),
            "epoch 0": drawn(0, seed=seed),
            "again": drawn(0, seed=seed),
            "epoch 1": drawn(1, seed=seed),
            "other seed": drawn(0, seed=seed + 100_003),
            "in order": drawn(shuffle=False),
        }
    return {**found, "calls": calls, "random numbers": torch.equal(random_state, torch.get_rng_state())}


def _alone(attempt: Attempt) -> str:
    members = SUBGROUPS[attempt.world_size]
    return f"called by ranks {members[0]} and {members[1]} alone, as the group {members}"


# -- drawing and the reference: what one process with all the data gets


class _Draw:
    """Weights' seeds and samples for one attempt; every rank's weights differ, and rank 0's are right."""

    def __init__(self, attempt: Attempt, samples_of_rank: list[int] | None = None):
        counts = samples_of_rank or [SAMPLES_PER_RANK] * attempt.world_size
        self.seeds = [attempt.draw_seed() for _ in counts]
        self.x, self.y = awkward.draw_batch(attempt.draw_seed(), sum(counts))
        self.shares = list(zip(self.x.split(counts), self.y.split(counts), strict=True))
        self.per_rank = [(seed, x, y) for seed, (x, y) in zip(self.seeds, self.shares, strict=True)]


def _one_process(model: str, seed: int, x, y, steps: int = 3, ended: dict | None = None) -> list[dict]:
    """→ per step: the gradients on the full batch"""
    module = awkward.build(model, seed)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    gradients = []
    for _ in range(steps):
        optimizer.zero_grad()
        awkward.loss_of(module, x, y).backward()
        gradients.append(awkward.gradients_of(module))
        optimizer.step()
        x = awkward.other_roads(x)
    if ended is not None:
        ended.update(awkward.state_of(module))
    return gradients


def _trainable_bytes(model: str) -> int:
    return sum(p.nbytes for p in awkward.build(model, 0).parameters() if p.requires_grad)


def _state_bytes(model: str) -> int:
    module = awkward.build(model, 0)
    return sum(t.nbytes for t in [*module.parameters(), *module.buffers()])


# -- 2.1


@mean_over_ranks_.check("values")
def mean_is_right(attempt: Attempt) -> None:
    for shape, layout in (
        ((3, 5), torch.contiguous_format),
        ((), torch.contiguous_format),
        ((2, 3, 2, 2), torch.channels_last),
    ):
        own = [
            torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(attempt.draw_seed())).to(
                memory_format=layout
            )
            for _ in range(attempt.world_size)
        ]
        found = attempt.run(probe_mean, False, per_rank=[(values,) for values in own])
        _judge_mean(found, torch.stack(own).mean(0), own, list(range(attempt.world_size)))


@mean_over_ranks_.check("group", world_sizes=(3, 4))
def mean_within_a_group(attempt: Attempt) -> None:
    own = [
        torch.full((4,), float(attempt.random.randint(1, 99)), dtype=torch.float64) for _ in range(attempt.world_size)
    ]
    found = attempt.run(probe_mean, True, per_rank=[(values,) for values in own], context=_alone(attempt))
    _judge_mean(
        found,
        torch.stack([own[rank] for rank in SUBGROUPS[attempt.world_size]]).mean(0),
        own,
        SUBGROUPS[attempt.world_size],
    )
    for rank in SUBGROUPS[attempt.world_size]:
        if [call.op for call in found[rank]["calls"]] != ["all_reduce"]:
            raise Wrong({rank: f"{describe_calls(found[rank]['calls'])}; expected 1 all_reduce"})


def _judge_mean(found, want, own, members) -> None:
    judge_gradients(
        {rank: {"the tensor": found[rank]["value"]} for rank in members},
        {"the tensor": want},
        {rank: {"the tensor": own[rank]} for rank in members},
        f"mean over ranks {', '.join(map(str, members))}",
    )


@mean_over_ranks_.check("wire", world_sizes=(2, 4))
def mean_costs_one_message(attempt: Attempt) -> None:
    own = [(torch.ones(100, dtype=torch.float32),)] * attempt.world_size
    for rank, result in enumerate(attempt.run(probe_mean, False, per_rank=own)):
        if [(call.op, call.payload_bytes) for call in result["calls"]] != [("all_reduce", 400)]:
            raise Wrong({rank: f"{describe_calls(result['calls'])}; expected 1 all_reduce of 400 bytes"})


# -- 2.2


@broadcast_state.check("values")
def everyone_has_the_first_ranks_state(attempt: Attempt) -> None:
    _judge_broadcast(attempt, False, list(range(attempt.world_size)))


@broadcast_state.check("group", world_sizes=(3, 4))
def the_groups_first_rank_counts(attempt: Attempt) -> None:
    _judge_broadcast(attempt, True, SUBGROUPS[attempt.world_size])


def _judge_broadcast(attempt: Attempt, in_subgroup: bool, members: list[int]) -> None:
    for model in ("Frozen", "Buffered", "Strided"):
        seeds = [attempt.draw_seed() for _ in range(attempt.world_size)]
        args, context = [(seed,) for seed in seeds], _alone(attempt) if in_subgroup else ""
        found = attempt.run(probe_broadcast, model, in_subgroup, per_rank=args, context=context)
        if not all(found[rank]["kept"] for rank in members):
            raise Wrong(f"{awkward.said(model)}: a parameter was replaced, or its requires_grad changed")
        want = awkward.state_of(awkward.build(model, seeds[members[0]]))
        _judge_state({rank: found[rank]["state"] for rank in members}, want, members[0])


def _judge_state(states: dict[int, dict], want: dict, source: int) -> None:
    wrong, names = {}, set()
    for rank, state in states.items():
        for name, expected in want.items():
            if not torch.equal(state[name], expected):
                wrong[rank] = f"{name}: {first_difference(state[name].double(), expected.double(), 0.0)}"
                names.add(name)
                break
    if wrong:
        raise Wrong(
            wrong, f"Expected: what rank {source}, the group's first, had. {_HINTS_ON_STATE.get(min(names), '')}"
        )


_HINTS_ON_STATE = {  # by the first tensor that is wrong, where that betrays what was left out
    "first.bias": "This parameter is frozen. Look at: does a forward use it?",
    "scale": "This is a buffer. Look at: what else than parameters does a module hold?",
    "shift": "This is a buffer that state_dict() leaves out. Look at: where does a module list all of them?",
}


@broadcast_state.check("wire", world_sizes=(2, 4))
def each_tensor_is_sent_once(attempt: Attempt) -> None:
    for model in ("Tied", "Buffered"):
        seeds = [(attempt.draw_seed(),) for _ in range(attempt.world_size)]
        for rank, result in enumerate(attempt.run(probe_broadcast, model, False, per_rank=seeds)):
            _judge_state_bytes(rank, result["calls"], model)


# -- 2.3


@average_gradients.check("values")
def gradients_are_those_of_the_full_batch(attempt: Attempt) -> None:
    for model in ("Plain", "Tied", "Frozen", "Unused", "Scalar", "Strided", "Mixed"):
        _judge_average(attempt, model)


@average_gradients.check("unused on one rank", world_sizes=(2, 3, 4))
def a_missing_gradient_counts_as_zeros(attempt: Attempt) -> None:
    _judge_average(attempt, "TwoRoads")


def _by_rank(found: list[dict], what: str, members: list[int] | None = None) -> dict[int, dict]:
    return {rank: found[rank][what] for rank in members or range(len(found))}


def _refuse_frozen_gradients(found: list[dict], model: str) -> None:
    wrong = {
        rank: f"{awkward.said(model)}: {result['frozen'][0]} is frozen and has a .grad now, not None"
        for rank, result in enumerate(found)
        if result["frozen"]
    }
    if wrong:
        raise Wrong(wrong, "Look at: what would weight decay do to it?")


def _judge_average(attempt: Attempt, model: str) -> None:
    draw = _Draw(attempt)
    same = [(draw.seeds[0], x, y) for x, y in draw.shares]
    found = attempt.run(probe_average, model, False, per_rank=same)
    want = _one_process(model, draw.seeds[0], draw.x, draw.y, steps=1)[0]
    judge_gradients(_by_rank(found, "gradients"), want, _by_rank(found, "local"), awkward.said(model))
    _refuse_frozen_gradients(found, model)


@average_gradients.check("group", world_sizes=(3, 4))
def only_the_group_takes_part(attempt: Attempt) -> None:
    draw = _Draw(attempt)
    same = [(draw.seeds[0], x, y) for x, y in draw.shares]
    found = attempt.run(probe_average, "TwoRoads", True, per_rank=same, context=_alone(attempt))
    x, y = (torch.cat([draw.shares[rank][part] for rank in SUBGROUPS[attempt.world_size]]) for part in (0, 1))
    want = _one_process("TwoRoads", draw.seeds[0], x, y, steps=1)[0]
    judge_gradients(
        _by_rank(found, "gradients", SUBGROUPS[attempt.world_size]),
        want,
        _by_rank(found, "local", SUBGROUPS[attempt.world_size]),
        _alone(attempt),
    )


@average_gradients.check("wire", world_sizes=(2, 4))
def each_gradient_travels_once(attempt: Attempt) -> None:
    for model in ("Tied", "Frozen"):
        draw = _Draw(attempt)
        found = attempt.run(probe_average, model, False, per_rank=draw.per_rank)
        for rank, result in enumerate(found):
            _judge_gradient_bytes(rank, result["calls"], model)


def _judge_gradient_bytes(rank: int, calls: list[tap.Call], model: str) -> None:
    want_bytes = _trainable_bytes(model)
    most = sum(p.requires_grad for p in awkward.build(model, 0).parameters())
    expected = f"at most {most} messages, {want_bytes} bytes, all by all_reduce"
    said = f"{awkward.said(model)}: {describe_calls(calls)}; expected {expected}"
    if sum(call.payload_bytes for call in calls) != want_bytes or len(calls) > most:
        raise Wrong({rank: said}, "Look at: is each trainable parameter's gradient sent once, and nothing else?")
    if any(not call.op.startswith("all_reduce") for call in calls):
        raise Wrong({rank: said}, "Look at: which single collective leaves the sum on every rank?")


# -- 2.4


@ManualDDP.check("same start")
def ranks_start_equal(attempt: Attempt) -> None:
    for model in ("Tied", "Buffered"):
        draw = _Draw(attempt)
        found = _train(attempt, model, draw)
        want = awkward.state_of(awkward.build(model, draw.seeds[0]))
        _judge_state({rank: result["start"] for rank, result in enumerate(found)}, want, 0)


@ManualDDP.check("values")
def training_equals_one_process(attempt: Attempt) -> None:
    for model in ("Plain", "Tied", "Frozen", "Unused", "Scalar", "Buffered", "Strided", "Mixed"):
        draw = _Draw(attempt)
        _judge_training(_train(attempt, model, draw), model, draw)


@ManualDDP.check("unused on one rank", world_sizes=(2, 3, 4))
def a_parameter_may_be_unused_somewhere(attempt: Attempt) -> None:
    draw = _Draw(attempt)
    _judge_training(_train(attempt, "TwoRoads", draw), "TwoRoads", draw)


@ManualDDP.check("accumulation", world_sizes=(2, 3))
def micro_batches_add_up(attempt: Attempt) -> None:
    draw = _Draw(attempt)
    _judge_training(_train(attempt, "TwoRoads", draw, micro_batches=3), "TwoRoads", draw)


@ManualDDP.check("wire", world_sizes=(2, 4))
def it_communicates_when_and_what_it_should(attempt: Attempt) -> None:
    for model, micro_batches in (("Tied", 1), ("Frozen", 2), ("Buffered", 1), ("Mixed", 1)):
        found = _train(attempt, model, _Draw(attempt), micro_batches)
        for rank, result in enumerate(found):
            _judge_state_bytes(rank, result["building"], model)
            for step in result["steps"]:
                if step["working"]:
                    early = f"{describe_calls(step['working'])} during forward and backward; expected none"
                    hint = "Look at: what may wait until finish_gradient_sync?"
                    raise Wrong({rank: f"{awkward.said(model)}: {early}"}, hint)
                _judge_gradient_bytes(rank, step["finishing"], model)


def _judge_state_bytes(rank: int, calls: list[tap.Call], model: str) -> None:
    if sum(call.payload_bytes for call in calls) != _state_bytes(model) or any(c.op != "broadcast" for c in calls):
        evidence = f"{describe_calls(calls)} to start equal; expected {_state_bytes(model)} bytes by broadcast"
        hint = "Look at: every parameter and every buffer, each once."
        raise Wrong({rank: f"{awkward.said(model)}: {evidence}"}, hint)


@ManualDDP.check("group", world_sizes=(3, 4))
def it_stays_inside_its_group(attempt: Attempt) -> None:
    for model in ("TwoRoads", "Buffered"):
        _judge_in_group(attempt, model)


def _judge_in_group(attempt: Attempt, model: str) -> None:
    draw = _Draw(attempt)
    found = attempt.run(probe_training, model, 1, True, torch.float64, per_rank=draw.per_rank, context=_alone(attempt))
    x, y = (torch.cat([draw.shares[rank][part] for rank in SUBGROUPS[attempt.world_size]]) for part in (0, 1))
    for step, expected in enumerate(_one_process(model, draw.seeds[SUBGROUPS[attempt.world_size][0]], x, y)):
        steps = {rank: found[rank]["steps"][step] for rank in SUBGROUPS[attempt.world_size]}
        judge_gradients(
            {rank: result["gradients"] for rank, result in steps.items()},
            expected,
            {rank: result["local"] for rank, result in steps.items()},
            f"{_alone(attempt)}, step {step + 1}",
        )


@ManualDDP.check("bf16", world_sizes=(2, 4))
def bf16_stays_bf16(attempt: Attempt) -> None:
    """The mean of N bf16 numbers, added in any order, is within N roundings of 2⁻⁸ of the largest."""
    draw = _Draw(attempt)
    found = attempt.run(probe_training, "TwoRoads", 1, False, torch.bfloat16, per_rank=draw.per_rank)
    half = sum(p.nbytes for p in awkward.build("TwoRoads", 0, torch.bfloat16).parameters())
    for name, step in [(name, step) for name in found[0]["start"] for step in range(3)]:
        own = [result["steps"][step]["local"][name] for result in found]
        if all(gradient is None for gradient in own):
            raise Wrong(f"after backward() the module's {name} has no gradient", "Look at: which module is trained?")
        local = torch.stack([torch.zeros_like(found[0]["start"][name]) if g is None else g for g in own]).double()
        for rank, result in enumerate(found):
            gradient = result["steps"][step]["gradients"][name]
            if sum(call.payload_bytes for call in result["steps"][step]["finishing"]) not in (half, 2 * half):
                raise Wrong(
                    {rank: f"{describe_calls(result['steps'][step]['finishing'])}; bf16 gradients are {half} bytes"}
                )
            if gradient.dtype != torch.bfloat16:
                raise Wrong({rank: f"the gradient of {name} became {gradient.dtype}; the parameter is bfloat16"})
            if not close(gradient, local.mean(0), attempt.world_size * 2**-8 * max(1.0, local.abs().max().item())):
                raise Wrong({rank: f"{name}: {first_difference(gradient, local.mean(0), 0.05)}"})


@ManualDDP.check("wraps", world_sizes=(2,))
def it_behaves_like_its_module(attempt: Attempt) -> None:
    draw = _Draw(attempt)
    found = attempt.run(probe_wrapping, per_rank=[(seed, x) for seed, x, _ in draw.per_rank])
    broken = {
        rank: "; ".join(f"not true: it {claim}" for claim, holds in result.items() if not holds)
        for rank, result in enumerate(found)
        if not all(result.values())
    }
    if broken:
        raise Wrong(broken)


def _train(attempt: Attempt, model: str, draw: _Draw, micro_batches: int = 1) -> list[dict]:
    return attempt.run(probe_training, model, micro_batches, False, torch.float64, per_rank=draw.per_rank)


def _judge_training(found: list[dict], model: str, draw: _Draw) -> None:
    ended: dict = {}
    for number, want in enumerate(_one_process(model, draw.seeds[0], draw.x, draw.y, ended=ended)):
        steps = [result["steps"][number] for result in found]
        context = f"{awkward.said(model)}, step {number + 1}"
        judge_gradients(_by_rank(steps, "gradients"), want, _by_rank(steps, "local"), context)
    _refuse_frozen_gradients(found, model)
    _judge_state({rank: result["end"] for rank, result in enumerate(found)}, found[0]["end"], 0)
    for name, want in ended.items():
        got = found[0]["end"][name]
        if not close(got.double(), want.double(), tolerance_of(ended.values())):
            difference = first_difference(got.double(), want.double())
            raise Wrong(f"{awkward.said(model)}: {name} after the last step, {difference}")


# -- 2.5


@ShardedSampler.check("every sample")
def every_sample_once_and_equal_shares(attempt: Attempt) -> None:
    size = attempt.world_size
    for length in (12, 7, size, 1):
        found = attempt.run(probe_sampler, length, attempt.draw_seed())
        share = -(-length // size)
        for rank, result in enumerate(found):
            _judge_shares(rank, result["epoch 0"], length, share)
            _judge_shares(rank, result["in order"], length, share)
            for later in result["epochs"]:
                _judge_shares(rank, later, length, share)
            if not result["two iterators"]:
                raise Wrong({rank: "two iterators of one sampler disturb each other"})
            if result["len"] != share or result["len before"] != share:
                raise Wrong({rank: f"len() says {result['len']} of {length} samples on {size} ranks; expected {share}"})
            if result["epoch 0"] != found[0]["epoch 0"] or result["unset"] != result["epoch 0"][rank]:
                said = "the same rank, seed and epoch gave another order here than on rank 0, or without set_epoch"
                raise Wrong({rank: said}, "Look at: what decides the order besides seed and epoch?")
            want = [[place % length for place in range(r, share * size, size)] for r in range(size)]
            if result["in order"] != want:
                said = f"shuffle=False, {length} samples on {size} ranks: rank r yields {result['in order']}"
                raise Wrong({rank: f"{said}; expected {want}"})


def _judge_shares(rank: int, shares: list[list], length: int, share: int) -> None:
    """Each share is `share` ints; together they are all samples, each as often as any other, give or take one."""
    drawn = [sample for own in shares for sample in own]
    strange = next((sample for sample in drawn if type(sample) is not int), None)
    if strange is not None:
        raise Wrong({rank: f"yields {type(strange).__name__}s; expected ints"})
    sizes = [len(own) for own in shares]
    if sizes != [share] * len(shares):
        hint = "Look at: what happens where the ranks do not divide the length?"
        raise Wrong({rank: f"ranks yield {sizes} of {length} samples; expected {share} each"}, hint)
    if set(drawn) != set(range(length)):
        missing = sorted(set(range(length)) - set(drawn))
        said = f"of {length} samples on {len(shares)} ranks, {missing} come on no rank; together: {drawn}"
        raise Wrong({rank: said}, "Look at: do all ranks shuffle alike before each takes its share?")
    most = -(-len(drawn) // length)
    often = sorted(sample for sample in set(drawn) if drawn.count(sample) > most)
    if often:
        raise Wrong(
            {rank: f"{often} come more than {most} times among {drawn}"}, "Look at: which samples fill the gap?"
        )


@ShardedSampler.check("epochs", world_sizes=(1, 3))
def epochs_and_seeds_decide_the_order(attempt: Attempt) -> None:
    for rank, result in enumerate(attempt.run(probe_sampler, 60, attempt.draw_seed())):
        if result["epoch 0"] != result["again"]:
            raise Wrong({rank: "the same epoch came out in two different orders"}, "Look at: what is the seed made of?")
        if result["epoch 0"] == result["epoch 1"]:
            raise Wrong({rank: "epoch 1 has the order of epoch 0"}, "Look at: what should set_epoch change?")
        orders = [result["epoch 0"], *result["epochs"]]
        if any(one == other for place, one in enumerate(orders) for other in orders[:place]):
            raise Wrong({rank: "two epochs have the same order"})
        if attempt.world_size > 1 and set(orders[0][0]) == set(orders[1][0]):
            raise Wrong(
                {rank: "rank 0 has the same samples in every epoch"}, "Look at: shuffled before or after sharing?"
            )
        if result["epoch 0"] == result["other seed"]:
            raise Wrong({rank: "another seed gives the same order"}, "Look at: is the seed used?")
        if result["epoch 0"] == result["in order"]:
            raise Wrong({rank: "the samples come in order: nothing was shuffled"})
        if not result["random numbers"]:
            said = "iterating moved torch's global random numbers: everybody's dropout depends on this sampler now"
            raise Wrong({rank: said}, "Look at: whose generator draws?")


@ShardedSampler.check("wire", world_sizes=(2,))
def the_sampler_needs_no_messages(attempt: Attempt) -> None:
    for rank, result in enumerate(attempt.run(probe_sampler, 12, attempt.draw_seed())):
        if result["calls"]:
            raise Wrong({rank: f"{describe_calls(result['calls'])}; expected none: a shared seed is enough"})


# -- 2.6


def _weighted(attempt: Attempt, model: str, counts: list[int], in_subgroup: bool) -> tuple[list[dict], dict, _Draw]:
    """→ what each rank came to, what one process would, the draw"""
    draw = _Draw(attempt, counts)
    members = SUBGROUPS[attempt.world_size] if in_subgroup else list(range(attempt.world_size))
    args = [(draw.seeds[0], x, y, len(x)) for x, y in draw.shares]
    context = f"{awkward.said(model)}, {' and '.join(map(str, counts))} samples"
    found = attempt.run(
        probe_average, model, in_subgroup, per_rank=args, context=_alone(attempt) if in_subgroup else ""
    )
    x, y = (torch.cat([draw.shares[rank][part] for rank in members]) for part in (0, 1))
    want = _one_process(model, draw.seeds[0], x, y, steps=1)[0]
    _refuse_plain_mean(found, want, members, context)
    judge_gradients(_by_rank(found, "gradients", members), want, _by_rank(found, "local", members), context)
    _refuse_frozen_gradients(found, model)
    return found, want, draw


def _refuse_plain_mean(found: list[dict], want: dict, members: list[int], context: str) -> None:
    name = "first.weight"  # trainable and used in every model
    local = [found[rank]["local"][name] for rank in members]
    plain = torch.stack([torch.zeros_like(want[name]) if own is None else own for own in local]).mean(0)
    got = found[members[0]]["gradients"][name]
    if got is not None and close(got, plain) and not close(plain, want[name]):
        raise Wrong(f"{context}: {name} is the plain mean", "Look at: how much does each sample count in it?")


@average_gradients_weighted.check("values")
def unequal_shares_weigh_by_their_samples(attempt: Attempt) -> None:
    for model in ("Frozen", "TwoRoads", "Strided", "Mixed"):
        counts = [attempt.random.randint(1, 9) for _ in range(attempt.world_size)]
        if attempt.world_size > 1 and model == "TwoRoads":
            counts[attempt.random.randrange(attempt.world_size)] = 0  # no samples, so no backward
        _weighted(attempt, model, counts, False)


@average_gradients_weighted.check("group", world_sizes=(3, 4))
def only_the_groups_samples_count(attempt: Attempt) -> None:
    _weighted(attempt, "Plain", [attempt.random.randint(1, 9) for _ in range(attempt.world_size)], True)


@average_gradients_weighted.check("wire", world_sizes=(2, 4))
def weighing_costs_one_small_message(attempt: Attempt) -> None:
    found, _, _ = _weighted(attempt, "Plain", [3] * attempt.world_size, False)
    want_bytes, most = _trainable_bytes("Plain"), 1 + len(list(awkward.build("Plain", 0).parameters()))
    for rank, result in enumerate(found):
        extra = sum(call.payload_bytes for call in result["calls"]) - want_bytes
        if not 0 <= extra <= 8 or len(result["calls"]) > most:
            said = f"{describe_calls(result['calls'])}; expected at most {most}, {want_bytes} bytes and one number's"
            raise Wrong({rank: said}, "Look at: what does a rank have to know of the others besides their gradients?")
