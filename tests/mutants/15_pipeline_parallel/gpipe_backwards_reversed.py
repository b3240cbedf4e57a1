"""Runs the backwards in reverse order, which sends gradients in another order than GPipe here.

caught by: gpipe · order
"""

from shared.schedules import Action


def gpipe(stages, micro_batches):
    forwards = [Action("F", index) for index in range(micro_batches)]
    return [forwards + [Action("B", index) for index in reversed(range(micro_batches))] for _ in range(stages)]
