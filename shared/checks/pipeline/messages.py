"""Judge Neighbors: messages arrive in order, and sending one never waits."""

import torch
import torch.distributed as dist

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import first_difference
from shared.checks.engine.failures import Wrong
from shared.checks.engine.late_ranks import PATIENCE_S, Rendezvous, launches_unasked, rehearsed
from shared.checks.engine.subgroups import called_alone, join_subgroup, members_of, staying_inside
from shared.deadlines import scaled

ROUNDS = 3
LARGE = 1 << 20  # elements: too many for the buffers of a socket
FINISH_S = scaled(0.5)  # a finish() that does not wait returns within milliseconds


def message_of(seed: int, stage: int, kind: str, number: int, equal: bool = False) -> torch.Tensor:
    """Draw a message that is not contiguous. Its shape depends on its number, unless all shapes are equal."""
    generator = torch.Generator().manual_seed(1000 * seed + 100 * stage + 10 * number + (kind == "B"))
    return torch.randn(2 if equal else number + 2, 3, generator=generator, dtype=torch.float64).T


def probe_messages(neighbors, in_subgroup: bool, seed: int, equal: bool) -> dict:
    """Send several messages of both kinds, and only then receive. Returns what has arrived, by kind."""
    group, is_member = join_subgroup(in_subgroup)
    if not is_member:
        return {}
    with staying_inside(dist.get_process_group_ranks(group) if in_subgroup else None):
        own, stage, stages = neighbors(group), dist.get_rank(group), dist.get_world_size(group)
        for number in range(ROUNDS):
            for kind in ("F", "B"):
                own.send(kind, message_of(seed, stage, kind, number, equal).to(device_here()))
        found = {"F": [], "B": []}
        for kind, step in (("F", -1), ("B", 1)):
            for number in range(ROUNDS):
                like = torch.zeros_like(message_of(seed, (stage + step) % stages, kind, number, equal))
                like = like.to(device_here())
                found[kind].append(own.receive(kind, like).cpu())
                if like.any():
                    raise AssertionError("receive() has overwritten `like`, which only shows the shape")
        own.finish()
        return found | {"left": in_flight(own)}


def _judge_messages(attempt: Attempt, in_subgroup: bool = False, equal: bool = False) -> None:
    seed, members = attempt.draw_seed() % 10_000, members_of(attempt, in_subgroup)
    context = called_alone(attempt) if in_subgroup else ""
    results = attempt.run(probe_messages, in_subgroup, seed, equal, context=context)
    for index, rank in enumerate(members):
        for kind, step in (("F", -1), ("B", 1)):
            source = (index + step) % len(members)
            for number, message in enumerate(results[rank][kind]):
                expected = message_of(seed, source, kind, number, equal)
                if message.shape != expected.shape or not torch.equal(message, expected):
                    what = f"message {number + 1} of kind {kind!r}, which stage {source} sent"
                    hint = "Hint: which stage receives each kind, and what is sent if the tensor is not contiguous?"
                    other = "B" if kind == "F" else "F"
                    others = [message_of(seed, source, other, each, equal) for each in range(ROUNDS)]
                    if any(torch.equal(message, each) for each in others):
                        evidence = f"{what}: a message of kind {other!r} was received instead"
                        raise Wrong({rank: evidence}, "Hint: how can receive() tell the two kinds apart?")
                    raise Wrong({rank: f"{what}: {first_difference(message, expected)}"}, hint)
        if results[rank]["left"]:
            evidence = "after finish(), in_flight is not empty; expected it to be empty"
            raise Wrong({rank: evidence}, "Hint: what does in_flight still refer to?")


def plain_messages_arrive(attempt: Attempt) -> None:
    _judge_messages(attempt, equal=True)


def messages_arrive_in_a_ring(attempt: Attempt) -> None:
    _judge_messages(attempt)


def messages_stay_in_their_group(attempt: Attempt) -> None:
    _judge_messages(attempt, in_subgroup=True)


@rehearsed
def probe_waiting(neighbors, token: int, late: int) -> list[int]:
    """Let one rank receive late. Returns, on that rank, the ranks whose send() had not returned by then."""
    own, meeting, missing = neighbors(None), Rendezvous(f"pipeline{token}"), []
    message = torch.ones(LARGE, device=device_here())
    rank, stages = dist.get_rank(), dist.get_world_size()
    with launches_unasked():
        if rank == late:
            missing = meeting.missing()
        for kind in ("F", "B"):
            own.send(kind, message)
        if rank != late:
            meeting.arrive()
        for kind in ("F", "B"):
            own.receive(kind, message)
        own.finish()
    return missing if stages > 1 else []


