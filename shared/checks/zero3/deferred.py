"""Judge Materializer: this rank's shard has the values that belong to each name, and nothing else is materialized.

The kernel draws the expected values without the student's code. All values are drawn on the CPU, so that ranks on GPUs
draw the same.
"""

import random
import zlib
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn

from shared import memory
from shared.checks.engine.attempts import Attempt, on_each
from shared.checks.engine.candidate import device_here, earlier_piece
from shared.checks.engine.compare import describe_calls, first_difference
from shared.checks.engine.failures import Wrong
from shared.checks.engine.footprint import living_bytes, settled_bytes
from shared.checks.engine.sharded.flat_layout import Shapes, draw_shapes
from shared.checks.engine.sharded.unit_memory import SLACK
from shared.checks.engine.subgroups import SUBGROUPS, called_alone, join_subgroup, members_of
from shared.checks.models import unit_models
from shared.wire import instrumentation

_HINT_ON_SEEDS = "Hint: what does the seed of a tensor depend on, and when is it set?"
_HINT_ON_SLICES = "Hint: where does the shard begin and end, counted from the first element of that parameter?"
_HINT_ON_GROUPS = "Hint: which of the group's shards is this rank's?"
_HINT_ON_PADDING = "Hint: which elements of the shard does no parameter write?"
_HINT_ON_CALLS = "Hint: how can you tell, before you draw a parameter, that none of its elements are in the shard?"
_HINT_ON_MEMORY = "Hint: which tensors hold values of parameters that are already in the shard, or not in it at all?"
_HINT_ON_LAST = "Hint: which variable still refers to the values of the last parameter when the next one is drawn?"
_HINT_ON_DTYPES = "They are rounded to float32. Hint: which dtype is given to the tensor that initialize() fills?"
_HINT_ON_PLAIN = "Hint: which function creates a tensor of the same shape and dtype on another device?"
_NOT_PLAIN = "value_of() does not return a plain tensor on self.device, without requires_grad"
_LARGE = "Deep"


def fill(name: str, tensor: torch.Tensor) -> None:
    """Draw values from torch's global generator, as the functions of torch.nn.init do."""
    if tensor.is_floating_point():
        tensor.copy_(torch.rand(tensor.shape, dtype=torch.float64) - 0.5)
    else:
        tensor.copy_(torch.randint(2**53, 2**62, tensor.shape))


def fill_in_place(name: str, tensor: torch.Tensor) -> None:
    """Draw values without a second tensor, so that bytes can be counted."""
    tensor.uniform_()


def _build(what: str | Shapes, device: str) -> nn.Module:
    """Build a model by its name, or a list of parameters."""
    if isinstance(what, str):
        return unit_models.build(what, 0, device=device)
    empty = [torch.empty(shape, dtype=what.dtype, device=device) for shape in what.shapes]
    return nn.ParameterList(each.to(memory_format=torch.channels_last) if each.dim() == 4 else each for each in empty)


