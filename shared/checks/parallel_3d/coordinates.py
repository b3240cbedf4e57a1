"""Judge coordinates, groups and meshes."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from torch.distributed.device_mesh import DeviceMesh

from shared.checks.engine.attempts import Attempt, on_each
from shared.checks.engine.candidate import device_here, error_of
from shared.checks.engine.failures import Wrong
from shared.checks.parallel_3d.cases import AXES, layouts

TABLE = {"dp": 2, "pp": 2, "tp": 2}
_NAMES = ("dp", "pp", "tp", "cp", "ep")
_MOST_RANKS = 64
_MESHES = 12


def describe(sizes: dict[str, int]) -> str:
    return "{" + ", ".join(f'"{axis}": {size}' for axis, size in sizes.items()) + "}"


def coordinates_of(sizes: dict[str, int]) -> list[dict[str, int]]:
    """Return the coordinates of all ranks, by counting."""
    return [dict(zip(sizes, each, strict=True)) for each in product(*map(range, sizes.values()))]


def draw_sizes(attempt: Attempt) -> dict[str, int]:
    """Draw a mesh of one to four axes."""
    while True:
        names = attempt.random.sample(_NAMES, attempt.random.randint(1, 4))
        sizes = {name: attempt.random.randint(1, 6) for name in names}
        if math.prod(sizes.values()) <= _MOST_RANKS:
            return sizes


def probe_coordinates(coordinates: Callable, meshes: list[dict[str, int]]) -> list[list[dict]]:
    """Return the coordinates of all ranks of each mesh."""
    return [[_kept(coordinates, rank, sizes) for rank in range(math.prod(sizes.values()))] for sizes in meshes]


def probe_ranks_along(ranks_along: Callable, asked: list[tuple]) -> list[list[int]]:
    """Return the ranks of each group that is asked for."""
    return [list(_kept(ranks_along, axis, rank, sizes)) for axis, rank, sizes in asked]


def _kept(piece: Callable, *arguments):
    """Call a piece, whose last argument is `sizes`, and check that it leaves this dictionary as it is."""
    *others, sizes = arguments
    given = dict(sizes)
    found = piece(*others, given)
    if list(given.items()) != list(sizes.items()):
        after = describe(given)
        raise AssertionError(f"`sizes` was {describe(sizes)}, and is {after} after the call; expected no change")
    return found


def judge_coordinates(attempt: Attempt, meshes: list[dict[str, int]]) -> None:
    """Compare the coordinates of every rank.

    Raises:
        Wrong: If they differ, or are in another order.
    """
    for sizes, found in zip(meshes, attempt.run(probe_coordinates, meshes)[0], strict=True):
        expected = coordinates_of(sizes)
        for rank, (own, right) in enumerate(zip(found, expected, strict=True)):
            if own == right and list(own) == list(right):
                continue
            message = f"in {describe(sizes)}, rank {rank} has the coordinates {own}, expected {right}"
            hint = "Hint: which axis changes fastest when the rank grows by 1, and what is left for the others?"
            reverse = coordinates_of(dict(reversed(sizes.items())))
            if own == right:
                hint = "Hint: in which order should the axes be in the result?"
            elif len(set(map(str, expected))) > 1 and found == [{a: each[a] for a in sizes} for each in reverse]:
                hint = "Hint: is the first axis of `sizes` the innermost one, or the last?"
            raise Wrong(message, hint)


the_table_comes_out = on_each(judge_coordinates, [TABLE])


def drawn_meshes(attempt: Attempt) -> None:
    judge_coordinates(attempt, [draw_sizes(attempt) for _ in range(_MESHES)])


def judge_groups(attempt: Attempt, meshes: list[dict[str, int]]) -> None:
    """Compare the ranks of every group.

    Raises:
        Wrong: If they differ.
    """
    asked = [(axis, rank, sizes) for sizes in meshes for axis in sizes for rank in range(math.prod(sizes.values()))]
    for (axis, rank, sizes), found in zip(asked, attempt.run(probe_ranks_along, asked)[0], strict=True):
        places = coordinates_of(sizes)
        fixed = {name: place for name, place in places[rank].items() if name != axis}
        expected = [each for each, place in enumerate(places) if fixed.items() <= place.items()]
        if found == expected:
            continue
        message = f"in {describe(sizes)}, rank {rank} has the group {found} along {axis}, expected {expected}"
        hint = "Hint: which coordinates do all ranks of this group share, and which one differs?"
        if sorted(found) == expected:
            hint = "Hint: in which order should the ranks be?"
        elif sorted(found) == sorted(set(expected) - {rank}):
            hint = "Hint: does the rank itself belong to its group?"
        raise Wrong(message, hint)


groups_of_the_table = on_each(judge_groups, [TABLE])


def groups_of_drawn_meshes(attempt: Attempt) -> None:
    judge_groups(attempt, [draw_sizes(attempt) for _ in range(_MESHES)])


# -- the mesh


@dataclass
class Mesh:
    names: tuple[str, ...]
    ranks: list
    device_type: str
    own_device_type: str  # where this rank computes


def probe_mesh(make_mesh: Callable, sizes: dict[str, int]) -> Mesh:
    """Make a mesh. Returns what this rank sees of it."""
    mesh = make_mesh(**sizes)
    if not isinstance(mesh, DeviceMesh):
        raise AssertionError(f"make_mesh() returned a {type(mesh).__name__}; expected a DeviceMesh")
    return Mesh(tuple(mesh.mesh_dim_names or ()), mesh.mesh.tolist(), mesh.device_type, device_here().type)


def meshes_have_tp_innermost(attempt: Attempt) -> None:
    for sizes in layouts(attempt.world_size):
        context = "make_mesh({})".format(", ".join(f"{axis}={size}" for axis, size in sizes.items()))
        by_coordinate = {tuple(place.values()): rank for rank, place in enumerate(coordinates_of(sizes))}
        dp, pp, tp = sizes.values()
        expected = [[[by_coordinate[d, s, t] for t in range(tp)] for s in range(pp)] for d in range(dp)]
        for rank, found in enumerate(attempt.run(probe_mesh, sizes, context=context)):
            if found.names != AXES:
                message = f"{context}: its axes are called {found.names}, expected {AXES}"
                raise Wrong({rank: message}, "Hint: what does `mesh_dim_names` get, and in which order?")
            if found.ranks != expected:
                message = f"{context} is {found.ranks}, expected {expected}"
                raise Wrong({rank: message}, "Hint: which two ranks share a host, and along which axis do they differ?")
            if found.device_type != found.own_device_type:
                message = f"{context} has the device type {found.device_type}, expected {found.own_device_type}"
                raise Wrong({rank: message}, "Hint: on which device does this rank compute?")


def probe_rejected_mesh(make_mesh: Callable, sizes: dict[str, int]) -> str:
    """Return the error that it raises, or an empty string."""
    return error_of(lambda: make_mesh(**sizes))


def other_sizes_are_rejected(attempt: Attempt) -> None:
    size = attempt.world_size
    wrong = [{"dp": 1, "pp": 1, "tp": 1}, {"dp": size, "pp": 1, "tp": 2}, {"dp": 2, "pp": 3, "tp": size}]
    for sizes in (each for each in wrong if math.prod(each.values()) != size):
        context = "make_mesh({}) on {} ranks".format(", ".join(f"{axis}={n}" for axis, n in sizes.items()), size)
        for rank, error in enumerate(attempt.run(probe_rejected_mesh, sizes, context=context)):
            if not error:
                hint = "Hint: how many ranks would be left out of this mesh, or missing from it?"
                raise Wrong({rank: f"{context} is accepted; expected a ValueError"}, hint)
            kind, _, message = error.partition(": ")
            missing = [str(number) for number in (*sizes.values(), size) if str(number) not in message]
            if kind != "ValueError" or missing:
                evidence = f"{context} raises {error[:150]}; expected a ValueError that names all four numbers"
                raise Wrong({rank: evidence}, "Hint: which numbers would tell the user what is wrong?")
