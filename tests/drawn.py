"""What property tests draw: worlds, tensors, models and trainings, small enough that a failure shrinks to a few lines.

`@tried(20)` tries 20 examples, the same ones each time. PROPERTIES=30 tries 30 times as many, other ones each time, and
prints how to draw the one that fails again.
"""

import os
from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import engine

from shared import ranks
from shared.deadlines import scaled
from tests.drawn_models import Block, Net
from tests.drawn_trainings import Training

MORE = int(os.environ.get("PROPERTIES", "0"))
MB = 2**20

world_sizes = st.sampled_from([1, 2, 3, 4, 3, 4])  # more of those where subgroups are awkward
seeds = st.integers(0, 2**16)

engine.MAX_SHRINKING_SECONDS = 60  # not 300: an example that hangs takes seconds, and a phase of tests has a deadline


def tried(examples: int):
    """Try a property on that many examples."""
    return settings(
        max_examples=examples * max(1, MORE),
        deadline=None,  # a loaded machine takes longer, and ranks have a deadline of their own
        derandomize=not MORE,
        database=None,
        print_blob=bool(MORE),
        phases=[each for each in Phase if each is not Phase.explain],  # it runs many more examples, to say little
        # The fixture's ranks stay from example to example: what fails heals them.
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )


# -- worlds


@dataclass(frozen=True)
class World:
    """A process group: `size` ranks, or those `members` of them."""

    size: int
    members: tuple[int, ...] | None

    @property
    def ranks(self) -> list[int]:
        return list(range(self.size) if self.members is None else self.members)

    def run(self, fn, *args) -> list:
        """Call fn(group, *args) on each rank of the group. → results in rank order"""
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


# The largest whole number of which four add up exactly.
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
    """A tensor of whole numbers, another one on each rank: their sums are exact, in their dtype and in no lower one."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    laid_out: str  # "rows", "columns" (transposed) or "apart" (every other number of a larger tensor)
    seed: int

    def on(self, rank: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(self.seed + rank)
        largest = LARGEST[self.dtype]
        numbers = torch.randint(-largest, largest + 1, self.shape, generator=draw).to(self.dtype)
        if self.laid_out == "columns":
            return numbers.movedim(0, -1).contiguous().movedim(-1, 0) if numbers.dim() else numbers
        if self.laid_out == "apart":
            room = torch.full((*self.shape, 2), 77).to(self.dtype)
            room[..., 0] = numbers
            return room[..., 0]
        return numbers


def values(shapes=shapes) -> st.SearchStrategy[Values]:
    return st.builds(
        Values, shapes, st.sampled_from(list(LARGEST)), st.sampled_from(["rows", "columns", "apart"]), seeds
    )


# -- models and trainings


@st.composite
def nets(draw, plain: bool = False) -> Net:
    """plain: every parameter is trained, used by all samples, once, and its own."""
    blocks = []
    for place in range(draw(st.integers(0, 4))):
        inner, bias = draw(st.integers(1, 9)), draw(st.booleans())
        if plain:
            blocks.append(Block(inner, bias))
            continue
        tied_to = draw(st.none() | st.integers(0, place - 1)) if place else None
        frozen = draw(st.sampled_from(["", "", "up", "all"]))
        road = draw(st.sampled_from(["all", "all", "some", "none"]))
        blocks.append(Block(inner, bias, frozen, road, tied_to, calls=draw(st.sampled_from([1, 1, 2]))))
    first_frozen = not plain and draw(st.booleans())
    return Net(draw(st.integers(1, 5)), tuple(blocks), first_frozen, draw(seeds))


caps_mb = st.sampled_from([0.0, 100 / MB, 300 / MB, 1000 / MB, 25.0])

# eps: what is almost 0 is not blown up to a step of lr
OPTIMIZERS = {
    "SGD": st.fixed_dictionaries({}, optional={"momentum": st.sampled_from([0.5, 0.9])}),
    "Adam": st.fixed_dictionaries({"eps": st.just(1e-3)}, optional={"amsgrad": st.just(True)}),
    "AdamW": st.just({"eps": 1e-3}),
}


@st.composite
def trainings(
    draw, wrappers: list[str], plain: bool = False, optimizers=tuple(OPTIMIZERS), least_steps: int = 1
) -> Training:
    optimizer = draw(st.sampled_from(optimizers))
    return Training(
        wrapper=draw(st.sampled_from(wrappers)),
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
    )
