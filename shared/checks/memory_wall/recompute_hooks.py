"""Judging who is told of gradients: a wrapper such as OverlappedDDP sends what its hooks are told of."""

from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import close, first_difference
from shared.checks.engine.framework import Attempt, Wrong
from shared.checks.engine.hints import begin_at
from shared.checks.memory_wall.recompute_values import gradients_are_those_without_it
from shared.checks.models import recompute
from shared.checks.models.recompute import MODELS, draw_inputs, loss_of, named_parameters

BACKWARDS = 2


def probe_hooks(checkpointed, name: str, seed: int, inputs: tuple) -> list[list[tuple]]:
    """Run backward twice, gradients adding up. → per backward: who was told, and .grad as it was then"""
    model = recompute.build(name, seed, checkpointed).to(device_here())
    x, rows, weights = (each.to(device_here()) for each in inputs)
    told, rounds = [], []
    for key, parameter in named_parameters(model).items():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(
                lambda each, key=key: told.append((key, None if each.grad is None else each.grad.clone()))
            )
    for _ in range(BACKWARDS):
        told.clear()
        loss_of(model, x, rows, weights).backward()
        rounds.append(told[:])
    return rounds


@begin_at(gradients_are_those_without_it, "values")
def hooks_see_whole_gradients_once(attempt: Attempt) -> None:
    for name in MODELS:
        seed = attempt.draw_seed()
        inputs = draw_inputs(seed)
        model = recompute.build(name, seed)
        loss_of(model, *inputs).backward()
        want = {key: parameter.grad for key, parameter in named_parameters(model).items()}
        for rank, rounds in enumerate(attempt.run(probe_hooks, name, seed, inputs, context=name)):
            for number, told in enumerate(rounds, 1):
                _judge_round(rank, told, want, number, f"{name}, backward {number}")


def _judge_round(rank: int, told: list[tuple], want: dict, number: int, said: str) -> None:
    names = [name for name, gradient in told if gradient is not None]  # hooks hear of a function's None too
    for name, gradient in want.items():
        if names.count(name) != (expected := int(gradient is not None)):
            evidence = f"{said}: the hook of {name} was called {names.count(name)} times; expected {expected}"
            raise Wrong({rank: evidence}, "Look at: who writes into .grad, and how often in one backward?")
    for name, seen in told:
        if seen is not None and not close(seen, number * want[name]):
            difference = first_difference(seen, number * want[name])
            hint = "Look at: what is still to come when the hook is called?"
            raise Wrong({rank: f"{said}: when the hook of {name} was called, its .grad: {difference}"}, hint)
