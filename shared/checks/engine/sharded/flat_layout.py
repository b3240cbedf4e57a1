"""Check FlatParameter, which stores parameters side by side in one flat tensor, of which each rank owns a shard."""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import first_difference
from shared.checks.engine.failures import Wrong
from shared.checks.engine.footprint import living_bytes
from shared.checks.engine.late_ranks import Rendezvous, launches_unasked, rehearsed
from shared.checks.engine.sharded.wire import Flat, judge_rounds
from shared.checks.engine.subgroups import SUBGROUPS, called_alone, join_subgroup, members_of
from shared.wire import instrumentation

_HINT_ON_VALUES = "Hint: which line copies the parameters' values into flat_param?"
_HINT_ON_ALIASES = "The model does not use flat_param. Hint: whose memory does each parameter use?"
_HINTS_ON_CLAIMS = {
    "shard is trainable": "Hint: how do you create shard?",
    "flat_param is plain": "Hint: should autograd record the copy that fills it?",
}


@dataclass(frozen=True)
class Shapes:
    """The shapes of some parameters."""

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype = torch.float32
    in_subgroup: bool = False

    def values(self, seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(shape, generator=generator).to(self.dtype) for shape in self.shapes]

    @property
    def numbers(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes)

    def __str__(self) -> str:
        return f"parameters of {', '.join(str(list(shape)) for shape in self.shapes)}"


def draw_shapes(attempt: Attempt) -> list[Shapes]:
    """Draw sizes with and without padding, fewer elements than ranks, and parameters of every kind."""
    size, draw = attempt.world_size, attempt.random.randint
    return [
        Shapes(((5,), (2, 2), (2,))),
        Shapes(((draw(1, 4), 3), (), (0,), (3, 2, 2, 2), (draw(1, 9),)), torch.float64),
        Shapes(((draw(2, 5) * size,),), torch.bfloat16),
        Shapes(((max(1, size - 2),),)),
    ]


def _in_subgroup(attempt: Attempt) -> list[Shapes]:
    return [Shapes(((4,), (3, 2)), in_subgroup=True)] if attempt.world_size in SUBGROUPS else []


def flat_parameter_type_of(cls: type) -> type:
    """Find the FlatParameter that a class uses."""
    return defined_beside(cls, "FlatParameter")


def defined_beside(cls: type, name: str):
    """Find a piece that is defined or imported beside a class, or beside one of its base classes."""
    for base in cls.__mro__:
        found = getattr(sys.modules.get(base.__module__), name, None)
        found = found or getattr(base.__init__, "__globals__", {}).get(name)
        if found is not None:
            return found
    raise AssertionError(f"{name} must be defined or imported beside {cls.__name__}")


@dataclass
class Flattened:
    """What is read from a flat parameter and from its parameters, and what an all-gather does with them."""

    flat_param: torch.Tensor
    values: list[torch.Tensor]  # of the parameters
    shard: torch.Tensor
    shard_of: torch.Tensor  # of 0, 1, 2, …
    views: list[torch.Tensor]  # of 0, 1, 2, …
    fresh: torch.Tensor  # what new_flat() returns
    claims: dict[str, bool]  # as in the_model_computes_with_them()
    written: list[torch.Tensor] = field(init=False)  # the parameters after 0, 1, 2, … were written into flat_param
    has_handle: bool = field(init=False)  # whether launch_all_gather() returns something to wait for
    calls: list[instrumentation.Call] = field(init=False)  # of the all-gather
    sent: torch.Tensor = field(init=False)  # this rank's shard in it
    gathered: torch.Tensor = field(init=False)  # flat_param after it
    computed_with: list[torch.Tensor] = field(init=False)  # the parameters after it


def probe_layout(flat_parameter_type, shapes: Shapes, seed: int) -> Flattened | None:
    """Flatten parameters, read every view, then write into them and all-gather.

    Returns:
        Everything that was read, or None on a rank that does not take part.
    """
    group, member = join_subgroup(shapes.in_subgroup)
    if not member:
        return None
    parameters = [nn.Parameter(each.to(device_here())) for each in shapes.values(seed)]
    flat_parameter = flat_parameter_type(parameters, group)
    layout, flat_param, shard = flat_parameter.layout, flat_parameter.flat_param, flat_parameter.shard
    own = layout.shard_of(flat_param)
    counted = torch.arange(flat_param.numel(), device=device_here())
    fresh = layout.new_flat()
    found = Flattened(
        flat_param=flat_param.detach().cpu().clone(),
        values=[each.detach().cpu().clone() for each in parameters],
        shard=shard.detach().cpu().clone(),
        shard_of=layout.shard_of(counted).cpu().clone(),
        views=[each.cpu().clone() for each in layout.views(counted)],
        fresh=fresh.detach().cpu().clone(),
        claims={
            "shard is a parameter": isinstance(shard, nn.Parameter),
            "shard is trainable": shard.requires_grad,
            "shard is a view": _same_memory(shard, own),
            "shard_of is a view": _lies_in(own, flat_param),
            "views are views": all(_lies_in(each, counted) for each in layout.views(counted)),
            "fresh is new": fresh.untyped_storage().data_ptr() != flat_param.untyped_storage().data_ptr(),
            "flat_param is plain": not flat_param.requires_grad,
        },
    )
    with torch.no_grad():
        flat_param.copy_(torch.arange(flat_param.numel()) % 100)
    found.written = [each.detach().cpu().clone() for each in parameters]
    found.sent = mine = found.shard.flatten() + dist.get_rank(group)
    with torch.no_grad():
        flat_param.fill_(-1)
        shard.copy_(mine.view(shard.shape))
    with instrumentation.listening() as found.calls:
        handle = flat_parameter.launch_all_gather()
        found.has_handle = hasattr(handle, "wait")
        if found.has_handle:
            handle.wait()
    found.gathered = flat_param.detach().cpu().clone()
    found.computed_with = [each.detach().cpu().clone() for each in parameters]
    return found


