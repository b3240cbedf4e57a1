"""Judge ShardedBucket: gradients are held in full only until they are reduce-scattered."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import describe_calls, first_difference, nearly_equal, tolerance_of, total_of
from shared.checks.engine.failures import Wrong
from shared.checks.engine.late_ranks import PATIENCE_S, Rendezvous, launches_unasked, rehearsed
from shared.checks.engine.sharded.flat_layout import flat_parameter_type_of
from shared.checks.engine.sharded.wire import Flat, judge_rounds, reject_messages
from shared.checks.engine.subgroups import SUBGROUPS, called_alone, join_subgroup, members_of
from shared.checks.engine.training import Draw
from shared.checks.models import awkward
from shared.wire import instrumentation

ROUNDS = (False, True, False)  # whether the mean of the round before is still there


@dataclass(frozen=True)
class Reduced:
    """Describe whose gradients are reduced."""

    model: str
    in_subgroup: bool = False
    dtype: torch.dtype = torch.float64
    flat_dtype: torch.dtype | None = (
        None  # of the flat tensors that the layout allocates, if it is not that of the shard
    )

    def __str__(self) -> str:
        of_another = f", whose layout allocates flat tensors of {self.flat_dtype}" if self.flat_dtype else ""
        return f"{awkward.describe(self.model)}{of_another}"


def build(sharded_bucket, module: nn.Module, group=None):
    """Flatten a module's trainable parameters. Return the flat parameter, and a bucket of it."""
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    flat_parameter = flat_parameter_type_of(sharded_bucket)(trainable, group)
    return flat_parameter, sharded_bucket(flat_parameter)


def probe_rounds(sharded_bucket, how: Reduced, rank: int, seed: int, x, y) -> list[dict]:
    """Return for each round this rank's own gradients, the shard's, what was sent when, and which .grad is left."""
    group, member = join_subgroup(how.in_subgroup)
    if not member:
        return []
    module = awkward.build(how.model, seed, how.dtype).to(device_here())
    flat_parameter, bucket = build(sharded_bucket, module, group)
    if how.flat_dtype:
        flat_parameter.layout.new_flat = partial(flat_parameter.layout.new_flat, how.flat_dtype)
    parameters, shard = flat_parameter.layout.parameters, flat_parameter.shard
    order = torch.randperm(len(parameters), generator=torch.Generator().manual_seed(seed)).tolist()
    x, y = x.to(device_here(), how.dtype), y.to(device_here(), how.dtype)
    rounds = []
    for adds_up in ROUNDS:
        if not adds_up:
            shard.grad = None
        twin = awkward.twin_of(how.model, module)
        for each in (module, twin):
            awkward.loss_of(each, x, y).backward()
        found = {"own": awkward.gradients_of(twin), "calls": {}, "left": []}
        with instrumentation.listening() as found["calls"]["pack"]:
            for index in order:
                bucket.pack(index)
                if parameters[index].grad is not None:
                    found["left"].append(index)
        with instrumentation.listening() as found["calls"]["launch"]:
            bucket.launch()
        with instrumentation.listening() as found["calls"]["wait"]:
            bucket.wait()
        first = None if shard.grad is None else shard.grad.detach().cpu().clone()
        with instrumentation.listening() as found["calls"]["again"]:
            bucket.wait()
        again = None if shard.grad is None else shard.grad.cpu()
        found |= {"same": first is None or (again is not None and torch.equal(first, again)), "grad": first}
        rounds.append(found)
        x = awkward.other_branches(x)
    return rounds


def _try(attempt: Attempt, how: Reduced) -> dict[int, list[dict]]:
    members = members_of(attempt, how.in_subgroup)
    per_rank = [(rank, *share) for rank, share in enumerate(Draw(attempt).per_rank)]
    found = attempt.run(probe_rounds, how, per_rank=per_rank, context=_context(attempt, how))
    return {rank: found[rank] for rank in members}


def _context(attempt: Attempt, how: Reduced) -> str:
    return called_alone(attempt) if how.in_subgroup else str(how)


def a_plain_shard_gets_its_mean(attempt: Attempt) -> None:
    _judge_means(attempt, Reduced("Plain"))


