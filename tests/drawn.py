"""Strategies of the property tests: worlds, tensors, models and trainings, small enough that failures shrink well.

`@tried(20)` runs 20 examples, the same ones each time. PROPERTIES=30 runs 30 times as many, different ones each time,
and prints how to reproduce a failing one.
"""

import os
from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import engine

from shared import ranks
from shared.deadlines import scaled
from tests.drawn_trainings import Block, Net, Training

MORE = int(os.environ.get("PROPERTIES", "0"))
MB = 2**20

world_sizes = st.sampled_from([1, 2, 3, 4, 3, 4])  # more of the sizes at which subgroups are awkward
seeds = st.integers(0, 2**16)

engine.MAX_SHRINKING_SECONDS = 60  # not 300, because an example that hangs takes seconds


def tried(examples: int):
    """Run a property on that many examples."""
    return settings(
        max_examples=examples * max(1, MORE),
        deadline=None,  # a loaded machine takes longer, and the ranks have their own deadline
        derandomize=not MORE,
        database=None,
        print_blob=bool(MORE),
        phases=[phase for phase in Phase if phase is not Phase.explain],  # explaining runs many more examples
        # All examples share the fixture's ranks, which are healed after a failure.
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )


# -- worlds


@dataclass(frozen=True)
class World:
    """A process group: the world of `size` ranks, or a subgroup of it."""

    size: int
    members: tuple[int, ...] | None

    @property
    def ranks(self) -> list[int]:
        return list(range(self.size) if self.members is None else self.members)

    def run(self, fn, *args) -> list:
        """Call fn(group, *args) on each rank of the group and return the results in rank order."""
        with ranks.world(self.size):
            results = ranks.run(_in_group, self.members, fn, args, timeout_s=DEADLINE_S)
        return [results[rank] for rank in self.ranks]


DEADLINE_S = scaled(20.0)


def _in_group(members: tuple[int, ...] | None, fn, args: tuple):
    import torch.distributed as dist

    group = None if members is None else dist.new_group(list(members))
    return None if group is dist.GroupMember.NON_GROUP_MEMBER else fn(group, *args)


@st.composite
def worlds(draw) -> World:
    size = draw(world_sizes)
    some = [st.sets(st.integers(0, size - 1), min_size=least).map(sorted).map(tuple) for least in (1, min(2, size))]
    members = draw(st.one_of(st.none(), *some))
    return World(size, members)


# -- tensors


# The largest integers of which each dtype can add four exactly.
LARGEST = {
    torch.float64: 2**50,
    torch.float32: 2**21,
    torch.bfloat16: 2**5,
    torch.float16: 2**8,
    torch.int64: 2**60,
    torch.int32: 2**28,
}
shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)


@dataclass(frozen=True)
class Values:
    """A tensor of integers, different on each rank. Their sums are exact in this dtype, but not in a smaller one."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str  # "rows", "columns" (transposed) or "strided" (every other element of a larger tensor)
    seed: int

    def on(self, rank: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(self.seed + rank)
        largest = LARGEST[self.dtype]
        numbers = torch.randint(-largest, largest + 1, self.shape, generator=draw).to(self.dtype)
        if self.layout == "columns":
            return numbers.movedim(0, -1).contiguous().movedim(-1, 0) if numbers.dim() else numbers
        if self.layout == "strided":
            memory = torch.full((*self.shape, 2), 77).to(self.dtype)
            memory[..., 0] = numbers
            return memory[..., 0]
        return numbers


def values(shapes=shapes) -> st.SearchStrategy[Values]:
    return st.builds(
        Values, shapes, st.sampled_from(list(LARGEST)), st.sampled_from(["rows", "columns", "strided"]), seeds
    )


# -- models and trainings


@st.composite
def nets(draw, plain: bool = False) -> Net:
    """Draw a model.

    Args:
        draw: Hypothesis's function.
        plain: Whether every parameter is trainable, not shared, and used once by all samples.
    """
    blocks = []
    for index in range(draw(st.integers(0, 4))):
        inner, bias = draw(st.integers(1, 9)), draw(st.booleans())
        if plain:
            blocks.append(Block(inner, bias))
            continue
        tied_to = draw(st.none() | st.integers(0, index - 1)) if index else None
        frozen = draw(st.sampled_from(["", "", "up", "all"]))
        road = draw(st.sampled_from(["all", "all", "some", "none"]))
        blocks.append(Block(inner, bias, frozen, road, tied_to, calls=draw(st.sampled_from([1, 1, 2]))))
    first_frozen = not plain and draw(st.booleans())
    return Net(draw(st.integers(1, 5)), tuple(blocks), first_frozen, draw(seeds))


caps_mb = st.sampled_from([0.0, 100 / MB, 300 / MB, 1000 / MB, 25.0])

# With a larger eps, a gradient that is almost 0 does not become a step of size lr.
OPTIMIZERS = {
    "SGD": st.fixed_dictionaries({}, optional={"momentum": st.sampled_from([0.5, 0.9])}),
    "Adam": st.fixed_dictionaries({"eps": st.just(1e-3)}, optional={"amsgrad": st.just(True)}),
    "AdamW": st.just({"eps": 1e-3}),
}


@st.composite
def trainings(
    draw, wrappers: list[str], plain: bool = False, optimizers=tuple(OPTIMIZERS), least_steps: int = 1
) -> Training:
    optimizer, wrapper = draw(st.sampled_from(optimizers)), draw(st.sampled_from(wrappers))
    return Training(
        wrapper=wrapper,
        net=draw(nets(plain)),
        rates=tuple(draw(st.lists(st.sampled_from([0.01, 0.05, 0.1]), min_size=least_steps, max_size=4))),
        optimizer=optimizer,
        options=tuple(sorted(draw(OPTIMIZERS[optimizer]).items())),
        accumulate=draw(st.integers(1, 3)),
        no_sync=draw(st.booleans()),
        cap_mb=draw(caps_mb),
        max_norm=draw(st.none() | st.sampled_from([0.01, 0.3, 100.0])),
        second_group=draw(st.booleans()),
        set_to_none=draw(st.booleans()),
        reshard_after_forward=draw(st.booleans()),
        prefetch=draw(st.integers(0, 2)),
        overlap=wrapper == "zero1" and draw(st.booleans()),
    )
