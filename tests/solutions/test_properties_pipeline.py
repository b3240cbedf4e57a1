"""For random numbers of stages, micro-batches and chunks, and for random orders, a pipeline trains as one process does.

A random order is drawn by running it: again and again, some stage runs some action for which it has everything. The
functions without `test_` run on the ranks.
"""

import copy
import random
from collections import deque
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shared import schedules
from shared.measure.pipelines import sleeping_pipeline
from shared.planner import stages as planned
from shared.schedules import Action, Schedule
from solutions.pipeline import Pipeline
from solutions.pipeline_schedules import gpipe, interleaved, one_f_one_b, zero_bubble
from tests.drawn import seeds, tried, worlds

pytestmark = [pytest.mark.exhaustive, pytest.mark.chapter("pipeline_parallel")]

STEPS = 3
ADAMW = {"lr": 1e-2, "eps": 1e-3}
TOLERANCE = 1e-9  # AdamW turns a rounding of 1e-16 in a gradient into 1e-16 / eps, a few times over
NAMED = ("gpipe", "1f1b", "interleaved", "zero_bubble")


# -- orders


def built(name: str, stages: int, micro_batches: int, chunks: int) -> list[list[Action]]:
    if name == "interleaved":
        return interleaved(stages, micro_batches, chunks)
    return {"gpipe": gpipe, "1f1b": one_f_one_b, "zero_bubble": zero_bubble}[name](stages, micro_batches)


def random_order(stages: int, micro_batches: int, postpones: bool, seed: int) -> list[list[Action]]:
    """Run random actions until none is left. Each stage runs those of a kind in order."""
    draw, kinds = random.Random(seed), "FBW" if postpones else "FB"
    done = [dict.fromkeys("FBW", 0) for _ in range(stages)]
    schedule = [[] for _ in range(stages)]

    def may_run(stage: int, kind: str) -> bool:
        before = {"F": stage - 1, "B": stage + 1}.get(kind, stage)
        has_message = kind == "W" or not 0 <= before < stages or done[before][kind] > done[stage][kind]
        own_before = {"F": micro_batches, "B": done[stage]["F"], "W": done[stage]["B"]}[kind]
        return has_message and done[stage][kind] < own_before

    while some := [(stage, kind) for stage in range(stages) for kind in kinds if may_run(stage, kind)]:
        stage, kind = draw.choice(some)
        schedule[stage].append(Action(kind, done[stage][kind]))
        done[stage][kind] += 1
    return schedule


def run_in_one_process(schedule: Schedule) -> bool:
    """Let the stages take turns, with a queue for the messages of each kind. Return whether all of them get to the end,
    and every message is the one that its receiver expects."""
    stages, last = len(schedule), len(schedule) * schedules.chunks_of(schedule) - 1
    queues = {(kind, stage): deque() for kind in "FB" for stage in range(stages)}
    left, progresses = [deque(actions) for actions in schedule], True
    while progresses:
        progresses = False
        for stage, actions in enumerate(left):
            if not actions:
                continue
            kind, micro_batch, chunk = actions[0]
            position, step = chunk * stages + stage, {"F": 1, "B": -1, "W": 0}[kind]
            if step and 0 <= position - step <= last:
                if not queues[kind, stage]:
                    continue
                if queues[kind, stage].popleft() != (micro_batch, position):
                    return False
            if step and 0 <= position + step <= last:
                queues[kind, (position + step) % stages].append((micro_batch, position + step))
            actions.popleft()
            progresses = True
    return not any(left)


orders = st.builds(random_order, st.integers(1, 6), st.integers(1, 8), st.booleans(), seeds)


@tried(150)
@given(orders)
def test_random_orders_are_accepted_and_run_to_the_end(order):
    schedules.check_schedule(order)
    assert run_in_one_process(order)
    simulated = schedules.simulate(order)
    assert [[span.action for span in spans] for spans in simulated.stages] == order
    assert schedules.parse(schedules.write(order)) == order