def _lies_in(view: torch.Tensor, whole: torch.Tensor) -> bool:
    return view.numel() == 0 or view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape


def _try(attempt: Attempt, shapes: Shapes) -> tuple[dict[int, Flattened], dict[int, list[torch.Tensor]]]:
    """Run the probe. Returns its results and the parameters' values, both by global rank."""
    seeds = [attempt.draw_seed() for _ in range(attempt.world_size)]
    members = members_of(attempt, shapes.in_subgroup)
    context = called_alone(attempt) if shapes.in_subgroup else str(shapes)
    found = attempt.run(probe_layout, shapes, per_rank=[(seed,) for seed in seeds], context=context)
    return {rank: found[rank] for rank in members}, {rank: shapes.values(seeds[rank]) for rank in members}


def _expect(rank: int, context: str, found: torch.Tensor, expected: torch.Tensor, hint: str) -> None:
    if found.dtype != expected.dtype:
        raise Wrong({rank: f"{context} has dtype {found.dtype}; expected {expected.dtype}"}, hint)
    if not torch.equal(found, expected):
        difference = first_difference(found, expected, 0.0)
        raise Wrong({rank: f"{context}: {difference}"}, hint)


def _cut(flat: torch.Tensor, shapes: Shapes) -> list[torch.Tensor]:
    sizes = [torch.Size(shape).numel() for shape in shapes.shapes]
    return [one.view(shape) for one, shape in zip(flat[: sum(sizes)].split(sizes), shapes.shapes, strict=True)]


