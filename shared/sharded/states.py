"""State dicts of a sharded model: whose shards they hold, and the extra state of layers."""

import contextlib
import copy
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

EXTRA = "_extra_state"  # what a layer's get_extra_state() returns has a name that ends like this


class OwnShards:
    """Adds to a module whose parameters are the rank's shards: it loads only its own shards, and cannot be copied."""

    group: dist.ProcessGroup | None = None

    def get_extra_state(self) -> torch.Tensor:
        """Record whose shards a state_dict() holds."""
        return torch.tensor([dist.get_rank(self.group), dist.get_world_size(self.group)])

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Raise a RuntimeError if load_state_dict() got the shards of another rank."""
        if not torch.equal(state.cpu(), self.get_extra_state()):
            raise RuntimeError(
                f"this state_dict() holds the shards of rank {state[0]} of {state[1]}, and this is rank "
                f"{dist.get_rank(self.group)} of {dist.get_world_size(self.group)}: let each rank save and load its "
                "own, or use full_state_dict() and load_full_state_dict()"
            )

    def __reduce_ex__(self, protocol):
        raise RuntimeError(
            f"a {type(self).__name__} model cannot be copied or pickled, because its parameters have no memory between "
            "steps: build and wrap the module a second time, and give it the values with load_full_state_dict(). "
            "To average weights, update the parameters() of the second model, which are shards as well"
        )


def expect_no_replacements(wrapper: nn.Module) -> None:
    """Raise a RuntimeError inside functional_call(), which replaces a wrapper's parameters for one forward.

    It sets attributes with the names of the parameters, which are numbers here. But shards are no parameters of layers.
    """
    if wrapper._parameters or any(name.isdigit() for name in vars(wrapper)):
        raise RuntimeError(
            f"functional_call() changes nothing in a {type(wrapper).__name__} model, because its parameters() are "
            "shards: call it with the module itself, before you wrap it, or set values by load_full_state_dict()"
        )


@contextlib.contextmanager
def without_extra_state(module: nn.Module) -> Iterator[dict[str, object]]:
    """Leave the extra state of layers out of module.state_dict(). Yields a dict, which gets copies of it by name."""
    extra = {}

    def move(_module, state: dict, _prefix, _metadata) -> None:
        extra.update({name: copy.deepcopy(state.pop(name)) for name in list(state) if name.endswith(EXTRA)})

    handle = module.register_state_dict_post_hook(move)
    try:
        yield extra
    finally:
        handle.remove()


def extra_state_in(state: dict[str, object], module: nn.Module) -> dict[str, object]:
    """Return the part of a full state that is not for tensors.

    Raises:
        ValueError: if the state belongs to another module.
    """
    extra = {name: value for name, value in state.items() if name.endswith(EXTRA)}
    own = {name for name in module.state_dict(keep_vars=True) if name.endswith(EXTRA)}
    if different := sorted(own ^ extra.keys()):
        raise ValueError(f"this state belongs to another module: {different} are not in both")
    return extra


def load_extra_state(module: nn.Module, extra: dict[str, object]) -> None:
    """Give each layer its extra state back."""
    for name, value in extra.items():
        module.get_submodule(name.removesuffix(EXTRA).rstrip(".")).set_extra_state(value)


def expect_no_extra_state(module: nn.Module) -> None:
    """Raise a ValueError if a layer has extra state, which a sharded state cannot hold."""
    if extra := sorted(name for name in module.state_dict(keep_vars=True) if name.endswith(EXTRA)):
        raise ValueError(f"a sharded state cannot hold {extra}: use full_state_dict(), which does")
