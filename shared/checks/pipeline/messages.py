"""Judge Neighbors: messages arrive in order, and sending one never waits."""

import gc
import weakref
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from shared.checks.engine.attempts import Attempt, on_each
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import first_difference, nearly_equal
from shared.checks.engine.failures import Wrong
from shared.checks.engine.late_ranks import PATIENCE_S, Rendezvous, launches_unasked, rehearsed
from shared.checks.engine.subgroups import called_alone, join_subgroup, members_of, staying_inside
from shared.checks.pipeline.cases import seeded
from shared.deadlines import scaled

# -- judge Chunk: the forward and backward of single micro-batches, in any order


WIDTH, SAMPLES = 5, 3


def build_layers(seed: int, of_tokens: bool) -> nn.Sequential:
    def build() -> nn.Sequential:
        first = nn.Embedding(7, WIDTH) if of_tokens else nn.Linear(WIDTH, WIDTH)
        return nn.Sequential(first, nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    return seeded(seed, build, torch.float64)


def draw_inputs(seed: int, count: int, of_tokens: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Draw the inputs of micro-batches, and the gradients of their outputs."""
    generator = torch.Generator().manual_seed(seed)
    if of_tokens:
        inputs = [torch.randint(7, (SAMPLES,), generator=generator) for _ in range(count)]
    else:
        inputs = [torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64) for _ in range(count)]
    return inputs, [torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64) for _ in range(count)]


def squares(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


@dataclass
class Computed:
    outputs: list[torch.Tensor] = field(default_factory=list)
    input_gradients: dict[int, torch.Tensor | None] = field(default_factory=dict)  # by micro-batch
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    marked: bool = False  # whether a tensor that was given as x requires a gradient
    attached: bool = False  # whether a returned output does
    kept: int = 0  # how many micro-batches are in chunk.kept in the end
    alive: int = 0  # how many outputs still exist then


def probe_chunk(chunk_cls, seed: int, count: int, of_tokens: bool, is_first: bool, is_last: bool) -> Computed:
    """Run forwards in order and backwards in reverse, the first one early. Returns everything that came out."""
    layers = build_layers(seed, of_tokens).to(device_here())
    chunk = chunk_cls(list(layers), is_first=is_first)
    inputs, gradients = ([each.to(device_here()) for each in group] for group in draw_inputs(seed, count, of_tokens))
    found, outputs = Computed(), []
    for index, x in enumerate(inputs):
        output = chunk.run_forward(index, x, squares) if is_last else chunk.run_forward(index, x)
        found.marked |= x.requires_grad
        found.attached |= output.requires_grad
        found.outputs.append(output.detach().cpu().clone())
        outputs.append(weakref.ref(chunk.kept[index][1]) if index in chunk.kept else lambda: None)
        del output
    for index in [0, *reversed(range(1, count))]:
        gradient = chunk.run_backward(index, None if is_last else gradients[index])
        found.input_gradients[index] = None if gradient is None else gradient.cpu().clone()
    gc.collect()
    found.kept, found.alive = len(chunk.kept), sum(each() is not None for each in outputs)
    found.gradients = {name: p.grad.cpu().clone() for name, p in layers.named_parameters() if p.grad is not None}
    return found


def _judge_chunk(
    attempt: Attempt, count: int, of_tokens: bool = False, is_first: bool = False, is_last: bool = False
) -> None:
    seed = attempt.draw_seed()
    found = attempt.run(probe_chunk, seed, count, of_tokens, is_first, is_last)[0]
    layers, (inputs, gradients) = build_layers(seed, of_tokens), draw_inputs(seed, count, of_tokens)
    what = "1 micro-batch" if count == 1 else f"{count} micro-batches"
    what += (" of tokens" if of_tokens else "") + (", the first chunk" if is_first else "")
    what += ", the last chunk" if is_last else ""
    for index, x in enumerate(inputs):
        x.requires_grad_(not is_first)
        output = squares(layers(x)) if is_last else layers(x)
        output.backward(None if is_last else gradients[index])
        if not nearly_equal(found.outputs[index], output.detach()):
            message = f"{what}: the output of micro-batch {index}: {first_difference(found.outputs[index], output)}"
            raise Wrong(message, "Hint: is it the output of the layers, or of loss_of?")
        gradient = found.input_gradients[index]
        if is_first:
            if gradient is not None:
                raise Wrong(f"{what}: run_backward returns a tensor, expected None", "Hint: who needs this gradient?")
        elif gradient is None or x.grad is None or not nearly_equal(gradient, x.grad):
            found_it = "it is None" if gradient is None or x.grad is None else first_difference(gradient, x.grad)
            hint = "Hint: which tensor's gradient does the previous stage need, and is that tensor a leaf?"
            raise Wrong(f"{what}: the gradient of input {index}: {found_it}", hint)
    for name, parameter in layers.named_parameters():
        own, right = found.gradients.get(name), parameter.grad
        if own is None or right is None or not nearly_equal(own, right):
            found_it = "it is None" if own is None or right is None else first_difference(own, right)
            raise Wrong(f"{what}: the gradient of {name}: {found_it}", "Hint: does each micro-batch add to it?")
    if found.marked:
        message = f"{what}: after run_forward, the tensor that was given as x requires a gradient"
        raise Wrong(message, "Hint: is your leaf a new tensor, or the one that run_forward was given?")
    if found.attached:
        hint = "Hint: what would the message to the next stage keep alive?"
        raise Wrong(f"{what}: the returned output requires a gradient; expected it detached", hint)
    if found.kept or found.alive:
        message = f"{what}: after all backwards, {max(found.kept, found.alive)} outputs still exist; expected 0"
        raise Wrong(message, "Hint: what still refers to the tensors of a micro-batch after its backward?")


a_plain_micro_batch = on_each(_judge_chunk, 1)


def many_micro_batches(attempt: Attempt) -> None:
    _judge_chunk(attempt, attempt.random.randint(3, 6))


def the_first_and_the_last_chunk(attempt: Attempt) -> None:
    _judge_chunk(attempt, 2, of_tokens=True, is_first=True)
    _judge_chunk(attempt, 2, is_first=True)
    _judge_chunk(attempt, 3, is_last=True)
    _judge_chunk(attempt, 2, of_tokens=True, is_first=True, is_last=True)


def probe_frozen(chunk_cls, seed: int) -> tuple[bool, int]:
    """Run a frozen chunk on tokens. Returns whether run_backward returned None, and what is kept."""
    layers = build_layers(seed, of_tokens=True).to(device_here()).requires_grad_(False)
    chunk = chunk_cls(list(layers), is_first=True)
    (tokens, *_), (gradient, *_) = draw_inputs(seed, 1, of_tokens=True)
    chunk.run_forward(0, tokens.to(device_here()))
    return chunk.run_backward(0, gradient.to(device_here())) is None, len(chunk.kept)


def frozen_layers_need_no_backward(attempt: Attempt) -> None:
    context = "frozen layers, and tokens as inputs"
    is_none, kept = attempt.run(probe_frozen, attempt.draw_seed(), context=context)[0]
    if not is_none or kept:
        what = "the micro-batch is still in self.kept; expected it to be removed"
        raise Wrong(f"{context}: {what if is_none else 'run_backward returns a gradient; expected None'}")


ROUNDS = 3
LARGE = 1 << 20  # elements: too many for the buffers of a socket
FINISH_S = scaled(0.5)  # a finish() that does not wait returns within milliseconds


def message_of(seed: int, stage: int, kind: str, number: int, equal: bool = False) -> torch.Tensor:
    """Draw a message that is not contiguous. Its shape depends on its number, unless all shapes are equal."""
    generator = torch.Generator().manual_seed(1000 * seed + 100 * stage + 10 * number + (kind == "B"))
    return torch.randn(2 if equal else number + 2, 3, generator=generator, dtype=torch.float64).T


@dataclass
class Received:
    messages: dict[str, list[torch.Tensor]]  # by kind
    left: int  # how many are still in flight after finish()


def probe_messages(neighbors, in_subgroup: bool, seed: int, equal: bool) -> Received | None:
    """Send several messages of both kinds, and only then receive. Returns what has arrived in the group."""
    group, is_member = join_subgroup(in_subgroup)
    if not is_member:
        return None
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
        return Received(found, in_flight(own))


def _judge_messages(attempt: Attempt, in_subgroup: bool = False, equal: bool = False) -> None:
    seed, members = attempt.draw_seed() % 10_000, members_of(attempt, in_subgroup)
    context = called_alone(attempt) if in_subgroup else ""
    results = attempt.run(probe_messages, in_subgroup, seed, equal, context=context)
    for index, rank in enumerate(members):
        for kind, step in (("F", -1), ("B", 1)):
            source = (index + step) % len(members)
            for number, message in enumerate(results[rank].messages[kind]):
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
        if results[rank].left:
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