def parameters_lie_side_by_side(attempt: Attempt) -> None:
    for shapes in [*draw_shapes(attempt), *_in_subgroup(attempt)]:
        found, values = _try(attempt, shapes)
        size = len(found)
        shard_numel = -(-shapes.numbers // size)
        for index, (rank, result) in enumerate(found.items()):
            flat = torch.cat([each.flatten() for each in values[rank]])
            flat = torch.cat([flat, flat.new_zeros(size * shard_numel - len(flat))])
            counted = torch.arange(len(flat))
            message = f"{shapes} on {size} rank{'s' if size > 1 else ''}"
            empty = result.flat_param.shape == flat.shape and not result.flat_param.any()
            hint = _HINT_ON_VALUES if empty else "Hint: how many elements must each rank's shard have?"
            _expect(rank, f"{message}: flat_param", result.flat_param, flat, hint)
            _expect(rank, f"{message}: layout.new_flat()", result.fresh, torch.zeros_like(flat), "")
            hint = "Hint: where does a rank's shard begin, and where does it end?"
            own = counted.view(size, shard_numel)[index]
            _expect(rank, f"{message}: layout.shard_of([0, 1, 2, …])", result.shard_of, own, hint)
            _expect(rank, f"{message}: shard", result.shard, flat.view(size, shard_numel)[index], hint)
            hint = "Hint: where does a parameter's slice begin?"
            for number, expected in enumerate(_cut(counted, shapes)):
                _expect(rank, f"{message}: layout.views([0, 1, 2, …])[{number}]", result.views[number], expected, hint)


def the_model_computes_with_them(attempt: Attempt) -> None:
    """The layout must return views, not copies."""
    claims = {
        "shard is a parameter": "shard is not an nn.Parameter, so an optimizer does not accept it",
        "shard is trainable": "shard.requires_grad is False, but its optimizer needs a gradient",
        "shard is a view": "shard has memory of its own, so updating it does not change flat_param",
        "shard_of is a view": "layout.shard_of(flat_param) is a copy, so writing into it does not change flat_param",
        "views are views": "layout.views(flat) returns copies, so writing into them does not change flat",
        "fresh is new": "layout.new_flat() returns flat_param itself",
        "flat_param is plain": "flat_param requires a gradient, so it cannot be written to in place",
    }
    for shapes in draw_shapes(attempt):
        found, values = _try(attempt, shapes)
        for rank, result in found.items():
            for claim, otherwise in claims.items():
                if not result.claims[claim]:
                    hint = _HINTS_ON_CLAIMS.get(claim, "Hint: which of these calls return a view, and which a copy?")
                    raise Wrong({rank: f"{shapes}: {otherwise}"}, hint)
            counted = (torch.arange(len(result.flat_param)) % 100).to(shapes.dtype)
            for index, (value, expected) in enumerate(zip(values[rank], _cut(counted, shapes), strict=True)):
                message = f"{shapes}: parameter {index}"
                hint = "The parameters must keep their values. Hint: what is in flat_param when .data is replaced?"
                _expect(rank, f"{message} after it was moved into flat_param", result.values[index], value, hint)
                message = f"{message}, after 0, 1, 2, … were written into flat_param"
                _expect(rank, message, result.written[index], expected, _HINT_ON_ALIASES)


def every_shard_is_gathered(attempt: Attempt) -> None:
    for shapes in [*draw_shapes(attempt), *_in_subgroup(attempt)]:
        found, _ = _try(attempt, shapes)
        expected = torch.cat([result.sent for result in found.values()])
        for rank, result in found.items():
            if not result.has_handle:
                message = "launch_all_gather() returns nothing to wait for; expected a handle with wait()"
                raise Wrong({rank: message}, "Hint: what does launch_all_gather() from lab 01 return?")
            hint = "Hint: which tensor do you send, and which one receives the result?"
            message = f"{shapes}, after launch_all_gather() and wait()"
            _expect(rank, f"{message}: flat_param", result.gathered, expected, hint)
            for index, value in enumerate(_cut(expected, shapes)):
                parameter = result.computed_with[index]
                _expect(rank, f"{message}: parameter {index}", parameter, value, _HINT_ON_ALIASES)
        calls = {rank: result.calls for rank, result in found.items()}
        judge_rounds(calls, [Flat(shapes.numbers, shapes.dtype.itemsize)], 1, f"{shapes}, launch_all_gather()")


def probe_footprint(flat_parameter_type, shapes: Shapes, seed: int) -> tuple[int, bool]:
    """Flatten parameters and all-gather them.

    Returns:
        The bytes of all new tensors, and whether all parameters are views of flat_param.
    """
    before_bytes = living_bytes()
    parameters = [nn.Parameter(each.to(device_here())) for each in shapes.values(seed)]
    flat_parameter = flat_parameter_type(parameters, None)
    flat_parameter.launch_all_gather().wait()
    aliased = all(_lies_in(each, flat_parameter.flat_param) for each in parameters)
    return living_bytes() - before_bytes, aliased


def no_copy_stays(attempt: Attempt) -> None:
    shapes = Shapes(((300, 100), (70,), (200, 50)))
    per_rank = [(attempt.draw_seed(),) for _ in range(attempt.world_size)]
    most = Flat(shapes.numbers, 4).filled_bytes(attempt.world_size)
    for rank, (held_bytes, aliased) in enumerate(attempt.run(probe_footprint, shapes, per_rank=per_rank)):
        if held_bytes > 1.01 * most:
            message = f"{shapes}: {held_bytes:,} bytes are held; expected {most:,}, the size of flat_param"
            hint = "Hint: which attribute still refers to the memory that the parameters used before?"
            if held_bytes - most == most // attempt.world_size:
                hint = "It is exactly one shard too much. Hint: whose memory does `shard` use?"
            raise Wrong({rank: message}, hint if aliased else _HINT_ON_ALIASES)


def hint_at_wait(judge: Callable[[Attempt], None]) -> Callable[[Attempt], None]:
    """Hint at wait() if ranks hang: a second wait() for a transfer of lab 01 never returns."""

    @functools.wraps(judge)
    def judged(attempt: Attempt) -> None:
        try:
            judge(attempt)
        except Wrong as wrong:
            if wrong.hangs:
                wrong.hint = (
                    f"{wrong.hint or 'Hint:'} Does launch_all_gather() call wait(), although its caller will do so?"
                )
            raise

    return judged


@rehearsed
def probe_launch(flat_parameter_type, shapes: Shapes, late: int, token: int, seed: int) -> list[int]:
    """Let one rank launch only after the others' call has returned. Returns, on that rank, those whose call has not."""
    parameters = [nn.Parameter(each.to(device_here())) for each in shapes.values(seed)]
    flat_parameter = flat_parameter_type(parameters, None)
    meeting = Rendezvous(f"gather{token}")
    with launches_unasked():
        missing = meeting.missing() if dist.get_rank() == late else []
        handle = flat_parameter.launch_all_gather()
        if dist.get_rank() != late:
            meeting.arrive()
        handle.wait()
    return missing


def the_launch_returns_at_once(attempt: Attempt) -> None:
    late = attempt.random.randrange(attempt.world_size)
    per_rank = [(attempt.draw_seed(),) for _ in range(attempt.world_size)]
    shapes, token = Shapes(((5,), (2, 2), (2,))), attempt.draw_seed()
    missing = attempt.run(probe_launch, shapes, late, token, per_rank=per_rank)[late]
    if missing:
        message = f"launch_all_gather() does not return until rank {late} has called it, too"
        hint = "So the caller cannot compute anything in the meantime. Hint: which line calls wait()?"
        raise Wrong(dict.fromkeys(missing, message), hint)
