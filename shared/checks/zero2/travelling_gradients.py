"""Judging TravellingGradients: gradients that are whole only until their sum is sent."""

from dataclasses import dataclass

import torch
from torch import nn

from shared.checks.engine.candidate import device_here, earlier_piece
from shared.checks.engine.compare import close, describe_calls, first_difference, tolerance_of
from shared.checks.engine.framework import Attempt, Wrong
from shared.checks.engine.latecomers import PATIENCE_S, Meeting, launches_unasked
from shared.checks.engine.sharded.wire import Flat, judge_rounds, refuse_messages
from shared.checks.engine.subgroups import SUBGROUPS, called_alone, join_subgroup, members_of
from shared.checks.engine.training import Draw
from shared.checks.models import awkward
from shared.wire import instrumentation

ROUNDS = (False, True, False)  # is the mean of the round before still there?


@dataclass(frozen=True)
class Sent:
    """Whose gradients are sent."""

    model: str
    in_subgroup: bool = False
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        return awkward.said(self.model)


def settle(module: nn.Module, group=None):
    """Lay a module's trainable parameters out, as lab 07 does."""
    return earlier_piece("zero1", "FlatParameters")([p for p in module.parameters() if p.requires_grad], group)


def probe_rounds(travelling, how: Sent, rank: int, seed: int, x, y) -> list[dict]:
    """→ per round: this rank's own gradients, the shard's, what was sent when, and which .grad is left"""
    group, member = join_subgroup(how.in_subgroup)
    if not member:
        return []
    module = awkward.build(how.model, seed, how.dtype).to(device_here())
    home = settle(module, group)
    bucket, rounds = travelling(home), []
    order = torch.randperm(len(home.parameters), generator=torch.Generator().manual_seed(seed)).tolist()
    x, y = x.to(device_here(), how.dtype), y.to(device_here(), how.dtype)
    for goes_on in ROUNDS:
        if not goes_on:
            home.shard.grad = None
        twin = awkward.twin_of(how.model, module)
        for each in (module, twin):
            awkward.loss_of(each, x, y).backward()
        found = {"own": awkward.gradients_of(twin), "calls": {}, "left": []}
        with instrumentation.listening() as found["calls"]["pack"]:
            for place in order:
                bucket.pack(place)
                if home.parameters[place].grad is not None:
                    found["left"].append(place)
        with instrumentation.listening() as found["calls"]["launch"]:
            bucket.launch()
        with instrumentation.listening() as found["calls"]["wait"]:
            bucket.wait()
        first = None if home.shard.grad is None else home.shard.grad.detach().cpu().clone()
        with instrumentation.listening() as found["calls"]["again"]:
            bucket.wait()
        found |= {"same": first is None or torch.equal(first, home.shard.grad.cpu()), "grad": first}
        rounds.append(found)
        x = awkward.other_roads(x)
    return rounds


def _try(attempt: Attempt, how: Sent) -> dict[int, list[dict]]:
    members = members_of(attempt, how.in_subgroup)
    context = called_alone(attempt) if how.in_subgroup else str(how)
    per_rank = [(rank, *share) for rank, share in enumerate(Draw(attempt).per_rank)]
    found = attempt.run(probe_rounds, how, per_rank=per_rank, context=context)
    return {rank: found[rank] for rank in members}


def each_shard_gets_its_part_of_the_mean(attempt: Attempt) -> None:
    tried = [Sent("Tied"), Sent("Frozen"), Sent("TwoRoads"), Sent("Strided"), Sent("Unused")]
    tried = tried if attempt.world_size == 2 else attempt.random.sample(tried, 2)
    tried += [Sent("TwoRoads", in_subgroup=True)] if attempt.world_size in SUBGROUPS else []
    for how in tried:
        found, means = _try(attempt, how), []
        for number, goes_on in enumerate(ROUNDS):
            rounds = {rank: each[number] for rank, each in found.items()}
            flats = {rank: _flat(each["own"], how, len(found)) for rank, each in rounds.items()}
            means.append((sum(flats.values()) / len(flats)).view(len(flats), -1))
            want = means[-2] + means[-1] if goes_on else means[-1]
            for place, (rank, each) in enumerate(rounds.items()):
                _judge_left(rank, each, how)
                said = f"{how}, backward {number + 1}, {'added to' if goes_on else 'without'} the one before"
                if each["grad"] is None or not close(each["grad"].flatten(), want[place], tolerance_of([want])):
                    was = "is None" if each["grad"] is None else first_difference(each["grad"].flatten(), want[place])
                    raise Wrong({rank: f"{said}: shard.grad, {was}"}, _cause(each["grad"], want, place, means, goes_on))
                if each["calls"]["again"] or not each["same"]:
                    evidence = f"a second wait() changes shard.grad, or sends: {describe_calls(each['calls']['again'])}"
                    raise Wrong({rank: evidence}, "Look at: how does wait() know that something is under way?")