def each_shard_gets_its_mean(attempt: Attempt) -> None:
    tried = [Reduced("Tied"), Reduced("Frozen"), Reduced("TwoBranches"), Reduced("Scalar"), Reduced("Unused")]
    tried = tried if attempt.world_size == 2 else attempt.random.sample(tried, 2)
    tried += [Reduced("TwoBranches", in_subgroup=True)] if attempt.world_size in SUBGROUPS else []
    mixed = Reduced("Plain", dtype=torch.float32, flat_dtype=torch.float64)
    for how in [Reduced("Plain"), *tried, mixed]:
        _judge_means(attempt, how)


def _judge_means(attempt: Attempt, how: Reduced) -> None:
    found, means = _try(attempt, how), []
    for number, adds_up in enumerate(ROUNDS):
        rounds = {rank: each[number] for rank, each in found.items()}
        flats = {rank: _flat(each["own"], how, len(found)) for rank, each in rounds.items()}
        means.append((total_of(flats.values()) / len(flats)).view(len(flats), -1))
        expected = means[-2] + means[-1] if adds_up else means[-1]
        for index, (rank, each) in enumerate(rounds.items()):
            _judge_left(rank, each, how)
            context = f"{_context(attempt, how)}, backward {number + 1}{', added to the one before' if adds_up else ''}"
            if each["grad"] is None or not nearly_equal(
                each["grad"].flatten(), expected[index], tolerance_of([expected])
            ):
                was = "is None"
                if each["grad"] is not None:
                    was = f"is wrong: {first_difference(each['grad'].flatten(), expected[index])}"
                cause = _cause(each["grad"], expected, index, means, adds_up, attempt.world_size)
                raise Wrong({rank: f"{context}: shard.grad {was}"}, cause)
            if each["calls"]["again"] or not each["same"]:
                again = each["calls"]["again"]
                does = f"sends {describe_calls(again)}" if again else "changes shard.grad"
                evidence = f"a second wait() {does}; expected it to do nothing"
                raise Wrong({rank: evidence}, "Hint: how does wait() know whether a collective is in flight?")


def _judge_left(rank: int, each: dict, how: Reduced) -> None:
    if each["left"]:
        evidence = f"{how}: after pack({each['left'][0]}), .grad still holds a tensor; expected None"
        raise Wrong({rank: evidence}, "The gradient is in the flat tensor now. Hint: what else still refers to it?")


def _flat(gradients: dict, how: Reduced, size: int) -> torch.Tensor:
    """Concatenate gradients, padded; None counts as zeros."""
    parameters = [(name, p) for name, p in awkward.build(how.model, 0).named_parameters() if p.requires_grad]
    known = [(gradients[name], p) for name, p in parameters]
    flat = torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in known]).detach()
    return torch.cat([flat, flat.new_zeros(-len(flat) % size)])


def cause_of_scale(found: torch.Tensor, expected: torch.Tensor, size: int) -> str:
    """Return the cause if all elements are too large or too small by the number of ranks, or else ""."""
    if size > 1 and expected.any() and nearly_equal(found, expected * size):
        return f"It is exactly {size} times too large. Hint: is it the sum or the mean?"
    if size > 1 and expected.any() and nearly_equal(found, expected / size):
        return f"It is exactly {size} times too small. Hint: how many times is it divided?"
    return ""


def _cause(found, expected: torch.Tensor, index: int, means: list[torch.Tensor], adds_up: bool, world_size: int) -> str:
    size = len(expected)
    if found is None or found.numel() != expected[index].numel():
        return "Hint: what does wait() do with the shard that it receives?"
    found = found.flatten()
    if adds_up and nearly_equal(found, means[-1][index]):
        return "It is only the mean of the last backward. Hint: what did shard.grad contain before wait()?"
    if cause := cause_of_scale(found, expected[index], size):
        return cause
    if size < world_size and nearly_equal(found, expected[index] * size / world_size):
        return f"It is the sum over {size} ranks, divided by {world_size}. Hint: over how many ranks is the mean?"
    if adds_up and size > 1 and nearly_equal(found, means[-2][index] / size + means[-1][index]):
        return "Hint: how many times is the earlier mean divided?"
    return "Hint: where is each gradient in the flat tensor that is sent, and what is sent for a gradient of None?"