def is_in_order(actions: list[Action]) -> bool:
    """Return whether a stage runs each forward before its backward, and each backward before its weight gradients."""
    places = {action: index for index, action in enumerate(actions)}
    pairs = [(a._replace(kind={"B": "F", "W": "B"}[a.kind]), a) for a in actions if a.kind != "F"]
    return all(places[before] < places[after] for before, after in pairs)


@tried(300)
@given(
    st.sampled_from(["random", *NAMED]), st.integers(1, 4), st.integers(1, 6), st.integers(1, 3), st.booleans(), seeds
)
def test_an_order_with_two_swapped_actions_is_accepted_exactly_if_it_runs(name, p, m, v, postpones, seed):
    draw = random.Random(seed)
    m = p * m if name == "interleaved" else m
    order = random_order(p, m, postpones, seed) if name == "random" else built(name, p, m, v)
    order = list(map(list, order))
    actions = draw.choice(order)
    first = draw.randrange(len(actions))
    second = draw.choice([max(0, first - 1), draw.randrange(len(actions))])
    actions[first], actions[second] = actions[second], actions[first]
    try:
        schedules.check_schedule(order)
        accepted = True
    except ValueError:
        accepted = False
    assert accepted == (all(map(is_in_order, order)) and run_in_one_process(order))