def _judge_left(rank: int, each: dict, how: Sent) -> None:
    if each["left"]:
        said = f"{how}: after pack({each['left'][0]}) there is still a .grad"
        raise Wrong({rank: said}, "Look at: the gradient is in the flat tensor now. Who else holds it?")


def _flat(gradients: dict, how: Sent, size: int) -> torch.Tensor:
    """Put gradients side by side; None counts as zeros."""
    parameters = [(name, p) for name, p in awkward.build(how.model, 0).named_parameters() if p.requires_grad]
    known = [(gradients[name], p) for name, p in parameters]
    flat = torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in known]).detach()
    return torch.cat([flat, flat.new_zeros(-len(flat) % size)])


def _cause(found, want: torch.Tensor, place: int, means: list[torch.Tensor], goes_on: bool) -> str:
    size = len(want)
    if found is None or found.numel() != want[place].numel():
        return "Look at: what becomes of what has arrived?"
    found = found.flatten()
    if goes_on and close(found, means[-1][place]):
        return "It is the last backward's alone. Look at: what is in shard.grad before?"
    if size > 1 and close(found, want[place] * size):
        return f"It is exactly {size} times too large. Look at: summed, or averaged?"
    if size > 1 and close(found, want[place] / size):
        return f"It is exactly {size} times too small. Look at: how often is it divided?"
    if goes_on and size > 1 and close(found, means[-2][place] / size + means[-1][place]):
        return "Look at: how often is what was there before divided?"
    return "Look at: which gradient lies where in what is sent, and what is sent where there is None?"


def one_message_per_launch(attempt: Attempt) -> None:
    for model in ("Tied", "Frozen"):
        numbers = sum(p.numel() for p in awkward.build(model, 0).parameters() if p.requires_grad)
        found = _try(attempt, Sent(model))
        for number in range(len(ROUNDS)):
            calls = {rank: each[number]["calls"] for rank, each in found.items()}
            refuse_messages({rank: each["pack"] for rank, each in calls.items()}, f"{awkward.said(model)}, in pack()")
            for rank, each in calls.items():
                if attempt.world_size > 1 and not each["launch"]:
                    raise Wrong({rank: "launch() sends nothing"}, "Look at: what may begin before anybody waits?")
            both = {rank: each["launch"] + each["wait"] for rank, each in calls.items()}
            judge_rounds(both, [Flat(numbers, 8)], 1, f"{awkward.said(model)}, launch() and wait()")


class Bucket:  # its name stands in the errors that a student reads
    """A bucket that is launched before another, and counts what was sent until it is waited for."""

    def __init__(self, sent: list):
        self.sent, self.waited_at = sent, []

    def wait(self) -> None:
        self.waited_at.append(len(self.sent))


def probe_before(travelling, seed: int, x, y) -> dict[str, list[int]]:
    """→ by when: how many messages this bucket had sent, whenever it waited for the one before"""
    module = awkward.build("Plain", seed).to(device_here())
    home = settle(module)
    bucket = travelling(home)
    awkward.loss_of(module, x.to(device_here()), y.to(device_here())).backward()
    with instrumentation.listening() as calls:
        bucket.before = before = Bucket(calls)
        for place in range(len(home.parameters)):
            bucket.pack(place)
        packed = list(before.waited_at)
        bucket.launch()
        launched = list(before.waited_at)
        bucket.wait()
    return {"packed": packed, "launched": launched}


def the_one_before_has_arrived(attempt: Attempt) -> None:
    for rank, found in enumerate(attempt.run(probe_before, per_rank=Draw(attempt).per_rank)):
        if found["packed"]:
            raise Wrong({rank: "pack() waits for the bucket before"}, "Look at: backward goes on behind pack().")
        if not found["launched"]:
            said = "launch() does not call before.wait()"
            raise Wrong({rank: said}, "Look at: how many buckets are alive, if nobody waits until the end?")
        if found["launched"][0]:
            said = f"{found['launched'][0]} messages were sent before the bucket before was waited for"
            raise Wrong({rank: said}, "Look at: which of the two comes first, and what is alive until then?")


