"""Which layers and parameters of a model belong to which stage of a pipeline."""

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from shared.guards.alarms import Alarm
from shared.guards.guard import Guard
from shared.guards.tensors import descriptions_of, reject_shared_memory
from shared.sharded.states import OwnShards

NamedLayers = Sequence[tuple[str, nn.Module]]


def split_evenly(count: int, parts: int) -> list[range]:
    """Split the indices 0 to count − 1 into consecutive ranges, whose lengths differ by 1 at most."""
    bounds = [count * part // parts for part in range(parts + 1)]
    return [range(bounds[part], bounds[part + 1]) for part in range(parts)]


def named_layers(layers: Sequence[nn.Module] | nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield each layer with the name that it has, or would have in an nn.Sequential."""
    if isinstance(layers, nn.Module):
        yield from layers.named_children()
    else:
        yield from ((str(index), layer) for index, layer in enumerate(layers))


def own_parameters(layers: NamedLayers, own: Sequence[NamedLayers]) -> dict[str, nn.Parameter]:
    """Return the parameters of a stage's own layers. A tied one has the first of its names in the whole model."""
    names: dict[nn.Parameter, str] = {}
    for path, layer in layers:
        for name, parameter in layer.named_parameters():
            names.setdefault(parameter, f"{path}.{name}")
    return {names[parameter]: parameter for part in own for _, layer in part for parameter in layer.parameters()}


def tied_parameters(
    layers: NamedLayers, parts: Sequence[range], stage: int, stages: int
) -> list[tuple[nn.Parameter, list[int]]]:
    """Return each parameter that a stage shares with others, and all stages that have it, in order."""
    holders: dict[nn.Parameter, set[int]] = {}
    for position, part in enumerate(parts):
        for index in part:
            for parameter in layers[index][1].parameters():
                holders.setdefault(parameter, set()).add(position % stages)
    shared_by = [(parameter, sorted(found)) for parameter, found in holders.items()]
    return [(parameter, found) for parameter, found in shared_by if len(found) > 1 and stage in found]


def expect_same_layers(layers: NamedLayers, group: dist.ProcessGroup | None) -> None:
    """Raise a ValueError on every rank if they have different layers, or different values of a tied parameter.

    Parameters that share memory without being the same object would be separate on two stages, so they are rejected.

    The copies of a tied parameter get the same gradients, so they stay equal only if they begin as equal ones.

    Communication: one all-gather of two integers, which the ledger does not see.
    """
    expect_no_wrappers(layers, group)
    uses = [(f"{path}.{name}", p) for path, layer in layers for name, p in layer.named_parameters()]
    count = Counter(parameter for _, parameter in uses)
    reject_shared_memory({name: parameter for parameter, name in {p: name for name, p in uses}.items()})
    lines = descriptions_of(dict(uses))[0]
    lines += [
        f"{name}, which several layers share, has the sum {parameter.detach().sum(dtype=torch.float64):.17g}"
        for name, parameter in uses
        if count[parameter] > 1 and not parameter.is_meta
    ]
    device = next((p.device for _, p in uses if not p.is_meta), torch.accelerator.current_accelerator())
    Alarm(group).compare(lines, device or torch.device("cpu"))


def expect_no_wrappers(layers: NamedLayers, group: dist.ProcessGroup | None) -> None:
    """Raise a ValueError if a layer communicates with other stages, which have no such layer, and never answer."""
    stages = {*dist.get_process_group_ranks(group or dist.group.WORLD)}
    for path, layer in layers:
        for name, module in layer.named_modules():
            if isinstance(guard := getattr(module, "guard", None), Guard):
                own = guard.alarm.group
            elif isinstance(module, OwnShards):
                own = module.group
            elif isinstance(module, nn.parallel.DistributedDataParallel):
                own = module.process_group
            else:
                continue
            if len(stages & {*dist.get_process_group_ranks(own or dist.group.WORLD)}) > 1:
                raise ValueError(
                    f"layer {'.'.join(filter(None, (path, name)))!r} is a {type(module).__name__}, whose ranks are "
                    "stages of this pipeline, and only one of them has this layer: give the Pipeline plain layers, or "
                    "pass the wrapper a group= of ranks that have the same stage"
                )


def expect_unchanged(chunks: Sequence[nn.Module], own: dict[str, nn.Parameter]) -> None:
    """Raise a RuntimeError if the layers of a stage do not have the parameters that they had when it was built."""
    now = {parameter for chunk in chunks for parameter in chunk.parameters()}
    if different := now.symmetric_difference(own.values()):
        names = [name for name, parameter in own.items() if parameter in different]
        raise RuntimeError(
            f"parameters were replaced, added or removed after the Pipeline was built, here {names or 'added'}: "
            "change the layers first, and build the Pipeline again"
        )