def one_reduce_scatter_per_launch(attempt: Attempt) -> None:
    for model in ("Tied", "Frozen"):
        numel = sum(p.numel() for p in awkward.build(model, 0).parameters() if p.requires_grad)
        found = _try(attempt, Reduced(model))
        for number in range(len(ROUNDS)):
            calls = {rank: each[number]["calls"] for rank, each in found.items()}
            reject_messages(
                {rank: each["pack"] for rank, each in calls.items()}, f"{awkward.describe(model)}, in pack()"
            )
            for rank, each in calls.items():
                if attempt.world_size > 1 and not each["launch"]:
                    hint = (
                        "Then no communication can overlap with backward. Hint: what can start before wait() is called?"
                    )
                    raise Wrong({rank: "launch() sends nothing"}, hint)
            both = {rank: each["launch"] + each["wait"] for rank, each in calls.items()}
            judge_rounds(both, [Flat(numel, 8)], 1, f"{awkward.describe(model)}, launch() and wait()")


class PreviousBucket:  # Students see this name in error messages.
    """Stand in for the previous bucket, and log how many messages had been sent at each wait()."""

    def __init__(self, sent: list):
        self.sent, self.waited_at, self.in_flight = sent, [], sent  # a handle, as long as it is not waited for

    def wait(self) -> None:
        self.waited_at.append(len(self.sent))
        self.in_flight = None


def probe_previous(sharded_bucket, seed: int, x, y) -> dict[str, list[int]]:
    """Return by moment how many messages this bucket had sent whenever it waited for the previous one."""
    module = awkward.build("Plain", seed).to(device_here())
    flat_parameter, bucket = build(sharded_bucket, module)
    awkward.loss_of(module, x.to(device_here()), y.to(device_here())).backward()
    with instrumentation.listening() as calls:
        bucket.previous = previous = PreviousBucket(calls)
        for index in range(len(flat_parameter.layout.parameters)):
            bucket.pack(index)
        packed = list(previous.waited_at)
        bucket.launch()
        launched = list(previous.waited_at)
        bucket.wait()
    return {"packed": packed, "launched": launched}


def the_previous_bucket_is_waited_for(attempt: Attempt) -> None:
    for rank, found in enumerate(attempt.run(probe_previous, per_rank=Draw(attempt).per_rank)):
        if found["packed"]:
            hint = "Backward stops while pack() waits. Hint: when must the previous bucket be complete?"
            raise Wrong({rank: "pack() waits for the previous bucket"}, hint)
        if not found["launched"]:
            hint = (
                "Hint: how many flat tensors are alive at the same time if you wait for every bucket only at the end?"
            )
            raise Wrong({rank: "launch() does not call previous.wait()"}, hint)
        if found["launched"][0]:
            evidence = f"{found['launched'][0]} messages were sent before launch() called previous.wait()"
            raise Wrong(
                {rank: evidence},
                "Then two buckets are in flight at the same time. Hint: which of the two calls must come first?",
            )


@rehearsed
def probe_late(sharded_bucket, token: int, late: int, rank: int, seed: int, x, y) -> list[int]:
    """Let one rank launch late. Return, on that rank, the ranks whose launch() had not returned by then."""
    module = awkward.build("Plain", seed).to(device_here())
    flat_parameter, bucket = build(sharded_bucket, module)
    meeting, missing = Rendezvous(f"bucket{token}"), []
    awkward.loss_of(module, x.to(device_here()), y.to(device_here())).backward()
    for index in range(len(flat_parameter.layout.parameters)):
        bucket.pack(index)
    with launches_unasked():
        if rank == late:
            missing = meeting.missing()
        bucket.launch()
        if rank != late:
            meeting.arrive()
        bucket.wait()
    return missing


def launch_returns_at_once(attempt: Attempt) -> None:
    late, token = attempt.random.randrange(attempt.world_size), attempt.draw_seed()
    per_rank = [(rank, *share) for rank, share in enumerate(Draw(attempt).per_rank)]
    if missing := attempt.run(probe_late, token, late, per_rank=per_rank)[late]:
        evidence = f"launch() did not return within {PATIENCE_S:g} s, while rank {late} had launched nothing"
        hint = "Backward stops in the meantime. Hint: which bucket does launch() wait for?"
        raise Wrong(dict.fromkeys(missing, evidence), hint)