@tried(200)
@given(st.sampled_from(NAMED), st.integers(1, 9), st.integers(1, 24), st.integers(1, 4))
def test_the_labs_schedules_have_the_bubble_memory_and_messages_that_the_planner_computes(name, p, m, v):
    m, v = (p * (1 + m // 6), v) if name == "interleaved" else (m, 1)
    schedule = built(name, p, m, v)
    schedules.check_schedule(schedule)
    assert run_in_one_process(schedule)
    if m >= p or name != "zero_bubble":
        simulated = schedules.simulate(schedule, forward=1, backward=2, weights=1)
        assert simulated.bubble_of_ideal == pytest.approx(planned.bubble_of_ideal(name, p, m, v))
    for stage, actions in enumerate(schedule):
        most = schedules.most_in_flight(actions) / v
        bound = planned.in_flight(name, p, stage, m, v)
        assert most <= bound and (name == "zero_bubble" or most == pytest.approx(bound))
        positions = [a.chunk * p + stage + {"F": 1, "B": -1}[a.kind] for a in actions if a.kind != "W"]
        sent = sum(0 <= position < p * v for position in positions) if p > 1 else 0
        assert sent == planned.messages_of_stage(p, stage, m, v)


# -- training


@dataclass(frozen=True)
class Drawn:
    """A stack of layers, some of them frozen, the first and the last linear one perhaps tied, and how it is trained."""

    schedule: str
    sets: int
    chunks: int
    more_layers: int
    samples: int
    width: int
    tied: bool
    frozen: tuple[int, ...]
    max_norm: float | None
    seed: int

    def micro_batches(self, stages: int) -> int:
        return stages * (1 + self.sets // 3) if self.schedule == "interleaved" else self.sets

    def order(self, stages: int) -> str | list[list[Action]]:
        postpones = {"random": False, "random, with W": True}
        if self.schedule not in postpones:
            return self.schedule
        return random_order(stages, self.micro_batches(stages), postpones[self.schedule], self.seed)

    def layers(self, stages: int) -> nn.Sequential:
        count = stages * (self.chunks if self.schedule == "interleaved" else 1) + self.more_layers
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            layers = [nn.Sequential(nn.Linear(self.width, self.width), nn.Tanh()) for _ in range(count)]
        if self.tied:
            layers[-1][0].weight = layers[0][0].weight
        for index in self.frozen:
            layers[index % count].requires_grad_(False)
        return nn.Sequential(*layers).double()

    def batches(self, stages: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        draw = torch.Generator().manual_seed(self.seed)
        shape = (2, self.micro_batches(stages) * self.samples, self.width)
        return [tuple(torch.randn(shape, generator=draw, dtype=torch.float64)) for _ in range(STEPS)]


drawn = st.builds(
    Drawn,
    schedule=st.sampled_from([*NAMED, "random", "random, with W"]),
    sets=st.integers(1, 8),
    chunks=st.integers(1, 3),
    more_layers=st.integers(0, 4),
    samples=st.integers(1, 3),
    width=st.integers(1, 5),
    tied=st.booleans(),
    frozen=st.lists(st.integers(0, 11), max_size=2).map(tuple),
    max_norm=st.none() | st.sampled_from([0.01, 1.0]),
    seed=seeds,
)


class Counted(Pipeline):
    """A pipeline that counts the micro-batches that a stage keeps for backward."""

    most_kept = 0

    def run(self, *arguments) -> None:
        super().run(*arguments)
        self.most_kept = max(self.most_kept, sum(len(chunk.kept) for chunk in self.chunks))


def pipelined(group, drawn: Drawn) -> tuple[list, dict[str, torch.Tensor], int, int]:
    """Train on this rank. Return losses and norms, parameters, and how many micro-batches it kept and may keep."""
    stages = dist.get_world_size(group)
    layers, micro_batches = copy.deepcopy(drawn.layers(stages)), drawn.micro_batches(stages)
    pipeline = Counted(layers, drawn.order(stages), micro_batches, F.mse_loss, group, drawn.chunks)
    own = pipeline.stage_parameters()
    optimizer, found = torch.optim.AdamW(own.values(), **ADAMW), []
    for batch in drawn.batches(stages):
        optimizer.zero_grad()
        loss = pipeline.step(*batch)
        norm = pipeline.clip_grad_norm_(drawn.max_norm) if drawn.max_norm else torch.zeros(())
        optimizer.step()
        found.append((loss.item(), norm.item()))
    may_keep = schedules.most_in_flight([action for action in pipeline.actions if action.kind != "W"])
    return found, {name: p.detach() for name, p in own.items()}, pipeline.most_kept, may_keep


def in_one_process(drawn: Drawn, stages: int) -> tuple[list, dict[str, torch.Tensor]]:
    model = drawn.layers(stages)
    optimizer, found = torch.optim.AdamW(model.parameters(), **ADAMW), []
    for x, y in drawn.batches(stages):
        optimizer.zero_grad()
        loss, norm = F.mse_loss(model(x), y), torch.zeros(())
        if loss.requires_grad:
            loss.backward()
        if drawn.max_norm:
            norm = nn.utils.clip_grad_norm_(model.parameters(), drawn.max_norm)
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return found, dict(model.named_parameters())


@tried(60)
@given(worlds(), drawn)
def test_a_pipeline_trains_as_one_process_in_any_order(four_ranks, world, drawn):
    expected, parameters = in_one_process(drawn, len(world.ranks))
    for found, own, kept, may_keep in world.run(pipelined, drawn):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=TOLERANCE)  # 1e-6 is in the factor of clipping
        assert kept == may_keep
        for name, parameter in own.items():
            torch.testing.assert_close(parameter, parameters[name].detach(), rtol=1e-6, atol=TOLERANCE)


def asleep(group, order: Schedule) -> list:
    return sleeping_pipeline(order, 0.008, 0.016, group=group)


@tried(25)
@given(worlds(), st.integers(1, 6), st.booleans(), seeds)
def test_sleeping_ranks_run_any_order_to_its_end(four_ranks, world, micro_batches, postpones, seed):
    order = random_order(len(world.ranks), micro_batches, postpones, seed)
    for actions, spans in zip(order, world.run(asleep, order), strict=True):
        assert [action for action, _, _ in spans] == actions
        times = [time for _, began, ended in spans for time in (began, ended)]
        assert times == sorted(times)
