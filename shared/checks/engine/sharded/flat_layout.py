"""Judging FlatParameters: parameters that lie side by side in one tensor, of which each rank owns an N-th."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import first_difference
from shared.checks.engine.footprint import living_bytes
from shared.checks.engine.framework import Attempt, Wrong
from shared.checks.engine.latecomers import Meeting, launches_unasked
from shared.checks.engine.sharded.wire import Flat, judge_rounds
from shared.checks.engine.subgroups import SUBGROUPS, called_alone, join_subgroup, members_of
from shared.wire import instrumentation

_LOOK_AT_VALUES = "Look at: who has put the parameters' values into flat?"


@dataclass(frozen=True)
class Shapes:
    """What parameters there are. channels_last: those of four dimensions do not lie in row order."""

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype = torch.float32
    in_subgroup: bool = False

    def values(self, seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        drawn = [torch.randn(shape, generator=generator).to(self.dtype) for shape in self.shapes]
        return [each.to(memory_format=torch.channels_last) if each.dim() == 4 else each for each in drawn]

    @property
    def numbers(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes)

    def __str__(self) -> str:
        return f"parameters of {', '.join(str(list(shape)) for shape in self.shapes)}"


def draw_shapes(attempt: Attempt) -> list[Shapes]:
    """Sizes that N divides and that it does not, fewer numbers than ranks, and every kind of parameter."""
    size, some = attempt.world_size, attempt.random.randint
    return [
        Shapes(((5,), (2, 2), (2,))),
        Shapes(((some(1, 4), 3), (), (0,), (3, 2, 2, 2), (some(1, 9),)), torch.float64),
        Shapes(((some(2, 5) * size,),), torch.bfloat16),
        Shapes(((max(1, size - 2),),)),
    ]


def _in_subgroup(attempt: Attempt) -> list[Shapes]:
    return [Shapes(((4,), (3, 2)), in_subgroup=True)] if attempt.world_size in SUBGROUPS else []


def probe_layout(flat_parameters, shapes: Shapes, seed: int) -> dict:
    """Lay parameters out, look at every view, then write and gather. → what was there"""
    group, member = join_subgroup(shapes.in_subgroup)
    if not member:
        return {"outside": True}
    parameters = [nn.Parameter(each.to(device_here())) for each in shapes.values(seed)]
    home = flat_parameters(parameters, group)
    own = home.own(home.flat)
    counted = torch.arange(home.flat.numel(), device=device_here())
    fresh = home.new_flat()
    found = {
        "flat": home.flat.detach().cpu().clone(),
        "flat is plain": not home.flat.requires_grad,
        "values": [each.detach().cpu().clone() for each in parameters],
        "shard": home.shard.detach().cpu().clone(),
        "shard is a parameter": isinstance(home.shard, nn.Parameter) and home.shard.requires_grad,
        "shard is a view": _same_memory(home.shard, own),
        "own is a view": _lies_in(own, home.flat),
        "own": home.own(counted).cpu().clone(),
        "slices": [each.cpu().clone() for each in home.slices_of(counted)],
        "slices are views": all(_lies_in(each, counted) for each in home.slices_of(counted)),
        "fresh": fresh.detach().cpu().clone(),
        "fresh is new": fresh.untyped_storage().data_ptr() != home.flat.untyped_storage().data_ptr(),
    }
    with torch.no_grad():
        home.flat.copy_(torch.arange(home.flat.numel()) % 100)
    found["written"] = [each.detach().cpu().clone() for each in parameters]
    mine = found["shard"].flatten() + dist.get_rank(group)
    with torch.no_grad():
        home.flat.fill_(-1)
        home.shard.copy_(mine.view(home.shard.shape))
    with instrumentation.listening() as calls:
        handle = home.gather()
        found["handle"] = hasattr(handle, "wait")
        if found["handle"]:
            handle.wait()
    return found | {
        "calls": calls,
        "sent": mine,
        "gathered": home.flat.detach().cpu().clone(),
        "computed with": [each.detach().cpu().clone() for each in parameters],
    }


def _lies_in(part: torch.Tensor, whole: torch.Tensor) -> bool:
    return part.numel() == 0 or part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape


def _try(attempt: Attempt, shapes: Shapes) -> tuple[dict[int, dict], dict[int, list[torch.Tensor]]]:
    """→ by global rank: what was found, and its parameters' values"""
    seeds = [attempt.draw_seed() for _ in range(attempt.world_size)]
    members = members_of(attempt, shapes.in_subgroup)
    context = called_alone(attempt) if shapes.in_subgroup else str(shapes)
    found = attempt.run(probe_layout, shapes, per_rank=[(seed,) for seed in seeds], context=context)
    return {rank: found[rank] for rank in members}, {rank: shapes.values(seeds[rank]) for rank in members}


def _expect(rank: int, said: str, found: torch.Tensor, want: torch.Tensor, hint: str) -> None:
    if found.dtype != want.dtype:
        raise Wrong({rank: f"{said} is of {found.dtype}; expected {want.dtype}"}, hint)
    if not torch.equal(found, want):
        difference = first_difference(found, want, 0.0)
        raise Wrong({rank: f"{said}: {difference}"}, hint)


def _cut(flat: torch.Tensor, shapes: Shapes) -> list[torch.Tensor]:
    sizes = [torch.Size(shape).numel() for shape in shapes.shapes]
    return [part.view(shape) for part, shape in zip(flat[: sum(sizes)].split(sizes), shapes.shapes, strict=True)]