def _describe(what: str | Shapes) -> str:
    return unit_models.describe(what) if isinstance(what, str) else str(what)


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by their first names."""
    return dict(chain(module.named_parameters(), module.named_buffers()))


def _flat_tensors(module: nn.Module) -> list[dict[str, nn.Parameter]]:
    """Group the parameters as shard_into_units does: a flat tensor has one dtype, and is trained as a whole or not."""
    kinds: dict = {}
    for name, parameter in module.named_parameters():
        kinds.setdefault((parameter.dtype, parameter.requires_grad), {})[name] = parameter
    return list(kinds.values())


def _expected(what: str | Shapes, seed: int) -> dict[str, torch.Tensor]:
    """Draw the value of each tensor, by its first name."""
    values = {name: torch.empty_like(each, requires_grad=False) for name, each in _tensors(_build(what, "cpu")).items()}
    for name, value in values.items():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(f"{seed}.{name}".encode()))
            fill(name, value)
    return values


# -- shard_of


@dataclass
class Materialized:
    """What was found for one flat tensor."""

    calls: list[instrumentation.Call]
    drawn: list[str]  # the names that were drawn for the shard
    shard: torch.Tensor | None  # None if it is not a tensor on the right device
    on_meta: bool  # whether the parameters are still on the meta device


def probe_shards(materializer_class, what: str | Shapes, seed: int, in_subgroup: bool) -> list[Materialized]:
    """Materialize this rank's shard of each flat tensor."""
    group, member = join_subgroup(in_subgroup)
    if not member:
        return []
    module, drawn, found = _build(what, "meta"), [], []

    def initialize(name: str, tensor: torch.Tensor) -> None:
        drawn.append(name)
        fill(name, tensor)

    materializer = materializer_class(module, initialize, device_here(), seed)
    for parameters in _flat_tensors(module):
        drawn.clear()
        layout = earlier_piece("flat", "FlatLayout")(list(parameters.values()), group)
        with instrumentation.listening() as calls:
            shard = materializer.shard_of(layout)
        on_device = isinstance(shard, torch.Tensor) and shard.device.type == device_here().type
        on_meta = all(each.is_meta for each in parameters.values())
        found.append(Materialized(calls, drawn[:], shard.detach().cpu().clone() if on_device else None, on_meta))
    return found


def _judge_shards(attempt: Attempt, what: str | Shapes, in_subgroup: bool = False) -> None:
    seed, members = attempt.draw_seed(), members_of(attempt, in_subgroup)
    context = f"{_describe(what)}, {called_alone(attempt)}" if in_subgroup else _describe(what)
    results = attempt.run(probe_shards, what, seed, in_subgroup, context=context)
    values = _expected(what, seed)
    for index, rank in enumerate(members):
        for parameters, found in zip(_flat_tensors(_build(what, "cpu")), results[rank], strict=True):
            own = {name: values[name] for name in parameters}
            _judge_shard(rank, context, found, own, index, len(members), in_subgroup)


