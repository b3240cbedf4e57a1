"""Judge when gradient hooks run: a wrapper such as OverlappedDDP sends each gradient when its hook is called."""

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import first_difference, nearly_equal
from shared.checks.engine.failures import Wrong
from shared.checks.memory_wall.recompute_values import after_values
from shared.checks.models import recompute
from shared.checks.models.recompute import MODELS, draw_inputs, loss_of, named_parameters

BACKWARDS = 2


def probe_hooks(checkpointed, name: str, seed: int, inputs: tuple) -> list[list[tuple]]:
    """Run backward twice, accumulating. Return, for each backward, whose hooks ran, with .grad as it was then."""
    model = recompute.build(name, seed, checkpointed).to(device_here())
    x, rows, weights = (each.to(device_here()) for each in inputs)
    hook_calls, rounds = [], []
    for key, parameter in named_parameters(model).items():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(
                lambda each, key=key: hook_calls.append((key, None if each.grad is None else each.grad.clone()))
            )
    for _ in range(BACKWARDS):
        hook_calls.clear()
        loss_of(model, x, rows, weights).backward()
        rounds.append(hook_calls[:])
    return rounds


@after_values
def hooks_see_whole_gradients_once(attempt: Attempt) -> None:
    for name in MODELS:
        seed = attempt.draw_seed()
        inputs = draw_inputs(seed)
        model = recompute.build(name, seed)
        loss_of(model, *inputs).backward()
        expected = {key: parameter.grad for key, parameter in named_parameters(model).items()}
        for rank, rounds in enumerate(attempt.run(probe_hooks, name, seed, inputs, context=name)):
            for number, hook_calls in enumerate(rounds, 1):
                _judge_round(rank, hook_calls, expected, number, f"{name}, backward {number}")


def _judge_round(rank: int, hook_calls: list[tuple], expected_gradients: dict, number: int, context: str) -> None:
    names = [
        name for name, gradient in hook_calls if gradient is not None
    ]  # A hook also runs if a function returns None.
    for name, gradient in expected_gradients.items():
        if names.count(name) != (expected := int(gradient is not None)):
            evidence = f"{context}: the hook of {name} was called {names.count(name)} times; expected {expected}"
            raise Wrong({rank: evidence}, "Hint: which code writes into .grad, and how often in one backward?")
    for name, seen in hook_calls:
        if seen is not None and not nearly_equal(seen, number * expected_gradients[name]):
            difference = first_difference(seen, number * expected_gradients[name])
            hint = "Hint: which part of the gradient is still missing when the hook is called?"
            raise Wrong({rank: f"{context}: when the hook of {name} ran, its .grad was incomplete: {difference}"}, hint)
