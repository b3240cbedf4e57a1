"""What a sharded optimizer can run on: parameters with memory of their own, and updates of each element by itself."""

from collections.abc import Callable
from itertools import chain

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from shared.guards.tensors import numbered, reject_shared_memory

_NOT_OF_A_CLASS = {"params", "param_names", "parts", "initial_lr", "max_lr", "min_lr", "swa_lr"}
_NOT_OF_A_CLASS |= {"base_momentum", "max_momentum"}
Divide = Callable[[torch.Tensor], list[list[torch.Tensor]]]  # divides elements into parameters, per optimizer


def unshared(params) -> list:
    """List an optimizer's parameters or param groups. Raises ValueError if some of them share memory."""
    params = [{**group, "params": list(group["params"])} if isinstance(group, dict) else group for group in params]
    reject_shared_memory(numbered({id(tensor): tensor for tensor in tensors_of(params)}.values()))
    return params


def all_parameters_of(module: nn.Module, params) -> list:
    """List an optimizer's parameters or param groups.

    Raises:
        ValueError: if they are not the module's, some of the module's trainable parameters are missing, or one of them
            shares memory with a buffer.
    """
    params = [{**group, "params": list(group["params"])} if isinstance(group, dict) else group for group in params]
    reject_shared_memory(dict(chain(module.named_parameters(), module.named_buffers())))
    named = {id(parameter): name for name, parameter in module.named_parameters()}
    given = tensors_of(params)
    for index, parameter in enumerate(given):
        if id(parameter) not in named:
            raise ValueError(
                f"parameter #{index} of shape {list(parameter.shape)} is not in the module: pass the module "
                "that owns all parameters of the optimizer"
            )
    ids = set(map(id, given))
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and id(parameter) not in ids:
            raise ValueError(
                f"parameter {name!r} of the module is missing: pass all of its trainable parameters, or freeze it first"
            )
    return params


def tensors_of(params: list) -> list[torch.Tensor]:
    """Return the parameters in a list of parameters, pairs of a name and a parameter, or param groups."""
    flat = chain.from_iterable(group["params"] if isinstance(group, dict) else [group] for group in params)
    return [entry[1] if isinstance(entry, tuple) else entry for entry in flat]


def reject_whole_tensor_updates(optimizer_cls: Callable, defaults: dict) -> None:
    """Raise a ValueError if an optimizer updates a shard in another way than the same elements of a whole parameter.

    It trains 12 elements for two steps, as one parameter, and as two pieces in optimizers of their own, as ranks do.
    """
    name = getattr(optimizer_cls, "__name__", str(optimizer_cls))
    try:
        same = _agree(optimizer_cls, defaults, lambda v: [[v.view(3, 4)]], lambda v: [[v[:5]], [v[5:]]])
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} cannot update shards of parameters: {error}") from error
    if not same:
        raise ValueError(
            f"{name} does not update each element by itself, so a shard would get another update: "
            "use an optimizer such as SGD or AdamW, or data parallelism without shards"
        )


def reject_other_settings(param_groups: list[dict], defaults: dict) -> None:
    """Raise a ValueError if the param groups of a state dict are those of another optimizer's class.

    A group may lack settings that are younger than the state dict, and have settings of a scheduler.
    """
    for group in param_groups:
        missing, others = defaults.keys() - group.keys(), group.keys() - defaults.keys() - _NOT_OF_A_CLASS
        if missing and others:
            raise ValueError(
                f"this state belongs to another optimizer: it has {', '.join(sorted(others))}, and lacks "
                f"{', '.join(sorted(missing))}. Load it into an optimizer of the class that has saved it"
            )


def reject_joint_updates(optimizer_cls: Callable, defaults: dict) -> None:
    """Raise a ValueError if a parameter's update depends on other parameters, of which another rank has others.

    It trains two parameters for two steps, in one optimizer and in one each.
    """
    name = getattr(optimizer_cls, "__name__", str(optimizer_cls))
    try:
        same = _agree(optimizer_cls, defaults, lambda v: [[v[:5], v[5:]]], lambda v: [[v[:5]], [v[5:]]])
    except (TypeError, ValueError, RuntimeError):
        same = False  # LBFGS, for example, needs a closure
    if not same:
        raise ValueError(
            f"{name} does not update each parameter by itself. Here, ranks have different parameters, so they would "
            "update differently those that all of them have: use an optimizer such as SGD or AdamW"
        )


def _agree(optimizer_cls: Callable, defaults: dict, *ways: Divide) -> bool:
    """Train the same elements in two ways, and compare the results."""

    def trained(divide: Divide) -> torch.Tensor:
        values = torch.linspace(-1, 1, 12, device="cpu")
        lists = [[nn.Parameter(piece.clone()) for piece in pieces] for pieces in divide(values)]
        for pieces in lists:
            optimizer = optimizer_cls(pieces, **defaults)
            for scale in (1.0, 3.0):
                for piece in pieces:
                    piece.grad = scale * (piece.detach().square() + 0.1)
                optimizer.step()
        return torch.cat([piece.detach().flatten() for pieces in lists for piece in pieces])

    with torch.random.fork_rng(devices=[]), _disable_current_modes():  # No one should count what a trial allocates.
        return torch.allclose(*map(trained, ways), rtol=1e-4, atol=1e-6)