def _judge_shard(
    rank: int,
    context: str,
    found: Materialized,
    values: dict[str, torch.Tensor],
    index: int,
    world_size: int,
    in_subgroup: bool,
) -> None:
    """Judge the shard of one flat tensor.

    Args:
        rank: The rank in the world.
        context: What was tried.
        found: What the probe returned for this flat tensor.
        values: The values of its parameters, by name.
        index: The rank in the group.
        world_size: The group's.
        in_subgroup: Whether the group is smaller than the world.
    """
    if found.calls:
        evidence = f"{context}: shard_of() sends {describe_calls(found.calls)}; expected none"
        raise Wrong({rank: evidence}, "Hint: which values can a rank draw without the other ranks?")
    if found.shard is None:
        raise Wrong({rank: f"{context}: shard_of() does not return a tensor on self.device"})
    flat = torch.cat([value.flatten() for value in values.values()])
    owners = [name for name, value in values.items() for _ in range(value.numel())]
    n = -(-len(flat) // world_size)
    padded = torch.cat([flat, flat.new_zeros(n * world_size - len(flat))])
    shard, expected = found.shard, padded[index * n : (index + 1) * n]
    own_names = owners[index * n : (index + 1) * n]
    for what, value, should in (("shape", shard.shape, expected.shape), ("dtype", shard.dtype, expected.dtype)):
        if value != should:
            hint = f"Hint: which {what} does the flat tensor have, and which one does a rank's shard of it have?"
            raise Wrong({rank: f"{context}: the shard has {what} {value}; expected {should}"}, hint)
    if not torch.equal(shard, expected):
        index_in_shard = int((shard != expected).nonzero()[0])
        evidence = f"{context}: in the shard, {first_difference(shard, expected, 0.0)}"
        if index_in_shard >= len(own_names):
            raise Wrong({rank: f"{evidence}, because this element is padding"}, _HINT_ON_PADDING)
        name = own_names[index_in_shard]
        begin_of_parameter = owners.index(name) - index * n
        has_another_elements_value = bool((flat == shard[index_in_shard]).any()) or shard[index_in_shard] == 0
        hint = _HINT_ON_SLICES if has_another_elements_value else _HINT_ON_SEEDS
        hint = _HINT_ON_DTYPES if torch.equal(shard, expected.float().to(shard.dtype)) else hint
        evidence += f", which is element {index_in_shard - begin_of_parameter} of parameter {name}"
        raise Wrong({rank: evidence}, _HINT_ON_GROUPS if in_subgroup and hint == _HINT_ON_SLICES else hint)
    if extra := [name for name in found.drawn if name not in own_names and values[name].numel()]:
        evidence = f"{context}: {extra[0]} is drawn, although none of its elements are in the shard"
        raise Wrong({rank: evidence}, _HINT_ON_CALLS)
    if not found.on_meta:
        evidence = f"{context}: after shard_of(), a parameter of the module is not on the meta device any more"
        raise Wrong({rank: evidence}, "Hint: into which tensor does initialize() write?")


a_plain_model_is_materialized = on_each(_judge_shards, "Blocks")


def every_cut_is_right(attempt: Attempt) -> None:
    """Try parameters that are much smaller and much larger than a shard, fewer elements than ranks, and a subgroup."""
    size, draw = attempt.world_size, attempt.random.randint
    large = Shapes(((2,), (draw(3, 5) * size, 7), (), (draw(1, 3),)))
    small = Shapes(tuple((draw(1, 3),) for _ in range(4 * size)))
    for shapes in (*draw_shapes(attempt), large, small):
        _judge_shards(attempt, shapes)
    if size in SUBGROUPS:
        _judge_shards(attempt, "Blocks", in_subgroup=True)


def awkward_models_are_materialized(attempt: Attempt) -> None:
    for model in ("Tied", "Mixed", "Frozen", "Few", "Buffered"):
        _judge_shards(attempt, model)
        _judge_values(attempt, model)


# -- value_of


@dataclass
class Values:
    plain: list[str]  # the names for which value_of() returns a plain tensor
    values: list[dict[str, torch.Tensor]]  # these tensors, for each seed
    share_memory: bool
    same_generator: bool  # whether torch's generator is in the same state as before


def probe_values(materializer_class, what: str | Shapes, seeds: tuple[int, int], own_seed: int) -> Values:
    """Materialize every parameter and buffer, in an order of this rank's own, with two seeds."""
    module = _build(what, "meta")
    names = list(_tensors(module))
    torch.manual_seed(own_seed)
    before = torch.get_rng_state()
    values: list[dict[str, torch.Tensor]] = []
    for seed in seeds:
        materializer = materializer_class(module, fill, device_here(), seed)
        random.Random(own_seed).shuffle(names)
        values.append({name: materializer.value_of(_tensors(module)[name]) for name in names})
    plain = [
        name
        for name, value in values[0].items()
        if type(value) is torch.Tensor and value.device.type == device_here().type and not value.requires_grad
    ]
    return Values(
        plain,
        [{name: of_seed[name].detach().cpu() for name in plain} for of_seed in values],
        share_memory=len({values[0][name].untyped_storage()._cdata for name in plain}) < len(plain),
        same_generator=torch.equal(torch.get_rng_state(), before),
    )


def _judge_values(attempt: Attempt, what: str | Shapes) -> None:
    seeds, context = (attempt.draw_seed(), attempt.draw_seed()), _describe(what)
    per_rank = [(attempt.draw_seed(),) for _ in range(attempt.world_size)]
    found = attempt.run(probe_values, what, seeds, per_rank=per_rank, context=context)
    for number, seed in enumerate(seeds):
        expected = _expected(what, seed)
        for rank, result in enumerate(found):
            if missing := [name for name in expected if name not in result.plain]:
                raise Wrong({rank: f"{context}: for {missing[0]}, {_NOT_PLAIN}"}, _HINT_ON_PLAIN)
            for name, value in expected.items():
                _judge_value(rank, f"{context}, seed={seed}: {name}", result.values[number][name], value)
    for rank, result in enumerate(found):
        if not result.same_generator:
            evidence = f"{context}: after value_of(), the state of torch's random generator has changed"
            raise Wrong({rank: evidence}, "Hint: what is drawn outside of seeded()?")
        if result.share_memory:
            raise Wrong({rank: f"{context}: two values share memory"}, _HINT_ON_PLAIN)


def _judge_value(rank: int, context: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    for what, value, should in (("shape", found.shape, expected.shape), ("dtype", found.dtype, expected.dtype)):
        if value != should:
            raise Wrong({rank: f"{context} has {what} {value}; expected {should}"}, _HINT_ON_PLAIN)
    if not torch.equal(found, expected):
        raise Wrong({rank: f"{context}: {first_difference(found, expected, 0.0)}"}, _HINT_ON_SEEDS)


values_depend_on_names_alone = on_each(_judge_values, "Blocks")


# -- memory


@dataclass
class HeldBytes:
    besides: dict[str, int]  # besides each parameter while it is drawn, by its name
    peak: int
    afterwards: int
    shard: int  # of the shard alone, which must exist until the others are counted


def probe_memory(materializer_class, seed: int, most_bytes: float) -> HeldBytes:
    """Materialize this rank's shard of a whole model, twice."""
    module = _build(_LARGE, "meta")
    layout = earlier_piece("flat", "FlatLayout")(list(module.parameters()), None)
    before_bytes, besides = living_bytes(), {}

    def initialize(name: str, tensor: torch.Tensor) -> None:
        besides[name] = living_bytes() - before_bytes - tensor.nbytes
        fill_in_place(name, tensor)

    materializer_class(module, initialize, device_here(), seed).shard_of(layout)
    materializer = materializer_class(module, fill_in_place, device_here(), seed)
    # The empty tensor tells memory.peak which device to watch.
    with memory.peak(extra={"parameters": [torch.empty(0, device=device_here())]}) as peak:
        shard = materializer.shard_of(layout)
    return HeldBytes(besides, peak.peak_bytes, settled_bytes(most_bytes, before_bytes), shard.nbytes)


def one_parameter_exists_at_a_time(attempt: Attempt) -> None:
    """Allow two parameters in full, because flatten() may copy one, and the shard twice, because cat() copies it."""
    sizes = [parameter.nbytes for parameter in _build(_LARGE, "meta").parameters()]
    for_shard = {"the shard": sum(sizes) / attempt.world_size}
    twice = {"the shard and a copy": 2 * for_shard["the shard"]}
    needed = {"peak": twice | {"the largest parameter and a copy": 2 * max(sizes)}, "afterwards": for_shard}
    most = {moment: SLACK * sum(parts.values()) + 10_000 for moment, parts in needed.items()}
    found = attempt.run(probe_memory, attempt.draw_seed(), most["afterwards"])
    for rank, result in enumerate(found):
        name, nbytes = max(result.besides.items(), key=lambda item: item[1])
        if nbytes > most["afterwards"]:
            evidence = f"{_describe(_LARGE)}: while {name} is drawn, {nbytes:,} bytes are held besides it"
            raise Wrong({rank: f"{evidence}; {_allowed(most['afterwards'], for_shard)}"}, _HINT_ON_LAST)
        for moment, held_bytes, said in (
            ("peak", result.peak, "are held at once"),
            ("afterwards", result.afterwards, "are still held after shard_of()"),
        ):
            if held_bytes > most[moment]:
                evidence = f"{_describe(_LARGE)}: {held_bytes:,} bytes {said}"
                raise Wrong({rank: f"{evidence}; {_allowed(most[moment], needed[moment])}"}, _HINT_ON_MEMORY)


def _allowed(most_bytes: float, needed_bytes: dict[str, float]) -> str:
    """Say how many bytes are accepted: those that are needed, by name, and an allowance for everything small."""
    parts = [f"{nbytes:,.0f} for {name}" for name, nbytes in needed_bytes.items()]
    allowance = f"{most_bytes - sum(needed_bytes.values()):,.0f} as an allowance"
    return f"expected at most {most_bytes:,.0f} ({', '.join([*parts, allowance])})"
