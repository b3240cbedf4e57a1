"""Check ContextParallelGPT: the loss and the gradients of a whole model on shards of its sequences."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from shared.checks.context_parallel.sequences import judge, order_name, shard
from shared.checks.engine.attempts import Attempt, on_each
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import describe_calls
from shared.checks.engine.failures import Wrong
from shared.checks.engine.subgroups import called_alone, join_subgroup, members_of
from shared.checks.models.small_gpts import seeded
from shared.models import GPTConfig, RotaryGPT
from shared.wire import instrumentation

IGNORED = -100
VOCABULARY, BATCH = 11, 2
HINT_ON_SUM = "Hint: what does `backward` of sum_over_ranks do with the gradient, and what adds up the ranks' terms?"


@dataclass(frozen=True)
class Training:
    """One step of a small GPT.

    Attributes:
        tokens: The tokens of each rank.
        ignored: How many targets at the end of the sequence do not count.
    """

    tokens: int = 4
    layers: int = 1
    balanced: bool = True
    ignored: int = 0
    in_subgroup: bool = False

    def build(self, seed: int) -> RotaryGPT:
        config = GPTConfig(VOCABULARY, 64, self.layers, heads=2, width=8)

        def build() -> RotaryGPT:
            model = RotaryGPT(config, seed)
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, std=0.4)
            return model

        return seeded(seed, build)

    def __str__(self) -> str:
        padding = f", of which the last {self.ignored} targets are ignored" if self.ignored else ""
        return f"{order_name(self.balanced)}, {self.tokens} tokens per rank{padding}"


@dataclass
class Stepped:
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    shapes: list[list[int]]  # of the tokens in each forward of the GPT
    collectives: list[instrumentation.Call]  # of the forward


def probe(wrapper, case: Training, seed: int, tokens: torch.Tensor, targets: torch.Tensor) -> Stepped | None:
    """Take one step, without the optimizer. Return None on a rank outside of the group."""
    group, member = join_subgroup(case.in_subgroup)
    if not member:
        return None
    gpt = case.build(seed).to(device_here())
    seen = []
    gpt.register_forward_pre_hook(lambda module, args: seen.append(list(args[0].shape)))
    options = ({} if group is None else {"group": group}) | ({} if case.balanced else {"balanced": False})
    model = wrapper(gpt, **options)
    tokens, targets = tokens.to(device_here()), targets.to(device_here())
    with instrumentation.listening() as calls:
        loss = model(tokens, targets)
        instrumentation.synchronize()
    if not isinstance(loss, torch.Tensor) or loss.shape != ():
        raise AssertionError(f"forward returned {type(loss).__name__}; expected a loss, a tensor without dimensions")
    loss.backward()
    model.finish_gradient_sync()
    dist.barrier(group)
    gradients = {name: None if p.grad is None else p.grad.cpu() for name, p in gpt.named_parameters()}
    collectives = [call for call in calls if call.op not in ("send", "recv")]
    return Stepped(loss.detach().cpu(), gradients, seen, collectives)


def judge_step(attempt: Attempt, case: Training) -> None:
    """Take a step on shards, and compare it with that of one process."""
    members, seed = members_of(attempt, case.in_subgroup), attempt.draw_seed()
    size = len(members)
    generator = torch.Generator().manual_seed(attempt.draw_seed())
    text = torch.randint(VOCABULARY, (BATCH, case.tokens * size + 1), generator=generator)
    tokens, targets = text[:, :-1], text[:, 1:].clone()
    if case.ignored:
        targets[:, -case.ignored :] = IGNORED
    context = called_alone(attempt) if case.in_subgroup else str(case)
    results = attempt.run(probe, case, seed, tokens, targets, context=context)
    found = {rank: results[rank] for rank in members}
    model = case.build(seed)
    logits = model(tokens)
    loss = mean_loss(logits, targets)
    loss.backward()
    expected = loss.detach()
    mistakes = wrong_losses(case, model, tokens, targets, logits.detach(), size)
    for rank, each in found.items():
        if each.shapes and each.shapes[0] != [BATCH, case.tokens]:
            message = f"{case}: the GPT got tokens of shape {each.shapes[0]}; expected {[BATCH, case.tokens]}"
            raise Wrong({rank: message}, "Hint: which tokens does this rank compute?")

    def hint(rank: int, value: torch.Tensor) -> str:
        return next((text for text, wrong in mistakes.items() if torch.allclose(value, wrong, rtol=1e-9)), "")

    judge({rank: each.loss for rank, each in found.items()}, dict.fromkeys(found, expected), f"{case}: loss", hint)
    for name, parameter in model.named_parameters():
        right = parameter.grad
        assert right is not None

        def hint_on_scale(rank: int, gradient: torch.Tensor, right=right) -> str:
            if size > 1 and torch.allclose(gradient, right * size):
                return f"It is {size} times too large. {HINT_ON_SUM}"
            if size > 1 and torch.allclose(gradient, right / size):
                return f"It is {size} times too small. {HINT_ON_SUM}"
            return "The loss is right. Hint: through which operations does the gradient of this rank's term flow?"

        gradients = {rank: each.gradients[name] for rank, each in found.items()}
        judge(gradients, dict.fromkeys(found, right), f"{case}: the gradient of {name}", hint_on_scale)
    for rank, each in found.items():
        collectives = each.collectives
        if sum(call.payload_bytes for call in collectives) > 3 * 8:
            message = f"{case}: forward has {describe_calls(collectives)}; expected at most 3 elements"
            raise Wrong({rank: message}, "Hint: which numbers do the ranks have to add up?")


def mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def wrong_losses(
    case: Training, model: RotaryGPT, tokens: torch.Tensor, targets: torch.Tensor, logits: torch.Tensor, size: int
) -> dict[str, torch.Tensor]:
    """Compute what common mistakes lead to, each with its hint."""
    parts = [shard(torch.arange(tokens.shape[1]), 0, index, size, case.balanced) for index in range(size)]
    means = torch.stack([mean_loss(logits[:, part], targets[:, part]) for part in parts])
    positions = torch.empty(tokens.shape[1], dtype=torch.int64)
    for part in parts:
        positions[part] = torch.arange(len(part))
    with torch.no_grad():
        restarted = mean_loss(model(tokens, positions=positions), targets)
    total = mean_loss(logits, targets)
    return {
        "It is the mean of the ranks' means. Hint: do all ranks have equally many targets that count?": means.mean(),
        "Every rank counts its positions from 0. Hint: where in the whole sequence are its tokens?": restarted,
        f"It is {size} times too large. Hint: by which number is this rank's term divided?": total * size,
        "It is the sum over the targets. Hint: is the loss a sum or a mean?": total * (targets != IGNORED).sum(),
        "It divides by all targets. Hint: do ignored ones count?": total * (targets != IGNORED).double().mean(),
    }


a_plain_gpt_on_two_ranks = on_each(judge_step, Training())


def gpts_in_both_orders(attempt: Attempt) -> None:
    for balanced in (True, False):
        judge_step(attempt, Training(2 * attempt.random.randint(1, 3), layers=2, balanced=balanced))


def ignored_targets_do_not_count(attempt: Attempt) -> None:
    for balanced in (True, False):
        judge_step(attempt, Training(balanced=balanced, ignored=attempt.random.randint(1, 3)))
    judge_step(attempt, Training(balanced=False, ignored=5))  # the last rank has nothing that counts


gpts_in_a_group = on_each(judge_step, Training(in_subgroup=True, ignored=1))
