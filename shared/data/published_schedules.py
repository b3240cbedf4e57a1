"""Two published pipeline schedules: as text that `shared.schedules.parse` reads, and in closed form.

The texts are for 4 stages and 8 micro-batches. The functions are for the lesson's figure, where all sizes can be
chosen: they compute when each action has its turn. Students of chapter 15 generate the same orders step by step.
"""

from shared.schedules import Action

# Narayanan et al. 2021, §2.2.2, with two chunks per stage
INTERLEAVED = """
F0 F1 F2 F3 F0.1 F1.1 F2.1 F3.1 F4 F5 F6 B0.1 F7 B1.1 F4.1 B2.1 F5.1 B3.1 F6.1 B0 F7.1 B1 B2 B3 B4.1 B5.1 B6.1 \
B7.1 B4 B5 B6 B7
F0 F1 F2 F3 F0.1 F1.1 F2.1 F3.1 F4 B0.1 F5 B1.1 F6 B2.1 F7 B3.1 F4.1 B0 F5.1 B1 F6.1 B2 F7.1 B3 B4.1 B5.1 B6.1 \
B7.1 B4 B5 B6 B7
F0 F1 F2 F3 F0.1 F1.1 F2.1 B0.1 F3.1 B1.1 F4 B2.1 F5 B3.1 F6 B0 F7 B1 F4.1 B2 F5.1 B3 F6.1 B4.1 F7.1 B5.1 B6.1 \
B7.1 B4 B5 B6 B7
F0 F1 F2 F3 F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 F3.1 B3.1 F4 B0 F5 B1 F6 B2 F7 B3 F4.1 B4.1 F5.1 B5.1 F6.1 B6.1 F7.1 \
B7.1 B4 B5 B6 B7
"""

# Qi et al. 2023, §2, schedule ZB-H1
ZERO_BUBBLE = """
F0 F1 F2 F3 B0 W0 F4 B1 W1 F5 B2 W2 F6 B3 W3 F7 B4 W4 B5 W5 B6 W6 B7 W7
F0 F1 F2 B0 F3 B1 W0 F4 B2 W1 F5 B3 W2 F6 B4 W3 F7 B5 W4 B6 W5 B7 W6 W7
F0 F1 B0 F2 B1 F3 B2 W0 F4 B3 W1 F5 B4 W2 F6 B5 W3 F7 B6 W4 B7 W5 W6 W7
F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 F5 B5 W2 F6 B6 W3 F7 B7 W4 W5 W6 W7
"""


def interleaved(stages: int, micro_batches: int, chunks: int) -> list[list[Action]]:
    """Return the interleaved schedule, which has `chunks` chunks of layers per stage.

    Raises:
        ValueError: If the number of micro-batches is not a multiple of that of stages.
    """
    if micro_batches % stages:
        raise ValueError(f"the number of micro-batches must be a multiple of {stages}, got {micro_batches}")
    schedule = []
    for stage in range(stages):
        warm_up, turns = 2 * (stages - stage - 1) + (chunks - 1) * stages, {}
        for number in range(micro_batches * chunks):
            group, rest = divmod(number, stages * chunks)
            chunk, index = divmod(rest, stages)
            micro_batch = group * stages + index
            turns[Action("F", micro_batch, chunk)] = _forward_turn(number, warm_up)
            turns[Action("B", micro_batch, chunks - 1 - chunk)] = _backward_turn(number, warm_up)
        schedule.append(sorted(turns, key=turns.__getitem__))
    return schedule


def zero_bubble(stages: int, micro_batches: int) -> list[list[Action]]:
    """Return the schedule ZB-H1."""
    schedule = []
    for stage in range(stages):
        warm_up, turns = stages - stage - 1, {}
        for number in range(micro_batches):
            turns[Action("F", number)] = _forward_turn(number, warm_up)
            turns[Action("B", number)] = _backward_turn(number, warm_up)
            turns[Action("W", number)] = _backward_turn(number + stage, warm_up) + 0.5
        schedule.append(sorted(turns, key=turns.__getitem__))
    return schedule


def _forward_turn(number: int, warm_up: int) -> float:
    """Return when a forward has its turn: after the warm-up, every second turn is a backward's."""
    return number + max(0, number - warm_up)


def _backward_turn(number: int, warm_up: int) -> float:
    return warm_up + 2 * number + 1
