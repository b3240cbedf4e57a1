"""Judge CompressedBucket with compressors of the check's own, and whether a network learns as well with one."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn

from shared.checks.compression import hints
from shared.checks.compression.feeding import Setting, Stepped, counted, run_steps
from shared.checks.compression.hints import Steps
from shared.checks.compression.judging import draw_steps, feed, judge_same_bits, judge_steps
from shared.checks.compression.references import Method, Reference, numel_of
from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here, earlier_piece
from shared.checks.engine.failures import Wrong

# -- judge whether a network that is trained with a compressor learns as well as without one


INPUTS, HIDDEN, CLASSES = 20, 48, 6
SAMPLES = 64  # per rank
STEPS, LEARNING_RATE, MOMENTUM = 100, 0.05, 0.9
MARGIN = 1.1  # how many times as large the last loss may be as without compression
SLACK = 0.01  # and what may be added to it, as a part of the first loss


def build(seed: int, hidden: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(INPUTS, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, CLASSES)
        )


def train(model, module, batch, steps: int) -> list[float]:
    """Train with SGD on one batch. Returns the loss of each step. `model` may be a wrapper of the module."""
    momenta, losses = [torch.zeros_like(p) for p in module.parameters()], []
    for _ in range(steps):
        module.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        if model is not module:
            model.finish_gradient_sync()
        with torch.no_grad():
            for parameter, momentum in zip(module.parameters(), momenta, strict=True):
                momentum.mul_(MOMENTUM).add_(parameter.grad)
                parameter.add_(momentum, alpha=-LEARNING_RATE)
        losses.append(loss.item())
    return losses


# -- on a rank


@dataclass
class Trained:
    losses: list[float]
    state: dict[str, torch.Tensor]


def probe_training(piece, arguments: tuple, seed: int, hidden: int, steps: int, x, y) -> Trained:
    module = build(seed, hidden).to(device_here())
    wrapper = earlier_piece("overlapped_ddp", "OverlappedDDP")
    model = wrapper(module, compressor=piece(*arguments), bucket_cap_mb=0.01)
    losses = train(model, module, (x.to(device_here()), y.to(device_here())), steps)
    return Trained(losses, {name: p.detach().cpu() for name, p in module.named_parameters()})


# -- in the kernel


def judge_learning(attempt: Attempt, method: Method) -> None:
    """Compare the last loss with that of one process that sends nothing."""
    seed, size = attempt.draw_seed(), attempt.world_size
    hidden, steps = attempt.sizes.pick(HIDDEN, range(30, 90)), attempt.sizes.steps(STEPS)
    generator = torch.Generator().manual_seed(attempt.draw_seed())
    x = torch.randn(SAMPLES * size, INPUTS, generator=generator)
    y = (x @ torch.randn(INPUTS, CLASSES, generator=generator)).argmax(-1)
    module = build(seed, hidden)
    alone = train(module, module, (x, y), steps)
    shares = list(zip(x.chunk(size), y.chunk(size), strict=True))
    context = f"a network of {sum(p.numel() for p in module.parameters())} parameters, {method.said}, {steps} steps"
    found = attempt.run(probe_training, method.arguments, seed, hidden, steps, per_rank=shares, context=context)
    for rank, result in enumerate(found):
        for name, tensor in result.state.items():
            if not torch.equal(tensor, found[0].state[name]):
                evidence = f"{context}: after training, {name} differs from that on rank 0"
                raise Wrong({rank: evidence}, "Hint: do all ranks get the same gradients, bit for bit?")
    last = sum(result.losses[-1] for result in found) / size
    most = MARGIN * alone[-1] + SLACK * alone[0]
    if not last <= most:
        raise Wrong(
            f"{context}: the loss falls from {alone[0]:.3f} to {last:.4f}; without compression, it falls to "
            f"{alone[-1]:.4f}, and at most {most:.4f} is accepted",
            hints.ON_TRAINING[type(method)],
        )


# -- on a rank


class Handle:
    """A handle that notes when it is waited for."""

    def __init__(self, name: str, events: list[str]):
        self.name, self.events = name, events

    def wait(self) -> None:
        self.events.append(f"wait for {self.name}")


class Noting:
    """A compressor that sends nothing, and notes when it is run."""

    def __init__(self, events: list[str], handles: int):
        self.events, self.handles = events, handles

    def exchange(self, bucket):
        for number in range(self.handles):
            self.events.append(f"launch {number}")
            yield Handle(str(number), self.events)
        self.events.append("finish")


def probe_order(bucket_cls, handles: int, rounds: int) -> tuple[list[list[str]], str]:
    """Launch and wait, and then wait again.

    Returns:
        The events of launch() and of wait(), in turn, and the name of the error that the second wait() raises, or "".
    """
    events: list[str] = []
    parameter = nn.Parameter(torch.zeros(3, device=device_here()))
    bucket, found = bucket_cls([parameter], None, Noting(events, handles)), []
    for _ in range(rounds):
        for step in (bucket.launch, bucket.wait):
            step()
            found.append(events[:])
            events.clear()
    try:
        bucket.wait()
    except Exception as error:
        return found, type(error).__name__
    return found, ""


class InTurn:
    """A compressor that sends every second element, or every n-th, and other ones in the next step."""

    def __init__(self, bucket_cls, every: int = 2):
        self.bucket_cls, self.every = bucket_cls, every

    def new_bucket(self, parameters, group=None):
        return self.bucket_cls(parameters, group, self)

    def exchange(self, bucket):
        turn = bucket.memory["turn"] = (bucket.memory.get("turn", -1) + 1) % self.every
        sent = bucket.unsent[turn :: self.every].clone()
        bucket.unsent[turn :: self.every] = 0
        count = torch.ones(1, device=sent.device)
        if sent.numel():
            yield dist.all_reduce(sent, group=bucket.group, async_op=True)
        yield dist.all_reduce(count, group=bucket.group, async_op=True)
        if count.item() != dist.get_world_size(bucket.group):
            raise AssertionError("a collective is not complete when the generator continues: wait for its handle first")
        bucket.flat.zero_()
        bucket.flat[turn :: self.every] = sent.to(bucket.flat)


def probe_in_turn(bucket_cls, setting: Setting, steps: list) -> list[Stepped]:
    return run_steps(InTurn(bucket_cls, *setting.arguments), setting, steps)


# -- in the kernel


@dataclass
class InTurnReference(Reference):
    turns: dict[int, int] = field(default_factory=dict)  # by the index of the bucket

    def exchange(self, number: int, bucket: list[int]) -> torch.Tensor:
        turn = self.turns.get(number, 0)
        self.turns[number] = (turn + 1) % self.method.every
        total = torch.zeros_like(self.unsent[number][0])
        for unsent in self.unsent[number]:
            total[turn :: self.method.every] += unsent[turn :: self.method.every]
            unsent[turn :: self.method.every] = 0
        return total


@dataclass(frozen=True)
class InTurnMethod:
    every: int = 2
    low_rank: int = 0

    @property
    def said(self) -> str:
        share = "half of the" if self.every == 2 else f"one in {self.every}"
        return f"a compressor that sends {share} elements"

    def collectives(self, setting: Setting, step: int) -> int:
        """Return how many collectives the compressor launches in a step, which is 0 for the first one."""
        turn = step % self.every
        return sum(1 + (turn < numel_of(setting, bucket)) for bucket in setting.buckets())

    def reference(self, setting: Setting) -> InTurnReference:
        return InTurnReference(setting, self)


def handles_are_waited_for_in_order(attempt: Attempt) -> None:
    for handles in (1, 2, 3):
        found, error = attempt.run(probe_order, handles, 2)[0]
        launched = ["launch 0"]
        rest = ["wait for 0"]
        for number in range(1, handles):
            rest += [f"launch {number}", f"wait for {number}"]
        for index, events in enumerate(found):
            expected, method = ([*rest, "finish"], "wait()") if index % 2 else (launched, "launch()")
            if events != expected:
                said = "in the second step, " if index > 1 else ""
                raise Wrong(
                    f"a compressor with {counted(handles, 'collective')}: {said}the events in {method} are: "
                    f"{_listed(events)}; expected: {_listed(expected)}",
                    "Hint: how far does launch() run the generator, and what must be true before it continues?",
                )
    if error != "RuntimeError":
        raise Wrong(
            f"a second wait(), without a launch() before it, raises {error or 'nothing'}, expected RuntimeError",
            "Hint: how does wait() know that nothing is in flight?",
        )


def _listed(events: list[str]) -> str:
    return ", ".join(events) or "nothing"


def what_is_unsent_is_sent_later(attempt: Attempt) -> None:
    width = attempt.sizes.pick(9, range(5, 400))
    setting = Setting(((width, 3), (5,)))
    _judge(attempt, setting, draw_steps(attempt, InTurnMethod(), setting, 5))


def several_buckets_and_groups(attempt: Attempt) -> None:
    width = attempt.sizes.pick(9, range(5, 400))
    shapes = ((width, 3), (), (5,), (1,), (width, 2))
    setting = Setting(shapes, cap_mb=200 / 2**20, frozen=(2,), set_to_none=attempt.random.random() < 0.5)
    steps = draw_steps(
        attempt, InTurnMethod(), setting, 4, 3, lambda step, rank, index: index == 4 and rank == step % 2
    )
    _judge(attempt, setting, steps)
    # In bf16, a sum of 32 of these would be wrong by 1%.
    in_bf16 = Setting(((100,),), (32,), dtype=torch.bfloat16, said="in bfloat16")
    _judge(attempt, in_bf16, [[[[torch.full((100,), 1.09375)]]] * attempt.world_size] * 32, InTurnMethod(32))


def _judge(attempt: Attempt, setting: Setting, steps: Steps, method: InTurnMethod | None = None) -> None:
    method = method or InTurnMethod()
    tried = feed(attempt, method, setting, steps, probe_in_turn)
    judge_same_bits(tried)
    judge_steps(tried)
    for rank, found in tried.found.items():
        for number, step in enumerate(found, 1):
            if step.waits_in_hooks:
                waited = counted(step.waits_in_hooks, "time")
                evidence = f"{tried.context}, step {number}: hooks waited {waited}, expected 0"
                raise Wrong({rank: evidence}, "Hint: launch() must return at once. Which line waits?")
            expected = method.collectives(setting, number - 1)
            if step.messages != expected:
                evidence = (
                    f"{tried.context}, step {number}: {counted(step.messages, 'collective')} "
                    f"({', '.join(step.ops)}), but the compressor launches {expected}"
                )
                raise Wrong({rank: evidence}, "Hint: which line launches a collective that the compressor does not?")