def parameters_lie_side_by_side(attempt: Attempt) -> None:
    for shapes in [*draw_shapes(attempt), *_in_subgroup(attempt)]:
        found, values = _try(attempt, shapes)
        size = len(found)
        part = -(-shapes.numbers // size)
        for place, (rank, result) in enumerate(found.items()):
            flat = torch.cat([each.flatten() for each in values[rank]])
            flat = torch.cat([flat, flat.new_zeros(size * part - len(flat))])
            counted = torch.arange(len(flat))
            said = f"{shapes} on {size} rank{'s' if size > 1 else ''}"
            empty = result["flat"].shape == flat.shape and not result["flat"].any()
            look = _LOOK_AT_VALUES if empty else "Look at: how many numbers must every rank get?"
            _expect(rank, f"{said}: flat", result["flat"], flat, look)
            _expect(rank, f"{said}: new_flat()", result["fresh"], torch.zeros_like(flat), "")
            look = "Look at: where does the part of a rank begin, and where does it end?"
            _expect(rank, f"{said}: own(0, 1, 2, …)", result["own"], counted.view(size, part)[place], look)
            _expect(rank, f"{said}: shard", result["shard"], flat.view(size, part)[place], look)
            look = "Look at: where does a parameter's slice begin?"
            for number, want in enumerate(_cut(counted, shapes)):
                _expect(rank, f"{said}: slices_of(0, 1, 2, …)[{number}]", result["slices"][number], want, look)


def the_model_computes_with_them(attempt: Attempt) -> None:
    """And every tensor of the layout is a view."""
    claims = {
        "shard is a parameter": "shard is no nn.Parameter, so an optimizer will not take it",
        "shard is a view": "shard has memory of its own: what is written into it does not come to flat",
        "own is a view": "own(flat) is a copy: what is written into it does not come to flat",
        "slices are views": "slices_of(flat) are copies",
        "fresh is new": "new_flat() gives flat itself",
        "flat is plain": "flat records gradients",
    }
    for shapes in draw_shapes(attempt):
        found, values = _try(attempt, shapes)
        for rank, result in found.items():
            for claim, otherwise in claims.items():
                if not result[claim]:
                    raise Wrong({rank: f"{shapes}: {otherwise}"}, "Look at: which calls give a view, and which a copy?")
            counted = (torch.arange(len(result["flat"])) % 100).to(shapes.dtype)
            for number, (value, want) in enumerate(zip(values[rank], _cut(counted, shapes), strict=True)):
                said = f"{shapes}: parameter {number}"
                _expect(rank, f"{said} after it moved", result["values"][number], value, "Its values must stay.")
                hint = "Look at: what does the model compute with, and in whose memory is it?"
                _expect(rank, f"{said}, 0, 1, 2, … written into flat", result["written"][number], want, hint)


def gather_collects_every_shard(attempt: Attempt) -> None:
    for shapes in [*draw_shapes(attempt), *_in_subgroup(attempt)]:
        found, _ = _try(attempt, shapes)
        want = torch.cat([result["sent"] for result in found.values()])
        for rank, result in found.items():
            if not result["handle"]:
                raise Wrong({rank: "gather() gives back nothing to wait on; expected a handle with wait()"})
            hint = "Look at: which tensor is sent, and into which does it arrive?"
            _expect(rank, f"{shapes}: flat after gather()", result["gathered"], want, hint)
            for number, part in enumerate(_cut(want, shapes)):
                _expect(rank, f"{shapes}: parameter {number} after gather()", result["computed with"][number], part, "")
        calls = {rank: result["calls"] for rank, result in found.items()}
        judge_rounds(calls, [Flat(shapes.numbers, shapes.dtype.itemsize)], 1, f"{shapes}, gather()")


def probe_footprint(flat_parameters, shapes: Shapes, seed: int) -> int:
    """→ bytes of all that lives when parameters have moved, and have been gathered once"""
    before_bytes = living_bytes()
    parameters = [nn.Parameter(each.to(device_here())) for each in shapes.values(seed)]
    home = flat_parameters(parameters, None)
    home.gather().wait()
    return living_bytes() - before_bytes


def no_copy_stays(attempt: Attempt) -> None:
    shapes = Shapes(((300, 100), (70,), (200, 50)))
    per_rank = [(attempt.draw_seed(),) for _ in range(attempt.world_size)]
    most = Flat(shapes.numbers, 4).filled_bytes(attempt.world_size)
    for rank, held_bytes in enumerate(attempt.run(probe_footprint, shapes, per_rank=per_rank)):
        if held_bytes > 1.01 * most:
            said = f"{shapes}: {held_bytes:,} bytes are held; expected {most:,}, those of flat"
            raise Wrong({rank: said}, "Look at: who still holds the memory in which the parameters were?")


def probe_begins(flat_parameters, shapes: Shapes, late: int, token: int, seed: int) -> list[int]:
    """Gather; one rank begins only when the others' gather() has come back. → there, whose has not"""
    home = flat_parameters([nn.Parameter(each.to(device_here())) for each in shapes.values(seed)], None)
    meeting = Meeting(f"gather{token}")
    with launches_unasked():
        missing = meeting.missing() if dist.get_rank() == late else []
        handle = home.gather()
        if dist.get_rank() != late:
            meeting.come()
        handle.wait()
    return missing


def gather_only_begins(attempt: Attempt) -> None:
    late = attempt.random.randrange(attempt.world_size)
    per_rank = [(attempt.draw_seed(),) for _ in range(attempt.world_size)]
    shapes, token = Shapes(((5,), (2, 2), (2,))), attempt.draw_seed()
    missing = attempt.run(probe_begins, shapes, late, token, per_rank=per_rank)[late]
    if missing:
        said = {rank: f"gather() does not come back before rank {late} has called it too" for rank in missing}
        raise Wrong(said, "Look at: what may the caller do between gather() and wait()?")
