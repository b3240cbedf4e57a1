"""Steps of micro-batches: draw each rank's samples, and check the mean over the ranks."""

import torch

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.buckets import judge_messages
from shared.checks.engine.compare import describe_calls, judge_gradients, nearly_equal
from shared.checks.engine.failures import Wrong
from shared.checks.engine.overlap_models import Sizes
from shared.checks.engine.overlap_probes import Micro, probe_steps
from shared.checks.models import awkward

SAMPLES = 4


def draw_shares(attempt: Attempt, one_leaves_out: bool = False) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Draw each rank's samples, so that even and odd ranks run the branches of a fork in different orders.

    Args:
        one_leaves_out: Whether one rank does not use the last layer of a fork.
    """
    world_size = attempt.world_size
    generator = torch.Generator().manual_seed(attempt.draw_seed())
    turn, without = attempt.random.randrange(2), attempt.random.randrange(world_size) if one_leaves_out else None
    shares = []
    for rank in range(world_size):
        x = torch.randn(SAMPLES, awkward.INPUTS, generator=generator, dtype=torch.float64)
        x[0, 0] = 1.0 if (rank + turn) % 2 else -1.0
        x[0, 1] = -1.0 if rank == without else 1.0
        shares.append((x, torch.randn(SAMPLES, awkward.OUTPUTS, generator=generator, dtype=torch.float64)))
    return shares


def mean_of(sizes: Sizes, seed: int, micro_batches: list[list[Micro]]) -> tuple[dict, dict[int, dict]]:
    """Return the mean over ranks of accumulated gradients, where a missing one counts as zeros, and each rank's own."""
    local = {}
    for rank, own in enumerate(micro_batches):
        module = sizes.build(seed)
        for micro in own:
            (awkward.loss_of(module, micro.x, micro.y) / len(own)).backward()
        local[rank] = awkward.gradients_of(module)
    mean = {}
    for name in local[0]:
        found = [gradients[name] for gradients in local.values() if gradients[name] is not None]
        mean[name] = sum(found) / len(local) if found else None
    return mean, local


def judge_steps(
    attempt: Attempt, sizes: Sizes, steps: list[list[list[Micro]]], context: str, set_to_none: bool = True
) -> None:
    """Check that after each step every rank has the mean gradients, and that each bucket was sent in one message.

    Args:
        sizes: The model and its buckets.
        steps: For each step, each rank's micro-batches.
        context: What is being tried.
        set_to_none: Whether zero_grad() sets gradients to None.

    Raises:
        Wrong: If a gradient or a message is wrong.
    """
    seed = attempt.draw_seed()
    per_rank = [([step[rank] for step in steps],) for rank in range(attempt.world_size)]
    found = attempt.run(probe_steps, sizes, set_to_none, seed, per_rank=per_rank, context=context)
    for step_index, step in enumerate(steps):
        results = [result[step_index] for result in found]
        message = f"{sizes}, {context}, step {step_index + 1}"
        for rank, result in enumerate(results):
            if result.silent:
                raise Wrong({rank: f"{message}: inside no_sync(), {describe_calls(result.silent)}; expected none"})
            alone = "" if step[rank] else ", in which this rank has no backward()"
            judge_messages(rank, result.loud, sizes.messages(), message + alone)
        gradients = {rank: result.gradients for rank, result in enumerate(results)}
        expected, local = mean_of(sizes, seed, step)
        try:
            judge_gradients(gradients, expected, local, message)
        except Wrong as wrong:
            raise Wrong(wrong.evidence, _cause(gradients, sizes, seed, step) or wrong.hint) from None


def _cause(gradients: dict[int, dict], sizes: Sizes, seed: int, step: list[list[Micro]]) -> str:
    """Recognize a mistake in accumulation: the gradient contains only some of the micro-batches."""
    longest = max(len(own) for own in step)
    if longest < 2:
        return ""
    parts = {"the last micro-batch": slice(-1, None), "all but the last micro-batch": slice(0, -1)}
    name = "trunk.weight"  # used by every sample
    for what, part in parts.items():
        alone = mean_of(sizes, seed, [own[part] for own in step])[0][name]
        share = len(range(longest)[part]) / longest
        if alone is not None and all(nearly_equal(each[name], alone * share) for each in gradients.values()):
            return f"It contains {what} only. Hint: what did .grad contain before the last backward()?"
    return ""