def probe_late(travelling, token: int, late: int, rank: int, seed: int, x, y) -> list[int]:
    """→ on the late rank: whose launch() had not come back when patience ended"""
    module = awkward.build("Plain", seed).to(device_here())
    home = settle(module)
    bucket, meeting, missing = travelling(home), Meeting(f"travel{token}"), []
    awkward.loss_of(module, x.to(device_here()), y.to(device_here())).backward()
    for place in range(len(home.parameters)):
        bucket.pack(place)
    with launches_unasked():
        if rank == late:
            missing = meeting.missing()
        bucket.launch()
        if rank != late:
            meeting.come()
        bucket.wait()
    return missing


def launch_waits_for_nobody(attempt: Attempt) -> None:
    late, token = attempt.random.randrange(attempt.world_size), attempt.draw_seed()
    per_rank = [(rank, *share) for rank, share in enumerate(Draw(attempt).per_rank)]
    if missing := attempt.run(probe_late, token, late, per_rank=per_rank)[late]:
        said = f"while rank {late} had launched nothing, launch() did not come back here in {PATIENCE_S:g} s"
        raise Wrong(dict.fromkeys(missing, said), "Look at: which wait() belongs into launch(), and which does not?")


def probe_graph(travelling, seed: int, x, y) -> tuple[str, str] | None:
    """→ the error that a gradient with a graph brings: its kind, and what it says"""
    module = awkward.build("Plain", seed).to(device_here())
    home = settle(module)
    bucket = travelling(home)
    awkward.loss_of(module, x.to(device_here()), y.to(device_here())).backward(create_graph=True)
    try:
        bucket.pack(0)
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        module.zero_grad()  # a gradient with a graph would keep itself alive
    return None


def gradients_with_a_graph_are_refused(attempt: Attempt) -> None:
    for rank, error in enumerate(attempt.run(probe_graph, per_rank=Draw(attempt).per_rank)):
        kind, message = error or (None, "")
        if kind != "RuntimeError" or "create_graph" not in message:
            did = f"raises {kind}({message[:80]!r})" if kind else "takes the gradient"
            said = f"after backward(create_graph=True), pack(0) {did}"
            expected = "expected a RuntimeError that names create_graph"
            raise Wrong({rank: f"{said}; {expected}"}, "Look at: could a message be a part of a graph?")


def probe_none(travelling, seed: int, x, y, computes: bool) -> dict:
    """Send the gradients of a bucket for which this rank may have computed none."""
    module = awkward.build("Plain", seed).to(device_here())
    home = settle(module)
    bucket = travelling(home)
    known = [id(p) for p in getattr(bucket, "parameters", [])] == [id(p) for p in home.parameters]
    if computes:
        awkward.loss_of(module, x.to(device_here()), y.to(device_here())).backward()
    own = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in home.parameters]
    for place in range(len(home.parameters)):
        bucket.pack(place)
    bucket.launch()
    bucket.wait()
    grad = home.shard.grad
    return {
        "known": known,
        "own": torch.cat([each.flatten() for each in own]).cpu(),
        "grad": None if grad is None else grad.detach().cpu().flatten(),
    }


def no_gradient_counts_as_zeros(attempt: Attempt) -> None:
    """Of a bucket that only one rank has computed, and of one that nobody has. And others read .parameters."""
    size = attempt.world_size
    for who in (attempt.random.randrange(size) if size > 1 else None, None):
        computing = "nobody has" if who is None else f"rank {who} alone has"
        per_rank = [(*share, rank == who) for rank, share in enumerate(Draw(attempt).per_rank)]
        context = f"a bucket of whose gradients {computing} computed any"
        hint = "Look at: what is sent where every gradient is None?"
        try:
            found = attempt.run(probe_none, per_rank=per_rank, context=context)
        except Wrong as wrong:
            wrong.hint = wrong.hint or hint
            raise
        flat = sum(each["own"] for each in found) / size
        want = torch.cat([flat, flat.new_zeros(-len(flat) % size)]).view(size, -1)
        for rank, each in enumerate(found):
            if not each["known"]:
                said = ".parameters is not the list of the parameters in home"
                raise Wrong({rank: said}, "Look at: who asks a bucket for its parameters? (Lab 04's queue does.)")
            if each["grad"] is None or not close(each["grad"], want[rank]):
                was = "is None" if each["grad"] is None else first_difference(each["grad"], want[rank])
                raise Wrong({rank: f"{context}: shard.grad, {was}"}, hint)
