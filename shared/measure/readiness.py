"""When gradients become ready: after which fraction of a step's computation."""

from collections.abc import Callable

import torch
from torch import nn

from shared.measure.rounds import ROUNDS, WARM_UP_ROUNDS, Job, jobs, now_s, of_all_ranks
from shared.measure.steps import training_step


def ready_fractions(
    model: nn.Module, *batch, rounds: int = ROUNDS, warm_up_rounds: int = WARM_UP_ROUNDS
) -> list[tuple[float, int]]:
    """Measure when each gradient is ready in a step inside no_sync(). Runs on all ranks together.

    The step begins when the last rank enters it. A gradient is ready when all ranks have it, and the step ends with the
    last rank's backward. Every parameter must get a gradient.

    Returns:
        (fraction, size_bytes) of each gradient, in the order in which they are ready, the same on all ranks. The
        fraction is the median of the rounds.
    """
    parameters = list(model.parameters())
    step = training_step(model, *batch, sync=False)
    marks_s: list[list[float]] = []  # by round: when it began, when each gradient was ready, when it ended

    def run() -> None:
        marks = [now_s()] * (len(parameters) + 2)
        marks_s.append(marks)
        for phase in step.phases.values():
            phase()
        marks[-1] = now_s()

    def note(index: int) -> Callable[[nn.Parameter], None]:
        def on_gradient(_parameter: nn.Parameter) -> None:
            marks_s[-1][index] = now_s()

        return on_gradient

    handles = [
        parameter.register_post_accumulate_grad_hook(note(index)) for index, parameter in enumerate(parameters, 1)
    ]
    try:
        jobs({"": Job({"": run}, step.prepare)}, rounds=rounds, warm_up_rounds=warm_up_rounds)
    finally:
        for handle in handles:
            handle.remove()
    latest_s = torch.tensor(of_all_ranks(marks_s[warm_up_rounds:]), dtype=torch.float64).amax(dim=0)
    began_s, ended_s = latest_s[:, :1], latest_s[:, -1:]
    fractions = ((latest_s[:, 1:-1] - began_s) / (ended_s - began_s)).quantile(0.5, dim=0).tolist()
    return sorted(zip(fractions, (parameter.nbytes for parameter in parameters), strict=True), key=lambda pair: pair[0])