def sends_never_wait(attempt: Attempt) -> None:
    late, token = attempt.random.randrange(attempt.world_size), attempt.draw_seed()
    if missing := attempt.run(probe_waiting, token, late)[late]:
        evidence = f"send() did not return within {PATIENCE_S:g} s, while rank {late} received nothing"
        hint = (
            "Then two stages that both send first wait forever. Hint: which call waits until the message has arrived?"
        )
        raise Wrong(dict.fromkeys(missing, evidence), hint)


def in_flight(own) -> int:
    """Return how many messages a student's object keeps."""
    return sum(len(messages) for messages in own.in_flight.values())


def probe_kept(neighbors) -> list[list[int]]:
    """Send outputs and receive gradients, as in 1F1B. Returns which outputs are kept after each gradient."""
    own, kept = neighbors(None), []
    for number in range(6):
        message = torch.full((8,), number, device=device_here())
        own.send("F", message)
        own.receive("F", message)
        if number > 1:
            own.send("B", message)
            own.receive("B", message)
            kept.append([int(tensor[0]) for _, tensor in own.in_flight["F"]])
    own.finish()
    return kept


def probe_early_gradient(neighbors) -> None:
    """Receive a gradient while no output is in flight."""
    own, message = neighbors(None), torch.ones(8, device=device_here())
    own.send("B", message)
    own.receive("B", message)
    own.finish()


def what_has_arrived_is_freed(attempt: Attempt) -> None:
    for rank, kept in enumerate(attempt.run(probe_kept)):
        counts = [len(outputs) for outputs in kept]
        if max(counts) > 2:
            message = f"after {len(kept)} gradients have arrived, in_flight keeps {counts[-1]} of 6 outputs; expected 2"
            raise Wrong({rank: message}, "Hint: what does the gradient of an output prove about that output?")
        if min(counts) < 2:
            message = (
                f"3 outputs were sent, 1 gradient has arrived, and in_flight keeps {counts[0]} outputs; expected 2"
            )
            raise Wrong({rank: message}, "Hint: which kind of message proves that an output has been received?")
        if sorted(kept[-1]) != [4, 5]:
            message = f"outputs 0 to 5 were sent, 4 gradients have arrived, and in_flight keeps outputs {kept[-1]}; "
            raise Wrong({rank: message + "expected 4 and 5"}, "Hint: at which end of in_flight is the oldest entry?")
    attempt.run(probe_early_gradient, context="a gradient arrives while no output is in flight")


def probe_never_kept(neighbors) -> int:
    """Send a message that nobody has received yet. Returns how many are in flight."""
    own = neighbors(None)
    own.send("F", torch.ones(LARGE, device=device_here()))
    found = in_flight(own)
    dist.barrier()
    own.receive("F", torch.ones(LARGE, device=device_here()))
    own.finish()
    return found


def what_is_on_its_way_is_kept(attempt: Attempt) -> None:
    for rank, found in enumerate(attempt.run(probe_never_kept)):
        if not found:
            message = "nobody has received the message yet, but in_flight is empty"
            raise Wrong({rank: message}, "Hint: what keeps the tensor in memory until it has been received?")


@rehearsed
def probe_finish(neighbors, token: int) -> bool:
    """Let stage 1 receive late. Returns, on stage 1, whether stage 0 returned from finish() before that."""
    own, meeting = neighbors(None), Rendezvous(f"finish{token}")
    message, early = torch.ones(LARGE, device=device_here()), False
    with launches_unasked():
        if dist.get_rank() == 0:
            own.send("F", message)
            own.finish()
            meeting.arrive()
        else:
            early = meeting.has_arrived(0, within_s=FINISH_S)
            own.receive("F", message)
    return early


def finish_waits(attempt: Attempt) -> None:
    if attempt.run(probe_finish, attempt.draw_seed())[1]:
        message = "finish() returned before stage 1 had received the message"
        raise Wrong({0: message}, "Then the next step may overwrite it. Hint: which method of a handle waits?")
